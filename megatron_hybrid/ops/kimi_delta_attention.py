"""Kimi Delta Attention, chunked (Kimi Team 2025, arXiv 2510.26692, section 3)."""

from __future__ import annotations

import torch

from megatron_hybrid.ops.checks import check_rows, check_shape, without_autocast
from megatron_hybrid.ops.chunk_grid import ChunkGrid
from megatron_hybrid.ops.delta_rule import delta_rule, solve_and_recur
from megatron_hybrid.ops.ragged import RaggedLayout

SUB_BLOCK = 8
"""Rows whose decays among each other are written out channel by channel."""


@without_autocast
def kimi_delta_attention(
    q_THN: torch.Tensor,
    k_THN: torch.Tensor,
    v_THP: torch.Tensor,
    g_THN: torch.Tensor,
    beta_TH: torch.Tensor,
    initial_states_RHNP: torch.Tensor | None,
    layout: RaggedLayout,
    chunk_size: int = 64,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """S' = Diag(exp(g_t)) S_{t-1};  S_t = S' + k_t (x) beta_t (v_t - k_t S');  o_t = scale q_t S_t.

    The gated delta rule with a decay of its own for each key channel.

    Args:
        q_THN, k_THN: `[T, H, N]`.
        v_THP: values `[T, H, P]`.
        g_THN: log decays `[T, H, N]`, at most 0; best in fp32.
        beta_TH: writing strengths `[T, H]`, from 0 to 1, or to 2 for negative eigenvalues.
        initial_states_RHNP: fp32 or bf16 `[R, H, N, P]`, None for zeros. Never written.
        layout: lengths, positions and captures of the sequences.
        chunk_size: rows of a chunk; the result does not depend on it but for rounding.
        scale: factor of q, N ** -0.5 by default.
        use_qk_l2norm: divide each row of q and k by its length first.

    Returns:
        o `[T, H, P]` in the dtype of v (zeros in padding rows); final states `[R, H, N, P]` and
        captured states `[n, H, N, P]`, both fp32. All arithmetic is fp32, whatever the inputs are
        (float64 for float64 inputs). Captures do not change o or the final states in any bit.

    Raises:
        TypeError: fp16 initial states, or inputs that are not floating-point.
        ValueError: shapes that do not fit the layout or each other.
    """
    for name, x in (("q", q_THN), ("k", k_THN), ("v", v_THP), ("g", g_THN), ("beta", beta_TH)):
        check_rows(name, x, layout)
    check_shape("k", k_THN, (layout.num_rows, None, None), "[T, H, N]")
    for name, x in (("q", q_THN), ("g", g_THN)):
        check_shape(name, x, tuple(k_THN.shape), "[T, H, N]")
    check_shape("v", v_THP, (*k_THN.shape[:2], None), "[T, H, P]")
    check_shape("beta", beta_TH, tuple(k_THN.shape[:2]), "[T, H]")
    return delta_rule(
        "kimi_delta_attention",
        _chunked,
        (q_THN, k_THN, v_THP, g_THN, beta_TH),
        initial_states_RHNP,
        layout,
        chunk_size,
        scale,
        use_qk_l2norm,
    )


def _chunked(
    q_THN: torch.Tensor,
    k_THN: torch.Tensor,
    v_THP: torch.Tensor,
    g_THN: torch.Tensor,
    beta_TH: torch.Tensor,
    S_RHNP: torch.Tensor,
    grid: ChunkGrid,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q_SHLN, k_SHLN, v_SHLP = (grid.pad(t).transpose(1, 2) for t in (q_THN, k_THN, v_THP))
    cum_SHLN = grid.pad(g_THN).transpose(1, 2).double().cumsum(2)
    keys_SHLL, scores_SHLL = _decayed_products(k_SHLN, q_SHLN, k_SHLN, cum_SHLN)
    beta_SHL1 = grid.pad(beta_TH).transpose(1, 2).unsqueeze(-1)
    return solve_and_recur(
        keys_SHLL, scores_SHLL, q_SHLN, k_SHLN, v_SHLP, cum_SHLN, beta_SHL1, S_RHNP, grid
    )


def _decayed_products(
    x_SHLN: torch.Tensor, y_SHLN: torch.Tensor, k_SHLN: torch.Tensor, cum_SHLN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x_i exp(c_i - c_j)) . k_j and (y_i exp(c_i - c_j)) . k_j for i >= j, 0 above the diagonal.

    exp(c_i) exp(-c_j) would overflow. Cut at a row m between j and i, exp(c_i - c_m) and
    exp(c_m - c_j) are both at most 1: a row of sub-blocks takes its own start for m, and the
    decays of the keys before it grow from one row to the next. Inside a sub-block there is no m for
    all pairs, so there they are written out.
    """
    L, dtype = k_SHLN.shape[2], k_SHLN.dtype

    def decay(later, earlier):
        return (later - earlier).to(dtype).exp()

    rows = []
    before_SHjN, cut_SH1N = k_SHLN[:, :, :0], cum_SHLN[:, :, :1]
    for i in range(0, L, SUB_BLOCK):
        x_SHlN, y_SHlN, k_SHlN, cum_SHlN = (
            t[:, :, i : i + SUB_BLOCK] for t in (x_SHLN, y_SHLN, k_SHLN, cum_SHLN)
        )
        size = k_SHlN.shape[2]
        xy_SHlN = torch.cat([x_SHlN, y_SHlN], dim=2)
        far_SHxj = (xy_SHlN * decay(cum_SHlN, cut_SH1N).repeat(1, 1, 2, 1)) @ before_SHjN.mT

        future = torch.ones(size, size, dtype=torch.bool, device=k_SHLN.device).triu_(1)
        diff_SHllN = (cum_SHlN.unsqueeze(3) - cum_SHlN.unsqueeze(2)).to(dtype)
        decay_SHllN = diff_SHllN.masked_fill(future.unsqueeze(-1), -torch.inf).exp()
        xy_SHlN2 = torch.stack([x_SHlN, y_SHlN], dim=-1)
        near_SHll2 = (decay_SHllN * k_SHlN.unsqueeze(2)) @ xy_SHlN2

        near_SHxl = near_SHll2.permute(0, 1, 4, 2, 3).flatten(2, 3)
        behind_SHx = near_SHxl.new_zeros(*near_SHxl.shape[:3], L - i - size)
        rows.append(torch.cat([far_SHxj, near_SHxl, behind_SHx], dim=-1).unflatten(2, (2, size)))

        end_SH1N = cum_SHlN[:, :, -1:]
        before_SHjN = torch.cat(
            [before_SHjN * decay(end_SH1N, cut_SH1N), k_SHlN * decay(end_SH1N, cum_SHlN)], dim=2
        )
        cut_SH1N = end_SH1N
    products_SH2LL = torch.cat(rows, dim=3)
    return products_SH2LL[:, :, 0], products_SH2LL[:, :, 1]
