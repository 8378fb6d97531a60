"""Mamba-1's scan in Triton: states stay in registers from a sequence's first token to its last.

The backward pass has the first state of each chunk from one more scan, and computes the others of
a chunk again, from the last chunk to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hybrid.ops.checks import pad_rows
from megatron_hybrid.ops.kernels import SequenceTable
from megatron_hybrid.ops.launch import Kernel
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.slot_states import SlotStates
from megatron_hybrid.ops.steps import Steps

ELEMENTS = 1024
"""Elements of a state in one program: 8 of each thread."""
MOST_PROGRAMS = 512
"""Programs of a backward pass, unless one sequence needs more: each has memory for the states of a
chunk, 256 KiB for 64."""
MOST_STATES = 64
"""Largest N of a backward pass: each program sums the gradients of B and C over its channels alone,
so the sums of a token have 2 C N^2 / ELEMENTS numbers."""


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
    """Run some channels of one sequence: h = exp(dt A) h + dt x B^T, y = h C + D x, token by token.
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


@triton.jit
def _token(x_ptr, dt_ptr, B_ptr, t, c, s, CHANNELS: tl.constexpr, N: tl.constexpr):
    """Load x, dt and B of a token, of contiguous tensors."""
    x = tl.load(x_ptr + t * CHANNELS + c, mask=c < CHANNELS, other=0.0)
    dt = tl.load(dt_ptr + t * CHANNELS + c, mask=c < CHANNELS, other=0.0)
    B = tl.load(B_ptr + t * N + s, mask=s < N, other=0.0)
    return x.to(tl.float32), dt.to(tl.float32), B.to(tl.float32)[None, :]


@Kernel
@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def gradient_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    grad_y_ptr,
    kept_ptr,
    boundaries_ptr,
    offsets_ptr,
    before_ptr,
    grad_x_ptr,
    grad_dt_ptr,
    grad_A_ptr,
    grad_B_ptr,
    grad_C_ptr,
    grad_D_ptr,
    num_sequences,
    num_tokens,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute for some channels of every P-th sequence, of P programs, gradients of its tokens from
    the last to the first, and sums of the others, one for each program."""
    lane, block = tl.program_id(0), tl.program_id(1)
    c, s = block * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    inside = (c < CHANNELS)[:, None] & (s < N)[None, :]
    places = c[:, None] * N + s[None, :]
    A = tl.load(A_ptr + places, mask=inside, other=0.0).to(tl.float32)
    D = tl.load(D_ptr + c, mask=c < CHANNELS, other=0.0).to(tl.float32)
    program = tl.cast(lane, tl.int64) * tl.num_programs(1) + block
    before_ptrs = before_ptr + program * (CHUNK * BLOCK_C * BLOCK_N)
    before_ptrs += tl.arange(0, BLOCK_C)[:, None] * BLOCK_N + s[None, :]
    grad_A, grad_D = tl.zeros_like(A), tl.zeros_like(D)
    for sequence in range(lane, num_sequences, tl.num_programs(0)):
        row = tl.load(boundaries_ptr + sequence).to(tl.int64)
        end = tl.load(boundaries_ptr + sequence + 1).to(tl.int64)
        kept = tl.load(offsets_ptr + sequence).to(tl.int64)
        grad_h = tl.zeros_like(A)
        num_chunks = tl.cdiv(end - row, CHUNK)
        for later in range(0, num_chunks):
            chunk = num_chunks - 1 - later
            first = row + chunk * CHUNK
            length = tl.minimum(end - first, CHUNK)
            kept_ptrs = kept_ptr + (kept + chunk - 1) * (CHANNELS * N) + places
            h = tl.load(kept_ptrs, mask=inside & (chunk > 0), other=0.0)
            for i in range(0, length):
                x, dt, B = _token(x_ptr, dt_ptr, B_ptr, first + i, c, s, CHANNELS, N)
                tl.store(before_ptrs + i * (BLOCK_C * BLOCK_N), h)
                h = tl.exp(dt[:, None] * A) * h + (dt * x)[:, None] * B
            tl.debug_barrier()  # all threads have written the states
            for later_row in range(0, length):
                i = length - 1 - later_row
                t = first + i
                x, dt, B = _token(x_ptr, dt_ptr, B_ptr, t, c, s, CHANNELS, N)
                _, grad_y, C = _token(x_ptr, grad_y_ptr, C_ptr, t, c, s, CHANNELS, N)
                decay, dtx = tl.exp(dt[:, None] * A), (dt * x)[:, None]
                decayed = tl.load(before_ptrs + i * (BLOCK_C * BLOCK_N)) * decay
                of_C = tl.sum(grad_y[:, None] * (decayed + dtx * B), axis=0)
                grad_h += grad_y[:, None] * C
                of_B, of_dtx = tl.sum(grad_h * dtx, axis=0), tl.sum(grad_h * B, axis=1)
                of_log = grad_h * decayed
                of_x = of_dtx * dt + grad_y * D
                of_dt = of_dtx * x + tl.sum(of_log * A, axis=1)
                grad_A += of_log * dt[:, None]
                grad_D += grad_y * x
                sums = (block * num_tokens + t) * N + s
                tl.store(grad_x_ptr + t * CHANNELS + c, of_x, mask=c < CHANNELS)
                tl.store(grad_dt_ptr + t * CHANNELS + c, of_dt, mask=c < CHANNELS)
                tl.store(grad_B_ptr + sums, of_B, mask=s < N)
                tl.store(grad_C_ptr + sums, of_C, mask=s < N)
                grad_h *= decay
            tl.debug_barrier()  # all have read them
    tl.store(grad_A_ptr + lane * (CHANNELS * N) + places, grad_A, mask=inside)
    tl.store(grad_D_ptr + lane * CHANNELS + c, grad_D, mask=c < CHANNELS)


def verify(x_TC: Tensor, dt_TC: Tensor, A_CN: Tensor, *_: Any) -> str | None:
    if A_CN.shape[1] > ELEMENTS:
        return f"states are {A_CN.shape[1]} wide; it takes up to {ELEMENTS}"
    return None


def run(*inputs: Any) -> Tensor:
    x_TC, dt_TC, A_CN, B_TN, C_TN, D_C, states, layout, _ = inputs
    channels, N = A_CN.shape
    if states is None:
        states = SlotStates.zeros(layout.num_sequences, (channels, N), x_TC.device)
    y_TC = torch.empty_like(x_TC)
    steps = Steps.of(states, layout, 1, y_TC)
    form = _form(channels, N)
    scan_kernel(
        (steps.num_programs, triton.cdiv(channels, form["BLOCK_C"])),
        (x_TC, dt_TC, A_CN, B_TN, C_TN, D_C, *steps.tensors()),
        (steps.num_sequences, steps.num_rows, layout.num_steps),
        **form,
    )
    return y_TC


def again(x_TC: Tensor, dt_TC: Tensor, A_CN: Tensor, *_: Any) -> Callable[..., Tensor] | None:
    """Return the function that has a kernel's gradient; None for wide states."""
    return _Scan.apply if A_CN.shape[1] <= MOST_STATES else None


def _form(channels: int, N: int) -> dict[str, int]:
    """Return the constants of a launch."""
    block_n = triton.next_power_of_2(N)
    block_c = min(triton.next_power_of_2(channels), max(1, ELEMENTS // block_n))
    return {"CHANNELS": channels, "N": N, "BLOCK_C": block_c, "BLOCK_N": block_n, "num_warps": 4}


def _with_captures(layout: RaggedLayout, chunk: int) -> RaggedLayout:
    """Return the layout with a capture after each chunk but a sequence's last."""
    bounds = pairwise(layout.cu_seqlens)
    ends = [at for row, end in bounds for at in range(row + chunk, end, chunk)]
    return RaggedLayout(layout.lengths, layout.start_positions, tuple(ends), layout.num_padding)


class _Scan(torch.autograd.Function):
    """The scan from zeros, which keeps the state before each chunk but a sequence's first."""

    @staticmethod
    def forward(ctx, *given):
        *tensors, _, layout, chunk = given
        ctx.layout = layout.cached(("chunk ends", chunk), lambda: _with_captures(layout, chunk))
        ctx.form = _form(*tensors[2].shape) | {"CHUNK": chunk}
        states = SlotStates.zeros(layout.num_sequences, tensors[2].shape, tensors[0].device)
        kept_nCN = states.pool_S.new_empty(len(ctx.layout.captures), *tensors[2].shape)
        ctx.save_for_backward(*(t.contiguous() for t in tensors), kept_nCN)
        return run(*tensors, states._replace(captured_n=kept_nCN), ctx.layout, chunk)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y_TC):
        *tensors, kept_nCN = ctx.saved_tensors
        R, T = ctx.layout.num_sequences, ctx.layout.num_tokens
        (_, C, N), form = kept_nCN.shape, ctx.form
        blocks = triton.cdiv(C, form["BLOCK_C"])
        lanes = min(R, max(1, MOST_PROGRAMS // blocks))
        table = SequenceTable.of(ctx.layout, grad_y_TC.device)
        states = (lanes, blocks, form["CHUNK"], form["BLOCK_C"], form["BLOCK_N"])
        of_A, of_B, of_D = (lanes, C, N), (blocks, T, N), (lanes, C)
        before, *sums = (kept_nCN.new_empty(each) for each in (states, of_A, of_B, of_B, of_D))
        rows = [t.new_empty(T, C) for t in tensors[:2]]
        inputs = (*tensors, grad_y_TC.contiguous(), kept_nCN)
        tables = (table.boundaries, table.capture_offsets)
        gradient_kernel((lanes, blocks), (*inputs, *tables, before, *rows, *sums), (R, T), **form)
        A, B, C, D = (one.sum(0).to(t.dtype) for one, t in zip(sums, tensors[2:], strict=True))
        x, dt, B, C = (pad_rows(each, ctx.layout) for each in (*rows, B, C))
        return x, dt, A, B, C, D, None, None, None
