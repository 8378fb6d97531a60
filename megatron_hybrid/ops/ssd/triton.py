"""Our Triton kernel for Mamba-2: the recurrence token by token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.ops.launch import Kernel
from megatron_hybrid.ops.steps import Steps

STEP_ELEMENTS = 1024
"""Elements of a state in one program: 8 values a thread, in loads of 16 bytes."""


@Kernel
@triton.jit(do_not_specialize=["num_sequences", "num_rows"])
def steps_kernel(
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
    stride_x_row,
    stride_x_head,
    stride_dt_row,
    stride_dt_head,
    stride_B_row,
    stride_B_group,
    stride_C_row,
    stride_C_group,
    stride_pool_slot,
    stride_pool_head,
    stride_pool_value,
    stride_y_row,
    stride_y_head,
    stride_out_capture,
    stride_out_head,
    stride_out_value,
    stride_rows_sequence,
    HEADS_PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Run some values of one head of one sequence: S = exp(dt A) S + dt x B^T in the pool, y = S C,
    token by token, with the states after captured ones; 0 in the rows after all sequences."""
    r, h = tl.program_id(0), tl.program_id(1)
    p, s = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    group = h // HEADS_PER_GROUP
    first = tl.load(rows_ptr + r * stride_rows_sequence).to(tl.int64)
    if y_ptr is not None:
        y_ptrs = y_ptr + h * stride_y_head + p
        if r >= num_sequences:
            for t in range(first, num_rows):
                tl.store(y_ptrs + t * stride_y_row, tl.zeros((BLOCK_P,), tl.float32), mask=p < P)
            return
    end = tl.load(rows_ptr + r * stride_rows_sequence + 1).to(tl.int64)
    slot = tl.load(slots_ptr + r).to(tl.int64)
    inside = (p[:, None] < P) & (s[None, :] < N)
    state_ptrs = pool_ptr + slot * stride_pool_slot + h * stride_pool_head
    state_ptrs += p[:, None] * stride_pool_value + s[None, :]
    state = tl.load(state_ptrs, mask=inside, other=0.0).to(tl.float32)
    A = tl.load(A_ptr + h)
    if y_ptr is not None:
        D = tl.load(D_ptr + h).to(tl.float32)
        capture, last = tl.load(offsets_ptr + r), tl.load(offsets_ptr + r + 1)
        wanted = tl.load(captures_ptr + capture, mask=capture < last, other=-1)
    for t in range(first, end):
        x_ptrs = x_ptr + t * stride_x_row + h * stride_x_head + p
        x = tl.load(x_ptrs, mask=p < P, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + t * stride_dt_row + h * stride_dt_head).to(tl.float32)
        B_ptrs = B_ptr + t * stride_B_row + group * stride_B_group + s
        B = tl.load(B_ptrs, mask=s < N, other=0.0).to(tl.float32)
        state = state * tl.exp(dt * A) + (dt * x)[:, None] * B[None, :]
        if y_ptr is not None:
            C_ptrs = C_ptr + t * stride_C_row + group * stride_C_group + s
            C = tl.load(C_ptrs, mask=s < N, other=0.0).to(tl.float32)
            y = tl.sum(state * C[None, :], axis=1) + D * x
            tl.store(y_ptrs + t * stride_y_row, y, mask=p < P)
            # The next token begins with what a call of its own would find.
            state = state.to(pool_ptr.dtype.element_ty).to(tl.float32)
            if t + 1 == wanted:
                out_ptrs = out_ptr + tl.cast(capture, tl.int64) * stride_out_capture
                out_ptrs += h * stride_out_head + p[:, None] * stride_out_value + s[None, :]
                tl.store(out_ptrs, state, mask=inside)
                capture += 1
                wanted = tl.load(captures_ptr + capture, mask=capture < last, other=-1)
    tl.store(state_ptrs, state, mask=inside)


def run_steps(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    D_H: Tensor,
    steps: Steps,
) -> None:
    """Run the recurrence of `ops.ssd_scan` in place. A_H is fp32; last strides are 1."""
    (_, H, P), N = x_THP.shape, B_TGN.shape[2]
    block_n = max(16, triton.next_power_of_2(N))
    block_p = min(triton.next_power_of_2(P), max(1, STEP_ELEMENTS // block_n))
    steps_kernel(
        (steps.num_programs, H, triton.cdiv(P, block_p)),
        (x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, *steps.tensors()),
        (steps.num_sequences, steps.num_rows),
        HEADS_PER_GROUP=H // B_TGN.shape[1],
        P=P,
        N=N,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        num_warps=4,
    )
