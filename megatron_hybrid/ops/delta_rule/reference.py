"""The delta rules, chunked by their WY form (Yang et al. 2024, arXiv 2412.06464, section 3).

The gated one has one decay per row, Kimi Delta Attention (arXiv 2510.26692, section 3) one per key
channel.
"""

from collections.abc import Callable
from functools import partial

import torch

from megatron_hybrid.ops.checks import compute_dtype, pad_rows, tokens_of, without_autocast
from megatron_hybrid.ops.chunk_grid import ChunkGrid
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.scan import decay_matrix, ragged_scan
from megatron_hybrid.ops.slot_states import SlotStates, states_or_zeros

L2NORM_EPS = 1e-6
"""Added to the squared norm of q and k, as flash-linear-attention and transformers do."""

SUB_BLOCK = 8
"""Rows whose decays among each other Kimi Delta Attention writes out channel by channel."""


@without_autocast
def delta_rule(
    q_THN: torch.Tensor,
    k_THN: torch.Tensor,
    v_THP: torch.Tensor,
    g: torch.Tensor,
    beta_TH: torch.Tensor,
    initial_states_RHNP: torch.Tensor | SlotStates | None,
    layout: RaggedLayout,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute S' = Diag(exp(g_t)) S_{t-1}; S_t = S' + k_t (x) beta_t (v_t - k_t S'); o_t = q_t S_t.

    Rows of q and k are divided by their lengths first, and those of q by sqrt(N).

    This function also takes states `[R, H, N, P]`, and returns final and captured ones after y: see
    `in_slots`.

    Args:
        q_THN, k_THN: `[T, H_qk, N]`; H_qk divides the heads H of v, and each head of q and k serves
            H / H_qk consecutive heads of v. Of Kimi Delta Attention they are as many.
        v_THP: values `[T, H, P]`.
        g: log decays, at most 0: `[T, H]` of the gated delta rule; `[T, H, N]`, best in fp32, of
            Kimi Delta Attention.
        beta_TH: writing strengths `[T, H]`, from 0 to 1, or to 2 for negative eigenvalues.
        initial_states_RHNP: `SlotStates` `[H, N, P]`, fp32 or bf16; None starts from zeros and
            keeps nothing.
        layout: lengths, positions and captures of the sequences.
        chunk_size: rows of a chunk; the result does not depend on it but for rounding. With 1,
            token by token, all cuts give the same bits; gradients are those of chunks.

    Returns:
        o `[T, H, P]` in the dtype of v, zeros in padding rows. All arithmetic is fp32, whatever the
        inputs are (float64 for float64 inputs). Captures change neither o nor the states
        in any bit.

    Raises:
        TypeError: fp16 states, or inputs that are not floating-point.
        ValueError: shapes that do not fit the layout or each other.
    """
    is_gated, N = g.dim() == 2, k_THN.shape[-1]
    g_THN = g.unsqueeze(-1) if is_gated else g
    shape = (layout.num_sequences, v_THP.shape[1], N, v_THP.shape[2])
    states_RHNP = states_or_zeros(initial_states_RHNP, shape, like=v_THP)
    dtype = compute_dtype(v_THP)
    q_f, k_f, v_f, g_f, beta_f = tokens_of(layout, dtype, q_THN, k_THN, v_THP, g_THN, beta_TH)
    q_f, k_f = (t * (t.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt() for t in (q_f, k_f))
    q_f = q_f * N**-0.5
    # Per channel, a CPU takes twice as long for chunks as for their tokens one by one.
    is_slow = not is_gated and v_THP.device.type == "cpu" and not torch.is_grad_enabled()
    o_THP, final_RHNP, captured_nHNP = ragged_scan(
        _step,
        partial(_chunked, _products_by_row if is_gated else _products_by_channel),
        (q_f, k_f, v_f, g_f, beta_f),
        states_RHNP,
        layout,
        lambda: ChunkGrid.of(layout, chunk_size if chunk_size > 1 else 32, v_THP.device),
        layout.num_sequences if chunk_size == 1 or is_slow else layout.num_steps,
    )
    return pad_rows(o_THP.to(v_THP.dtype), layout), final_RHNP, captured_nHNP


def _products_by_row(
    q_SKLN: torch.Tensor, k_SKLN: torch.Tensor, cum_SHL1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `_chunked`: products of keys, and of queries and keys, first, then times their decays."""
    repeats = cum_SHL1.shape[1] // k_SKLN.shape[1]
    decay_SHLL = decay_matrix(cum_SHL1.squeeze(-1), k_SKLN.dtype)
    return (
        _per_head(k_SKLN @ k_SKLN.mT, repeats) * decay_SHLL,
        _per_head(q_SKLN @ k_SKLN.mT, repeats) * decay_SHLL,
    )


def _per_head(x_SK: torch.Tensor, repeats: int) -> torch.Tensor:
    """Repeat `[S, H_qk, ...]` -> `[S, H, ...]`: heads of q and k serve `repeats` of v each."""
    return x_SK if repeats == 1 else x_SK.repeat_interleave(repeats, dim=1)


def _products_by_channel(
    q_SHLN: torch.Tensor, k_SHLN: torch.Tensor, cum_SHLN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `_chunked`; 0 above the diagonal.

    exp(c_i) exp(-c_j) would overflow. With a row m between j and i, exp(c_i - c_m) and
    exp(c_m - c_j) are both at most 1: each row of sub-blocks takes its start as m, and the decays
    of earlier keys accumulate from row to row. Inside a sub-block no m fits all pairs, so their
    decays are written out.
    """
    L, dtype = k_SHLN.shape[2], k_SHLN.dtype

    def decay(later, earlier):
        return (later - earlier).to(dtype).exp()

    rows = []
    before_SHjN, cut_SH1N = k_SHLN[:, :, :0], cum_SHLN[:, :, :1]
    for i in range(0, L, SUB_BLOCK):
        # Keys of rows and keys before them are cut apart, as the bits of gradients depend on it.
        x_SHlN, q_SHlN, k_SHlN, cum_SHlN = (
            t[:, :, i : i + SUB_BLOCK] for t in (k_SHLN, q_SHLN, k_SHLN, cum_SHLN)
        )
        size = k_SHlN.shape[2]
        kq_SHlN = torch.cat([x_SHlN, q_SHlN], dim=2)
        far_SHxj = (kq_SHlN * decay(cum_SHlN, cut_SH1N).repeat(1, 1, 2, 1)) @ before_SHjN.mT

        future = torch.ones(size, size, dtype=torch.bool, device=k_SHLN.device).triu_(1)
        diff_SHllN = (cum_SHlN.unsqueeze(3) - cum_SHlN.unsqueeze(2)).to(dtype)
        decay_SHllN = diff_SHllN.masked_fill(future.unsqueeze(-1), -torch.inf).exp()
        kq_SHlN2 = torch.stack([x_SHlN, q_SHlN], dim=-1)
        near_SHll2 = (decay_SHllN * k_SHlN.unsqueeze(2)) @ kq_SHlN2

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


def _step(
    q_RHN: torch.Tensor,
    k_RHN: torch.Tensor,
    v_RHP: torch.Tensor,
    g_RHN: torch.Tensor,
    beta_RH: torch.Tensor,
    S_RHNP: torch.Tensor | list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """Run one token for each of R sequences: the plain recurrence. Given a list of states before
    and after, write the latter, with the same bits, and return outputs alone."""
    repeats = v_RHP.shape[1] // k_RHN.shape[1]
    q_RH1N, k_RH1N = (_per_head(t, repeats).unsqueeze(2) for t in (q_RHN, k_RHN))
    v_RH1P, beta_RH11 = v_RHP.unsqueeze(2), beta_RH[..., None, None]
    decay_RHN1 = g_RHN.exp().unsqueeze(-1)
    kept_k_RH1N = k_RH1N * decay_RHN1.mT
    if not isinstance(S_RHNP, list):
        delta_RH1P = (v_RH1P - kept_k_RH1N @ S_RHNP) * beta_RH11
        S_RHNP = (S_RHNP * decay_RHN1).addcmul_(k_RH1N.mT, delta_RH1P)
        return (q_RH1N @ S_RHNP).squeeze(2), S_RHNP
    o_RH1P = torch.empty_like(v_RH1P)
    rows = (q_RH1N, k_RH1N.mT, kept_k_RH1N, v_RH1P, decay_RHN1, beta_RH11, o_RH1P)
    is_rounded = S_RHNP[0][1].dtype != v_RHP.dtype
    for (before_HNP, S_HNP), q_H1N, k_HN1, kept_k_H1N, v_H1P, decay_HN1, beta_H11, o_H1P in zip(
        S_RHNP, *(t.unbind() for t in rows)
    ):
        delta_H1P = o_H1P  # in its memory until the output is written
        if is_rounded:
            before_HNP = before_HNP.to(v_RHP.dtype)
        torch.bmm(kept_k_H1N, before_HNP, out=delta_H1P)
        torch.sub(v_H1P, delta_H1P, out=delta_H1P).mul_(beta_H11)
        out = None if is_rounded else S_HNP
        new_HNP = torch.mul(before_HNP, decay_HN1, out=out).addcmul_(k_HN1, delta_H1P)
        torch.bmm(q_H1N, new_HNP, out=o_H1P)
        if is_rounded:
            S_HNP.copy_(new_HNP)
    return o_RH1P.squeeze(2)


def _chunked(
    products: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q_THN: torch.Tensor,
    k_THN: torch.Tensor,
    v_THP: torch.Tensor,
    g_THN: torch.Tensor,
    beta_TH: torch.Tensor,
    S_RHNP: torch.Tensor,
    grid: ChunkGrid,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solve each chunk for the values that its rows write, then carry states through the chunks.

    With c the running sum of g in a chunk and S0 the state it starts from, row i writes
    w_i = beta_i (v_i - (k_i exp(c_i)) S0 - sum_{j < i} ((k_i exp(c_i - c_j)) . k_j) w_j) into the
    state. That is a unit lower triangular system; its solution is affine in S0, w = U - W S0, so
    U and W are solved for all chunks and heads at once and only S0 is sequential.

    Args:
        products: takes q, k and c on the grid and returns (k_i exp(c_i - c_j)) . k_j and
            (q_i exp(c_i - c_j)) . k_j; of the former only the part strictly below the diagonal is
            read, the latter are 0 above it.
        q_THN, k_THN, v_THP, beta_TH: the inputs.
        g_THN: log decays, `[T, H, N]` or `[T, H, 1]`.
        S_RHNP: initial states.
        grid: the chunks.

    Returns:
        Outputs of the tokens, final states and captured states.
    """
    q_SHLN, k_SHLN, v_SHLP, g_SHLN = (
        grid.pad(t).transpose(1, 2) for t in (q_THN, k_THN, v_THP, g_THN)
    )
    beta_SHL1 = grid.pad(beta_TH).transpose(1, 2).unsqueeze(-1)
    cum_SHLN = g_SHLN.double().cumsum(2)
    keys_SHLL, scores_SHLL = products(q_SHLN, k_SHLN, cum_SHLN)
    q_SHLN, k_SHLN = (_per_head(t, v_SHLP.shape[1] // t.shape[1]) for t in (q_SHLN, k_SHLN))
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
        # A row's value does not depend on later rows, so a capture is a sum over fewer rows.
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
