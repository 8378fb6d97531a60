"""What the delta rules share, whether a decay belongs to a whole row or to each key channel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_hybrid.ops.checks import compute_dtype, pad_rows, states_or_zeros
from megatron_hybrid.ops.chunk_grid import ChunkGrid
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.scan import ragged_scan

L2NORM_EPS = 1e-6
"""Added to the squared norm of q and k, as flash-linear-attention and transformers do."""


def delta_rule(
    op: str,
    chunked: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    inputs_T: tuple[torch.Tensor, ...],
    initial_states_RHNP: torch.Tensor | None,
    layout: RaggedLayout,
    chunk_size: int,
    scale: float | None,
    use_qk_l2norm: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The delta rule `op`, from checked inputs q, k, v, g and beta of any dtype.

    g is `[T, H, N]`, or `[T, H, 1]` where all key channels share a decay; all else is as in
    `gated_delta_rule`. `chunked` is the scan that `ragged_scan` needs.
    """
    q_THN, k_THN, v_THP, g_TH, beta_TH = inputs_T
    N = k_THN.shape[-1]
    shape = (layout.num_sequences, v_THP.shape[1], N, v_THP.shape[2])
    states_RHNP = states_or_zeros(op, initial_states_RHNP, shape, "[R, H, N, P]", like=v_THP)
    dtype = compute_dtype(v_THP)
    q_f, k_f, v_f, g_f, beta_f = (t.to(dtype) for t in (q_THN, k_THN, v_THP, g_TH, beta_TH))
    if use_qk_l2norm:
        q_f, k_f = (t * (t.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt() for t in (q_f, k_f))
    q_f = q_f * (N**-0.5 if scale is None else scale)
    o_THP, final_RHNP, captured_nHNP = ragged_scan(
        _step,
        chunked,
        (q_f, k_f, v_f, g_f, beta_f),
        states_RHNP,
        layout,
        lambda: layout.chunk_grid(chunk_size, states_RHNP.device),
    )
    return pad_rows(o_THP.to(v_THP.dtype), layout), final_RHNP, captured_nHNP


def _step(
    q_RHN: torch.Tensor,
    k_RHN: torch.Tensor,
    v_RHP: torch.Tensor,
    g_RHN: torch.Tensor,
    beta_RH: torch.Tensor,
    S_RHNP: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each of R sequences: the recurrence as it is written."""
    repeats = v_RHP.shape[1] // k_RHN.shape[1]
    q_RH1N, k_RH1N = (t.repeat_interleave(repeats, dim=1).unsqueeze(2) for t in (q_RHN, k_RHN))
    decay_RHN1 = g_RHN.exp().unsqueeze(-1)
    kept_RH1P = (k_RH1N * decay_RHN1.mT) @ S_RHNP
    delta_RH1P = (v_RHP.unsqueeze(2) - kept_RH1P) * beta_RH[..., None, None]
    S_RHNP = (S_RHNP * decay_RHN1).addcmul_(k_RH1N.mT, delta_RH1P)
    return (q_RH1N @ S_RHNP).squeeze(2), S_RHNP


def solve_and_recur(
    keys_SHLL: torch.Tensor,
    scores_SHLL: torch.Tensor,
    q_SHLN: torch.Tensor,
    k_SHLN: torch.Tensor,
    v_SHLP: torch.Tensor,
    cum_SHLN: torch.Tensor,
    beta_SHL1: torch.Tensor,
    S_RHNP: torch.Tensor,
    grid: ChunkGrid,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solve each chunk for what its rows write, then carry the states through the chunks.

    With c the running sum of g in a chunk and S0 the state it starts from, row i writes
    w_i = beta_i (v_i - (k_i exp(c_i)) S0 - sum_{j < i} ((k_i exp(c_i - c_j)) . k_j) w_j) into the
    state. That is a unit lower triangular system; its solution is affine in S0, w = U - W S0, so
    U and W are solved for all chunks and heads at once and only S0 is sequential.

    Args:
        keys_SHLL, scores_SHLL: (k_i exp(c_i - c_j)) . k_j and (q_i exp(c_i - c_j)) . k_j; of keys,
            what is not strictly below the diagonal is not read, of scores it is 0 above it.
        q_SHLN, k_SHLN, v_SHLP, beta_SHL1: the inputs on the grid.
        cum_SHLN: c in float64, `[S, H, L, N]` or `[S, H, L, 1]`.
        S_RHNP: initial states.
        grid: the chunks.

    Returns:
        Outputs of the tokens, final states and captured states.
    """
    P, dtype = v_SHLP.shape[-1], v_SHLP.dtype
    reach_SHLN = cum_SHLN.exp().to(dtype)
    sources_SHLX = torch.cat([v_SHLP * beta_SHL1, k_SHLN * (beta_SHL1 * reach_SHLN)], dim=-1)
    # Only the part strictly below the diagonal is read. Solved as X A^T = B^T, which LAPACK's
    # column-major order takes without a copy: half the time of A X = B.
    U_W_SHLX = torch.linalg.solve_triangular(
        (keys_SHLL * beta_SHL1).mT, sources_SHLX.mT, upper=True, left=False, unitriangular=True
    ).mT
    U_SHLP, W_SHLN = U_W_SHLX[..., :P], U_W_SHLX[..., P:]

    to_end_SHLN = (cum_SHLN[:, :, -1:] - cum_SHLN).exp().to(dtype)
    decay_SHN1 = cum_SHLN[:, :, -1].exp().to(dtype).unsqueeze(-1)
    start_SHNP, written_SHLP, final_RHNP = grid.recur(
        S_RHNP, (U_SHLP, W_SHLN, k_SHLN * to_end_SHLN, decay_SHN1), _next_state
    )
    o_SHLP = scores_SHLL @ written_SHLP + (q_SHLN * reach_SHLN) @ start_SHNP

    captured_nHNP = S_RHNP[:0]
    if len(chunks_n := grid.capture_chunks):
        # A row writes the same whatever comes behind it, so a capture is a sum over fewer rows.
        decay_nH1N, weight_nHLN = grid.capture_decays(cum_SHLN, dtype)
        added_nHNP = (k_SHLN[chunks_n] * weight_nHLN).mT @ written_SHLP[chunks_n]
        captured_nHNP = torch.addcmul(added_nHNP, start_SHNP[chunks_n], decay_nH1N.mT)
    return grid.unpad(o_SHLP.transpose(1, 2)), final_RHNP, captured_nHNP


def _next_state(
    state_RHNP: torch.Tensor,
    U_RHLP: torch.Tensor,
    W_RHLN: torch.Tensor,
    k_to_end_RHLN: torch.Tensor,
    decay_RHN1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    written_RHLP = U_RHLP - W_RHLN @ state_RHNP
    return torch.addcmul(k_to_end_RHLN.mT @ written_RHLP, state_RHNP, decay_RHN1), written_RHLP
