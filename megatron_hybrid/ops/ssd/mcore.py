"""Mamba-2's scan by megatron-core's Triton kernels, with ours for steps and states in a chunk.

Chunks are anchored at absolute position 0, so what a token gives does not depend on how its
sequence is cut into calls. States are captured from what the kernels leave, after them: outputs
and final states have the same bits with captures and without. (Steps are not core's
`selective_state_update`: without a buffer for intermediate states, 0.19.2 writes these over x.)
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.ssm.ops.ssd_bmm import _bmm_chunk_fwd, _bmm_chunk_fwd_kernel
from megatron.core.ssm.ops.ssd_chunk_scan import _chunk_scan_fwd, _chunk_scan_fwd_kernel
from megatron.core.ssm.ops.ssd_chunk_state import (
    _chunk_cumsum_fwd,
    _chunk_cumsum_fwd_kernel,
    _chunk_state_fwd,
    _chunk_state_fwd_kernel,
)
from megatron.core.ssm.ops.ssd_state_passing import _state_passing_fwd, _state_passing_fwd_kernel
from torch import Tensor

from megatron_hybrid.ops.anchored_chunks import AnchoredChunks
from megatron_hybrid.ops.checks import pad_rows, rows_between
from megatron_hybrid.ops.hopper import compiles_wrongly, leave_racing_configs_out
from megatron_hybrid.ops.kernels import (
    aligned_rows,
    is_there,
    leave_unspecialized,
    library_bounds,
    tf32_refusal,
)
from megatron_hybrid.ops.launch import checked
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.slot_states import SlotStates
from megatron_hybrid.ops.ssd.triton import run_steps
from megatron_hybrid.ops.steps import Steps

REMARKS = [
    remark
    for kernel, in_registers in (
        (_chunk_scan_fwd_kernel, True),
        (_chunk_state_fwd_kernel, False),
        (_bmm_chunk_fwd_kernel, False),
    )
    for remark in leave_racing_configs_out(kernel, in_registers)
]
"""See `kernel_backend`."""

for _kernel in (
    _chunk_cumsum_fwd_kernel,
    _chunk_state_fwd_kernel,
    _state_passing_fwd_kernel,
    _bmm_chunk_fwd_kernel,
    _chunk_scan_fwd_kernel,
):
    leave_unspecialized(_kernel, "seqlen", "nchunks")

# They take all strides but those of boundaries; where ours are neighbours, none is declared.
_cumsum = checked(_chunk_cumsum_fwd, dt=2, A=1)
_chunk_states = checked(_chunk_state_fwd, B=3, x=3)
_pass_states = checked(_state_passing_fwd)
_scores = checked(_bmm_chunk_fwd, a=3, b=3)
_outputs = checked(_chunk_scan_fwd, x=3, C=3, out=3, D=1)


def verify(x_THP: Tensor, *others: Any) -> str | None:
    _, _, B_TGN, C_TGN, _, states, *_, chunk_size = others
    if (refusal := tf32_refusal(x_THP, B_TGN, C_TGN)) is not None:
        return refusal
    if states is not None and states.pool_S.stride(-1) != 1:
        return f"states have the strides {states.pool_S.stride()}; it takes rows of neighbours"
    if 1 < chunk_size < 16 or chunk_size & (chunk_size - 1):
        return f"chunk_size is {chunk_size}; it takes 1 and powers of two from 16"
    return None


def run(*inputs: Any) -> Tensor:
    x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, states, layout, chunk_size = inputs
    (_, H, P), N = x_THP.shape, B_TGN.shape[2]
    if states is None:
        states = SlotStates.zeros(layout.num_sequences, (H, P, N), x_THP.device)
    x_THP, B_TGN, C_TGN = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (x_THP, B_TGN, C_TGN)
    )
    A_H, y_THP = A_H.float(), x_THP.new_empty(x_THP.shape)
    steps = Steps.of(states, layout, chunk_size, y_THP)
    if steps.num_sequences:
        run_steps(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, steps)
    if steps.num_sequences < layout.num_sequences:
        first, tokens = layout.num_step_tokens, layout.num_tokens
        rest = [aligned_rows(t[first:tokens]) for t in (x_THP, dt_TH, B_TGN, C_TGN)]
        _scan(rest, A_H, D_H, states, layout, chunk_size, y_THP[first:tokens])
        y_THP[tokens:] = 0
    return y_THP


def again(*inputs: Any) -> Callable[..., Tensor] | None:
    """Return the function with fla-core's gradient; None if it is missing or compiled wrongly."""
    return _differentiable if is_there("fla.ops") and not compiles_wrongly() else None


def _differentiable(*given: Any) -> Tensor:
    """Run the op by fla-core's linear attention, which has a B and a C for each head."""
    from fla.ops.simple_gla import chunk_simple_gla

    x, dt, A_H, B, C, D_H, _, layout, _ = given
    x, dt, B, C = (rows_between(t, 0, layout.num_tokens)[None] for t in (x, dt, B, C))
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    added = (dt.unsqueeze(-1) * x).to(x.dtype).contiguous()
    bounds = library_bounds(layout, x.device)
    decays, attend = (dt.float() * A_H.float()).contiguous(), checked(chunk_simple_gla)
    y_1THP, _ = attend(C, B, added, decays, scale=1.0, **bounds)
    y_1THP = (y_1THP + D_H.float()[:, None] * x).to(x.dtype)
    return pad_rows(y_1THP[0], layout)


def _scan(
    inputs: list[Tensor],
    A_H: Tensor,
    D_H: Tensor,
    states: SlotStates,
    layout: RaggedLayout,
    chunk_size: int,
    y_THP: Tensor,
) -> None:
    """Run all other sequences, in chunks; write outputs, final states and captures."""
    x_THP, dt_TH, B_TGN, C_TGN = inputs
    chunks = AnchoredChunks.of(layout, chunk_size, x_THP.device)
    bounds, owners = chunks.boundaries_S, chunks.sequences_S
    slots_R = states.slot_ids_R[layout.num_steps :]
    initial_RHPN = states.pool_S.index_select(0, slots_R).float()
    cum_HSL, dt_HSL = _cumsum(dt_TH, A_H, chunk_size, bounds)
    added_SHPN = _chunk_states(B_TGN, x_THP, dt_HSL, cum_HSL, bounds, states_in_fp32=True)
    ends_SHPN = _pass_states(
        added_SHPN.flatten(-2),
        cum_HSL,
        bounds,
        seq_idx=owners,
        initial_states=initial_RHPN.flatten(-2),
        out_dtype=torch.float32,
    ).view_as(added_SHPN)
    scores_SGLL = _scores(C_TGN, B_TGN, chunk_size, bounds, output_dtype=torch.float32)
    _outputs(
        scores_SGLL,
        x_THP,
        dt_HSL,
        cum_HSL,
        C_TGN,
        ends_SHPN,
        bounds,
        y_THP,
        owners,
        D=D_H,
        initial_states=initial_RHPN,
    )
    states.pool_S[slots_R] = ends_SHPN[chunks.last_chunks_R].to(states.pool_S.dtype)
    if num := len(chunks.capture_places_n):
        owners, chunk = chunks.place_sequences[:, None, None, None], chunks.place_chunks
        starts = torch.where(
            owners < 0,
            ends_SHPN.index_select(0, (chunk - 1).clamp(min=0)),
            initial_RHPN.index_select(0, chunks.place_sequences.clamp(min=0)),
        )
        inner = Steps.inside(chunks, starts)
        run_steps(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, inner)
        states.captured_n[-num:] = inner.pool_S
