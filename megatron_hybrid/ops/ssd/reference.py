"""The state-space scan of Mamba-2, chunked (Dao and Gu 2024, "Transformers are SSMs", sec. 6)."""

import torch

from megatron_hybrid.ops.checks import compute_dtype, pad_rows, tokens_of, without_autocast
from megatron_hybrid.ops.chunk_grid import ChunkGrid
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.scan import decay_matrix, ragged_scan
from megatron_hybrid.ops.slot_states import SlotStates, states_or_zeros


@without_autocast
def ssd_scan(
    x_THP: torch.Tensor,
    dt_TH: torch.Tensor,
    A_H: torch.Tensor,
    B_TGN: torch.Tensor,
    C_TGN: torch.Tensor,
    D_H: torch.Tensor,
    initial_states_RHPN: torch.Tensor | SlotStates | None,
    layout: RaggedLayout,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute S_t = exp(dt_t A) S_{t-1} + dt_t x_t (x) B_t; y_t = S_t C_t + D x_t, by sequence.

    This function also takes states `[R, H, P, N]`, and returns final and captured ones after y: see
    `in_slots`.

    Args:
        x_THP: values `[T, H, P]`.
        dt_TH: step sizes `[T, H]`, after softplus and bias.
        A_H: `[H]`, negative.
        B_TGN, C_TGN: `[T, G, N]`; each group serves H / G consecutive heads.
        D_H: skip connection `[H]`.
        initial_states_RHPN: `SlotStates` `[H, P, N]`, fp32 or bf16; None starts from zeros and
            keeps nothing.
        layout: lengths, positions and captures of the sequences.
        chunk_size: rows of a chunk; the result does not depend on it but for rounding. With 1,
            token by token, all cuts give the same bits; gradients are those of chunks.

    Returns:
        y `[T, H, P]` in the dtype of x, zeros in padding rows. All arithmetic is fp32, whatever the
        inputs are (float64 for float64 inputs). Captures change neither y nor the states
        in any bit.

    Raises:
        TypeError: fp16 states, or inputs that are not floating-point.
        ValueError: shapes that do not fit the layout or each other.
    """
    shape = (layout.num_sequences, *x_THP.shape[1:], B_TGN.shape[-1])
    states_RHPN = states_or_zeros(initial_states_RHPN, shape, like=x_THP)
    dtype = compute_dtype(x_THP)
    x_f, dt_f, B_f, C_f = tokens_of(layout, dtype, x_THP, dt_TH, B_TGN, C_TGN)
    # What remains is linear attention with a scalar decay: keys B, queries C, values dt x.
    inputs = (dt_f.unsqueeze(-1) * x_f, dt_f * A_H.to(dtype), B_f, C_f)
    y_THP, final_RHPN, captured_nHPN = ragged_scan(
        _step,
        _chunked,
        inputs,
        states_RHPN,
        layout,
        lambda: ChunkGrid.of(layout, chunk_size if chunk_size > 1 else 64, x_THP.device),
        layout.num_sequences if chunk_size == 1 else layout.num_steps,
    )
    y_THP = torch.addcmul(y_THP, x_f, D_H.to(dtype).unsqueeze(-1))
    return pad_rows(y_THP.to(x_THP.dtype), layout), final_RHPN, captured_nHPN


def _step(
    dtx_RHP: torch.Tensor,
    g_RH: torch.Tensor,
    B_RGN: torch.Tensor,
    C_RGN: torch.Tensor,
    S_RHPN: torch.Tensor | list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """Run one token for each of R sequences: the plain recurrence. Given a list of states before
    and after, write the latter, with the same bits, and return outputs alone."""
    heads_per_group = dtx_RHP.shape[1] // B_RGN.shape[1]
    B_RH1N, C_RH1N = (
        t.repeat_interleave(heads_per_group, dim=1).unsqueeze(2) for t in (B_RGN, C_RGN)
    )
    decay_RH11, dtx_RHP1 = g_RH.exp()[..., None, None], dtx_RHP.unsqueeze(-1)
    if not isinstance(S_RHPN, list):
        S_RHPN = (S_RHPN * decay_RH11).addcmul_(dtx_RHP1, B_RH1N)
        # A row times a matrix: as S C, a matrix times a column, MKL takes seven times as long.
        return (C_RH1N @ S_RHPN.mT).squeeze(2), S_RHPN
    y_RH1P = torch.empty_like(dtx_RHP).unsqueeze(2)
    rows = (decay_RH11, dtx_RHP1, B_RH1N, C_RH1N, y_RH1P)
    is_rounded = S_RHPN[0][1].dtype != dtx_RHP.dtype
    for (before_HPN, S_HPN), decay_H11, dtx_HP1, B_H1N, C_H1N, y_H1P in zip(
        S_RHPN, *(t.unbind() for t in rows)
    ):
        out = None if is_rounded else S_HPN
        new_HPN = torch.mul(before_HPN, decay_H11, out=out).addcmul_(dtx_HP1, B_H1N)
        torch.bmm(C_H1N, new_HPN.mT, out=y_H1P)
        if is_rounded:
            S_HPN.copy_(new_HPN)
    return y_RH1P.squeeze(2)


def _chunked(
    dtx_THP: torch.Tensor,
    g_TH: torch.Tensor,
    B_TGN: torch.Tensor,
    C_TGN: torch.Tensor,
    S_RHPN: torch.Tensor,
    grid: ChunkGrid,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute a chunk as attention, and go on by states: all matmuls over chunks x heads.

    With c the running sum of the log decay g = dt A in a chunk and S0 the state it starts from,
    y_i = sum_{j <= i} (C_i . B_j) exp(c_i - c_j) dt_j x_j  +  exp(c_i) S0 C_i.
    """
    dtx_SLHP = grid.pad(dtx_THP)
    B_SGLN, C_SGLN = (grid.pad(t).transpose(1, 2) for t in (B_TGN, C_TGN))
    S, L, H, P = dtx_SLHP.shape
    G, N = B_SGLN.shape[1], B_SGLN.shape[3]
    dtype = dtx_SLHP.dtype
    cum_SHL = grid.pad(g_TH).transpose(1, 2).double().cumsum(-1)

    scores_SG1LL = (C_SGLN @ B_SGLN.mT).unsqueeze(2)
    decay_SGhLL = decay_matrix(cum_SHL, dtype).view(S, G, H // G, L, L)
    y_SHLP = (scores_SG1LL * decay_SGhLL).view(S, H, L, L) @ dtx_SLHP.transpose(1, 2)

    to_end_SHL = (cum_SHL[..., -1:] - cum_SHL).exp().to(dtype)
    added_SHPN = _outer(dtx_SLHP, to_end_SHL, B_SGLN)
    decay_SH11 = cum_SHL[..., -1].exp().to(dtype)[..., None, None]
    start_SHPN, _, final_RHPN = grid.recur(S_RHPN, (added_SHPN, decay_SH11), _next_state)

    # The heads of a group side by side, so that C is read once for all of them.
    from_start_SGLX = C_SGLN @ start_SHPN.view(S, G, H // G * P, N).mT
    from_start_SLHP = from_start_SGLX.transpose(1, 2).reshape(S, L, H, P)
    reach_SLH1 = cum_SHL.exp().to(dtype).transpose(1, 2).unsqueeze(-1)
    y_SLHP = torch.addcmul(y_SHLP.transpose(1, 2), from_start_SLHP, reach_SLH1)

    captured_nHPN = S_RHPN[:0]
    if len(chunks_n := grid.capture_chunks):
        decay_nH1, weight_nHL = grid.capture_decays(cum_SHL, dtype)
        added_nHPN = _outer(dtx_SLHP[chunks_n], weight_nHL, B_SGLN[chunks_n])
        captured_nHPN, _ = _next_state(start_SHPN[chunks_n], added_nHPN, decay_nH1.unsqueeze(-1))
    return grid.unpad(y_SLHP), final_RHPN, captured_nHPN


def _outer(x_SLHP: torch.Tensor, weight_SHL: torch.Tensor, B_SGLN: torch.Tensor) -> torch.Tensor:
    """Sum over the rows of weight * x (x) B: `[S, H, P, N]`."""
    S, L, H, P = x_SLHP.shape
    x_SLHP = x_SLHP * weight_SHL.transpose(1, 2).unsqueeze(-1)
    G, N = B_SGLN.shape[1], B_SGLN.shape[3]
    x_SGXL = x_SLHP.view(S, L, G, H // G * P).permute(0, 2, 3, 1)
    return (x_SGXL @ B_SGLN).view(S, H, P, N)


def _next_state(
    state: torch.Tensor, added: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, None]:
    return torch.addcmul(added, state, decay), None
