"""Our Triton kernels for Mamba-2: a step of each sequence, and states inside a chunk."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.ops.anchored_chunks import AnchoredChunks
from megatron_hybrid.ops.launch import Kernel

ROWS = 16
"""Rows of a chunk in one product of matrices."""

STEP_ELEMENTS = 1024
"""Elements of a state in one program of a step: 8 values a thread, in loads of 16 bytes."""


@Kernel
@triton.jit(do_not_specialize=["num_sequences"])
def step_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    pool_ptr,
    slots_ptr,
    y_ptr,
    num_sequences,
    stride_x_row,
    stride_x_head,
    stride_x_value,
    stride_dt_row,
    stride_dt_head,
    stride_B_row,
    stride_B_group,
    stride_B_state,
    stride_C_row,
    stride_C_group,
    stride_C_state,
    stride_pool_slot,
    stride_pool_head,
    stride_pool_value,
    stride_pool_state,
    stride_y_row,
    stride_y_head,
    stride_y_value,
    HEADS_PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Some values of one head of one sequence: S = exp(dt A) S + dt x B^T in the pool, y = S C; 0
    in the rows after them."""
    r, h = tl.program_id(0), tl.program_id(1)
    p, s = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    group, row = h // HEADS_PER_GROUP, r.to(tl.int64)
    y_ptrs = y_ptr + row * stride_y_row + h * stride_y_head + p * stride_y_value
    if r >= num_sequences:
        tl.store(y_ptrs, tl.zeros((BLOCK_P,), tl.float32), mask=p < P)
        return
    slot = tl.load(slots_ptr + r).to(tl.int64)
    inside = (p[:, None] < P) & (s[None, :] < N)
    state_ptrs = (
        pool_ptr
        + slot * stride_pool_slot
        + h * stride_pool_head
        + p[:, None] * stride_pool_value
        + s[None, :] * stride_pool_state
    )
    state = tl.load(state_ptrs, mask=inside, other=0.0).to(tl.float32)
    x_ptrs = x_ptr + row * stride_x_row + h * stride_x_head + p * stride_x_value
    x = tl.load(x_ptrs, mask=p < P, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + row * stride_dt_row + h * stride_dt_head).to(tl.float32)
    B_ptrs = B_ptr + row * stride_B_row + group * stride_B_group + s * stride_B_state
    C_ptrs = C_ptr + row * stride_C_row + group * stride_C_group + s * stride_C_state
    B = tl.load(B_ptrs, mask=s < N, other=0.0).to(tl.float32)
    C = tl.load(C_ptrs, mask=s < N, other=0.0).to(tl.float32)
    decay = tl.exp(dt * tl.load(A_ptr + h))
    state = state * decay + (dt * x)[:, None] * B[None, :]
    y = tl.sum(state * C[None, :], axis=1)
    y += tl.load(D_ptr + h).to(tl.float32) * x
    tl.store(state_ptrs, state, mask=inside)
    tl.store(y_ptrs, y, mask=p < P)


def step(
    x_RHP: Tensor,
    dt_RH: Tensor,
    A_H: Tensor,
    B_RGN: Tensor,
    C_RGN: Tensor,
    D_H: Tensor,
    pool_S: Tensor,
    slot_ids_R: Tensor,
    y_RHP: Tensor,
) -> None:
    """One token of each of the sequences with slots, in place, and zeros in the rows after them:
    see `ops.ssd_scan`. A_H is fp32."""
    R, H, P = x_RHP.shape
    N = B_RGN.shape[2]
    block_n = max(16, triton.next_power_of_2(N))
    block_p = min(triton.next_power_of_2(P), max(1, STEP_ELEMENTS // block_n))
    step_kernel(
        (R, H, triton.cdiv(P, block_p)),
        (x_RHP, dt_RH, A_H, B_RGN, C_RGN, D_H, pool_S, slot_ids_R, y_RHP),
        (len(slot_ids_R),),
        HEADS_PER_GROUP=H // B_RGN.shape[1],
        P=P,
        N=N,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        num_warps=4,
    )


@Kernel
@triton.jit(do_not_specialize=["num_chunks"])
def capture_kernel(
    x_ptr,
    B_ptr,
    dt_ptr,
    cum_ptr,
    ends_ptr,
    initial_ptr,
    boundaries_ptr,
    sequences_ptr,
    chunks_ptr,
    lengths_ptr,
    out_ptr,
    num_chunks,
    stride_x_row,
    stride_x_head,
    stride_x_value,
    stride_B_row,
    stride_B_group,
    stride_B_state,
    stride_out_capture,
    stride_out_head,
    stride_out_value,
    stride_out_state,
    H: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One captured state of one head: S = exp(c_r) S_0 + sum_{j <= r} exp(c_r - c_j) dt_j x_j B_j^T
    for row r of a chunk that begins with the state S_0, with c the running sum of dt A in it."""
    n, h = tl.program_id(0), tl.program_id(1)
    chunk = tl.load(chunks_ptr + n).to(tl.int64)
    length = tl.load(lengths_ptr + n)
    first = tl.load(boundaries_ptr + chunk).to(tl.int64)
    sequence = tl.load(sequences_ptr + chunk).to(tl.int64)
    previous = tl.load(sequences_ptr + tl.maximum(chunk - 1, 0))
    starts = (chunk == 0) | (previous != sequence)

    p, s = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    inside = (p[:, None] < P) & (s[None, :] < N)
    offsets = p[:, None] * N + s[None, :]
    start = tl.load(
        initial_ptr + (sequence * H + h) * P * N + offsets, mask=inside & starts, other=0.0
    ).to(tl.float32)
    start += tl.load(
        ends_ptr + ((chunk - 1) * H + h) * P * N + offsets, mask=inside & (starts == 0), other=0.0
    ).to(tl.float32)

    row = (h.to(tl.int64) * num_chunks + chunk) * CHUNK
    until = tl.load(cum_ptr + row + length - 1)
    state = start * tl.exp(until)
    for j0 in range(0, length, ROWS):
        j = j0 + tl.arange(0, ROWS)
        used = j < length
        cum = tl.load(cum_ptr + row + j, mask=used, other=0.0)
        weight = tl.load(dt_ptr + row + j, mask=used, other=0.0)
        weight = tl.where(used, tl.exp(until - cum) * weight, 0.0)
        x_PL = tl.load(
            x_ptr
            + (first + j)[None, :] * stride_x_row
            + h * stride_x_head
            + p[:, None] * stride_x_value,
            mask=used[None, :] & (p[:, None] < P),
            other=0.0,
        ).to(tl.float32)
        B_LN = tl.load(
            B_ptr
            + (first + j)[:, None] * stride_B_row
            + (h // HEADS_PER_GROUP) * stride_B_group
            + s[None, :] * stride_B_state,
            mask=used[:, None] & (s[None, :] < N),
            other=0.0,
        ).to(tl.float32)
        state = tl.dot(x_PL * weight[None, :], B_LN, state, input_precision="ieee")
    out_ptrs = out_ptr + n.to(tl.int64) * stride_out_capture + h * stride_out_head
    out_ptrs += p[:, None] * stride_out_value + s[None, :] * stride_out_state
    tl.store(out_ptrs, state, mask=inside)


def capture(
    x_THP: Tensor,
    B_TGN: Tensor,
    dt_HSL: Tensor,
    cum_HSL: Tensor,
    ends_SHPN: Tensor,
    initial_RHPN: Tensor,
    chunks: AnchoredChunks,
    out_nHPN: Tensor,
) -> None:
    """Write the states at the captures of the chunks, in one launch.

    Args:
        x_THP, B_TGN: the inputs of the scan, of any dtype.
        dt_HSL, cum_HSL: fp32 step sizes and the sums of dt A from the start of each chunk.
        ends_SHPN: fp32 states at the chunks' ends, contiguous.
        initial_RHPN: fp32 states at the sequences' starts, contiguous.
        chunks: the chunks, with their captures.
        out_nHPN: the captured states.
    """
    S, H, P, N = ends_SHPN.shape
    tables = (
        *(chunks.boundaries_S, chunks.sequences_S),
        *(chunks.capture_chunks_n, chunks.capture_lengths_n),
    )
    capture_kernel(
        (len(out_nHPN), H),
        (x_THP, B_TGN, dt_HSL, cum_HSL, ends_SHPN, initial_RHPN, *tables, out_nHPN),
        (S,),
        H=H,
        HEADS_PER_GROUP=H // B_TGN.shape[1],
        P=P,
        N=N,
        CHUNK=dt_HSL.shape[2],
        BLOCK_P=max(16, triton.next_power_of_2(P)),
        BLOCK_N=max(16, triton.next_power_of_2(N)),
        ROWS=ROWS,
        num_warps=8,
    )
