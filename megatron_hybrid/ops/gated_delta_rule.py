"""The gated delta rule, chunked by its WY form (Yang et al. 2024, arXiv 2412.06464, section 3)."""

from __future__ import annotations

import torch

from megatron_hybrid.ops.checks import (
    check_rows,
    check_shape,
    compute_dtype,
    pad_rows,
    states_or_zeros,
    without_autocast,
)
from megatron_hybrid.ops.chunk_grid import ChunkGrid
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.scan import decay_matrix, ragged_scan

L2NORM_EPS = 1e-6
"""Added to the squared norm of q and k, as flash-linear-attention and transformers do."""


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
        beta_TH: writing strengths `[T, H]`.
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
    N = k_THN.shape[-1]
    shape = (layout.num_sequences, v_THP.shape[1], N, v_THP.shape[2])
    states_RHNP = states_or_zeros(
        "gated_delta_rule", initial_states_RHNP, shape, "[R, H, N, P]", like=v_THP
    )
    dtype = compute_dtype(v_THP)
    q_f, k_f, v_f, g_f, beta_f = (t.to(dtype) for t in (q_THN, k_THN, v_THP, g_TH, beta_TH))
    if use_qk_l2norm:
        q_f, k_f = (t * (t.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt() for t in (q_f, k_f))
    q_f = q_f * (N**-0.5 if scale is None else scale)
    o_THP, final_RHNP, captured_nHNP = ragged_scan(
        _step, _chunked, (q_f, k_f, v_f, g_f, beta_f), states_RHNP, layout, chunk_size
    )
    return pad_rows(o_THP.to(v_THP.dtype), layout), final_RHNP, captured_nHNP


def _step(
    q_RHN: torch.Tensor,
    k_RHN: torch.Tensor,
    v_RHP: torch.Tensor,
    g_RH: torch.Tensor,
    beta_RH: torch.Tensor,
    S_RHNP: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each of R sequences: the recurrence as it is written."""
    repeats = v_RHP.shape[1] // k_RHN.shape[1]
    q_RH1N, k_RH1N = (t.repeat_interleave(repeats, dim=1).unsqueeze(2) for t in (q_RHN, k_RHN))
    decay_RH11 = g_RH.exp()[..., None, None]
    delta_RH1P = (v_RHP.unsqueeze(2) - (k_RH1N @ S_RHNP) * decay_RH11) * beta_RH[..., None, None]
    S_RHNP = (S_RHNP * decay_RH11).addcmul_(k_RH1N.mT, delta_RH1P)
    return (q_RH1N @ S_RHNP).squeeze(2), S_RHNP


def _chunked(
    q_THN: torch.Tensor,
    k_THN: torch.Tensor,
    v_THP: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    S_RHNP: torch.Tensor,
    grid: ChunkGrid,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solve each chunk for what its rows write, then carry the states through the chunks.

    With c the running sum of g in a chunk and S0 the state it starts from, row i writes
    w_i = beta_i (v_i - exp(c_i) k_i S0 - sum_{j < i} exp(c_i - c_j) (k_i . k_j) w_j) into the
    state. That is a unit lower triangular system; its solution is affine in S0, w = U - W S0, so
    U and W are solved for all chunks and heads at once and only S0 is sequential.
    """
    q_SKLN, k_SKLN = (grid.pad(t).transpose(1, 2) for t in (q_THN, k_THN))
    v_SHLP = grid.pad(v_THP).transpose(1, 2)
    g_SHL, beta_SHL1 = grid.pad(g_TH).transpose(1, 2), grid.pad(beta_TH).transpose(1, 2)[..., None]
    P, dtype = v_SHLP.shape[-1], v_SHLP.dtype
    repeats = v_SHLP.shape[1] // k_SKLN.shape[1]

    cum_SHL = g_SHL.double().cumsum(-1)
    decay_SHLL = decay_matrix(cum_SHL, dtype)
    reach_SHL1 = cum_SHL.exp().to(dtype).unsqueeze(-1)
    system_SHLL = _per_head(k_SKLN @ k_SKLN.mT, repeats) * decay_SHLL * beta_SHL1
    k_SHLN = _per_head(k_SKLN, repeats)
    sources_SHLX = torch.cat([v_SHLP * beta_SHL1, k_SHLN * (beta_SHL1 * reach_SHL1)], dim=-1)
    # Only the part strictly below the diagonal is read. Solved as X A^T = B^T, which LAPACK's
    # column-major order takes without a copy: half the time of A X = B.
    U_W_SHLX = torch.linalg.solve_triangular(
        system_SHLL.mT, sources_SHLX.mT, upper=True, left=False, unitriangular=True
    ).mT
    U_SHLP, W_SHLN = U_W_SHLX[..., :P], U_W_SHLX[..., P:]

    to_end_SHL1 = (cum_SHL[..., -1:] - cum_SHL).exp().to(dtype).unsqueeze(-1)
    decay_SH11 = cum_SHL[..., -1].exp().to(dtype)[..., None, None]
    start_SHNP, written_SHLP, final_RHNP = grid.recur(
        S_RHNP, (U_SHLP, W_SHLN, k_SHLN * to_end_SHL1, decay_SH11), _next_state
    )

    scores_SHLL = _per_head(q_SKLN @ k_SKLN.mT, repeats) * decay_SHLL
    o_SHLP = scores_SHLL @ written_SHLP + (_per_head(q_SKLN, repeats) * reach_SHL1) @ start_SHNP

    captured_nHNP = S_RHNP[:0]
    if len(chunks_n := grid.capture_chunks):
        # A row writes the same whatever comes behind it, so a capture is a sum over fewer rows.
        decay_nH11, weight_nHL = grid.capture_decays(cum_SHL, dtype)
        added_nHNP = (k_SHLN[chunks_n] * weight_nHL.unsqueeze(-1)).mT @ written_SHLP[chunks_n]
        captured_nHNP = torch.addcmul(added_nHNP, start_SHNP[chunks_n], decay_nH11)
    return grid.unpad(o_SHLP.transpose(1, 2)), final_RHNP, captured_nHNP


def _next_state(
    state_RHNP: torch.Tensor,
    U_RHLP: torch.Tensor,
    W_RHLN: torch.Tensor,
    k_to_end_RHLN: torch.Tensor,
    decay_RH11: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    written_RHLP = U_RHLP - W_RHLN @ state_RHNP
    return torch.addcmul(k_to_end_RHLN.mT @ written_RHLP, state_RHNP, decay_RH11), written_RHLP


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
