"""Mamba-1's scan in Triton: states stay in registers from a sequence's first token to its last."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.ops.launch import Kernel
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.slot_states import SlotStates
from megatron_hybrid.ops.steps import Steps

ELEMENTS = 1024
"""Elements of a state in one program: 8 of each thread."""


OF_A_CALL = [
    "x_ptr",
    "dt_ptr",
    "B_ptr",
    "C_ptr",
    "y_ptr",
    "out_ptr",
    "slots_ptr",
    "rows_ptr",
    "offsets_ptr",
    "captures_ptr",
    "num_sequences",
    "num_rows",
    "num_steps",
    "stride_x_row",
    "stride_dt_row",
    "stride_B_row",
    "stride_C_row",
    "stride_y_row",
    "stride_out_capture",
    "stride_out_channel",
    "stride_out_state",
]
"""Arguments that differ between calls. What is compiled does not depend on them: else sums could be
made in another order, and a row's bits would not be the same in every call."""


@Kernel
@triton.jit(do_not_specialize=OF_A_CALL)
def scan_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    pool_ptr,
    slots_ptr,
    y_ptr,
    out_ptr,
    rows_ptr,
    offsets_ptr,
    captures_ptr,
    num_sequences,
    num_rows,
    num_steps,
    stride_x_row,
    stride_x_channel,
    stride_dt_row,
    stride_dt_channel,
    stride_A_channel,
    stride_A_state,
    stride_B_row,
    stride_B_state,
    stride_C_row,
    stride_C_state,
    stride_pool_slot,
    stride_pool_channel,
    stride_pool_state,
    stride_y_row,
    stride_y_channel,
    stride_out_capture,
    stride_out_channel,
    stride_out_state,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Some channels of one sequence: h = exp(dt A) h + dt x B^T, y = h C + D x, token by token.
    Zeros in the rows after all sequences."""
    sequence = tl.program_id(0)
    row = tl.load(rows_ptr + sequence).to(tl.int64)
    c, s = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    own, used = c < CHANNELS, s < N
    y_ptrs = y_ptr + c * stride_y_channel
    if sequence >= num_sequences:
        for t in range(row, num_rows):
            tl.store(y_ptrs + t * stride_y_row, tl.zeros((BLOCK_C,), tl.float32), mask=own)
        return
    end = tl.load(rows_ptr + sequence + 1).to(tl.int64)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    inside = own[:, None] & used[None, :]
    A_ptrs = A_ptr + c[:, None] * stride_A_channel + s[None, :] * stride_A_state
    A = tl.load(A_ptrs, mask=inside, other=0.0).to(tl.float32)
    state_ptrs = pool_ptr + slot * stride_pool_slot
    state_ptrs += c[:, None] * stride_pool_channel + s[None, :] * stride_pool_state
    h = tl.load(state_ptrs, mask=inside, other=0.0).to(tl.float32)
    capture, last_capture = tl.load(offsets_ptr + sequence), tl.load(offsets_ptr + sequence + 1)
    wanted = tl.load(captures_ptr + capture, mask=capture < last_capture, other=-1)
    for t in range(row, end):
        x = tl.load(x_ptr + t * stride_x_row + c * stride_x_channel, mask=own, other=0.0)
        dt = tl.load(dt_ptr + t * stride_dt_row + c * stride_dt_channel, mask=own, other=0.0)
        B = tl.load(B_ptr + t * stride_B_row + s * stride_B_state, mask=used, other=0.0)
        C = tl.load(C_ptr + t * stride_C_row + s * stride_C_state, mask=used, other=0.0)
        x, dt = x.to(tl.float32), dt.to(tl.float32)
        h = tl.exp(dt[:, None] * A) * h + (dt * x)[:, None] * B.to(tl.float32)[None, :]
        y = tl.sum(h * C.to(tl.float32)[None, :], axis=1)
        y += tl.load(D_ptr + c, mask=own, other=0.0).to(tl.float32) * x
        tl.store(y_ptrs + t * stride_y_row, y, mask=own)
        if sequence < num_steps:  # the next token begins with what a call of its own would find
            h = h.to(pool_ptr.dtype.element_ty).to(tl.float32)
        if t + 1 == wanted:
            out_ptrs = out_ptr + tl.cast(capture, tl.int64) * stride_out_capture
            out_ptrs += c[:, None] * stride_out_channel + s[None, :] * stride_out_state
            tl.store(out_ptrs, h, mask=inside)
            capture += 1
            wanted = tl.load(captures_ptr + capture, mask=capture < last_capture, other=-1)
    tl.store(state_ptrs, h, mask=inside)


def verify(x_TC: Tensor, dt_TC: Tensor, A_CN: Tensor, *_: Any) -> str | None:
    if A_CN.shape[1] > ELEMENTS:
        return f"states are {A_CN.shape[1]} wide; it takes up to {ELEMENTS}"
    return None


def run(
    x_TC: Tensor,
    dt_TC: Tensor,
    A_CN: Tensor,
    B_TN: Tensor,
    C_TN: Tensor,
    D_C: Tensor,
    states: SlotStates | None,
    layout: RaggedLayout,
    chunk_size: int = 32,
) -> Tensor:
    channels, N = A_CN.shape
    if states is None:
        states = SlotStates.zeros(layout.num_sequences, (channels, N), x_TC.device)
    y_TC = torch.empty_like(x_TC)
    steps = Steps.of(states, layout, 1, y_TC)
    block_n = triton.next_power_of_2(N)
    block_c = min(triton.next_power_of_2(channels), max(1, ELEMENTS // block_n))
    scan_kernel(
        (steps.num_programs, triton.cdiv(channels, block_c)),
        (x_TC, dt_TC, A_CN, B_TN, C_TN, D_C, *steps.tensors()),
        (steps.num_sequences, steps.num_rows, layout.num_steps),
        CHANNELS=channels,
        N=N,
        BLOCK_C=block_c,
        BLOCK_N=block_n,
        num_warps=4,
    )
    return y_TC
