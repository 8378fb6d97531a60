"""The gated delta rule, chunked by its WY form (Yang et al. 2024, arXiv 2412.06464, section 3)."""

from __future__ import annotations

import torch

from megatron_hybrid.ops.checks import check_rows, check_shape, without_autocast
from megatron_hybrid.ops.chunk_grid import ChunkGrid
from megatron_hybrid.ops.delta_rule import delta_rule, solve_and_recur
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.scan import decay_matrix


@without_autocast
def gated_delta_rule(
    q_THN: torch.Tensor,
    k_THN: torch.Tensor,
    v_THP: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    initial_states_RHNP: torch.Tensor | None,
    layout: RaggedLayout,
    chunk_size: int = 64,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """S' = exp(g_t) S_{t-1};  S_t = S' + k_t (x) beta_t (v_t - k_t S');  o_t = scale q_t S_t.

    Args:
        q_THN, k_THN: `[T, H_qk, N]`; H_qk divides the heads H of v, and each head of q and k serves
            H / H_qk consecutive heads of v.
        v_THP: values `[T, H, P]`.
        g_TH: log decays `[T, H]`, at most 0.
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
    _check(q_THN, k_THN, v_THP, g_TH, beta_TH, layout)
    return delta_rule(
        "gated_delta_rule",
        _chunked,
        (q_THN, k_THN, v_THP, g_TH.unsqueeze(-1), beta_TH),
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
    g_TH1: torch.Tensor,
    beta_TH: torch.Tensor,
    S_RHNP: torch.Tensor,
    grid: ChunkGrid,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One decay per row: products of queries and keys first, then times their decays."""
    q_SKLN, k_SKLN = (grid.pad(t).transpose(1, 2) for t in (q_THN, k_THN))
    cum_SHL1 = grid.pad(g_TH1).transpose(1, 2).double().cumsum(2)
    decay_SHLL = decay_matrix(cum_SHL1.squeeze(-1), v_THP.dtype)
    repeats = v_THP.shape[1] // k_THN.shape[1]
    return solve_and_recur(
        _per_head(k_SKLN @ k_SKLN.mT, repeats) * decay_SHLL,
        _per_head(q_SKLN @ k_SKLN.mT, repeats) * decay_SHLL,
        _per_head(q_SKLN, repeats),
        _per_head(k_SKLN, repeats),
        grid.pad(v_THP).transpose(1, 2),
        cum_SHL1,
        grid.pad(beta_TH).transpose(1, 2).unsqueeze(-1),
        S_RHNP,
        grid,
    )


def _per_head(x_SK: torch.Tensor, repeats: int) -> torch.Tensor:
    """`[S, H_qk, ...]` -> `[S, H, ...]`: each head of q and k serves `repeats` heads of v."""
    return x_SK if repeats == 1 else x_SK.repeat_interleave(repeats, dim=1)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    layout: RaggedLayout,
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        check_rows(name, tensor, layout)
    check_shape("v", v, (layout.num_rows, None, None), "[T, H, P]")
    T, H, _ = v.shape
    check_shape("k", k, (T, None, None), "[T, H_qk, N]")
    check_shape("q", q, tuple(k.shape), "[T, H_qk, N]")
    check_shape("g", g, (T, H), "[T, H]")
    check_shape("beta", beta, (T, H), "[T, H]")
    if H % k.shape[1]:
        raise ValueError(f"{H} heads of v cannot be shared out evenly to {k.shape[1]} of q and k")
