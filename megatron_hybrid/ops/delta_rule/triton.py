"""Our Triton kernels for the delta rules: a step, the recurrence over chunks, states inside them.

States are `[N, P]`, keys before values, as in the equation, in the reference and in fla-core's
kernels by default. A program has some of the P columns and all N rows of a head's state, so what
it reads of a state are rows of neighbours, and both products with it sum over rows of its own.

Decays inside chunks are fla-core's: running sums from a chunk's start, to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.ops.anchored_chunks import AnchoredChunks
from megatron_hybrid.ops.delta_rule.reference import L2NORM_EPS
from megatron_hybrid.ops.launch import Kernel
from megatron_hybrid.ops.steps import Steps

UNIT_ELEMENTS = 2048
"""Elements of q or k in one program that scales them."""

STEP_ELEMENTS = 4096
"""Elements of a state in one program of a step: 32 values a thread."""

STATE_BYTES = 8192
"""Bytes of a state in one program of the recurrence, in the dtype of the keys."""

MAX_KEY_BYTES = 512
"""Most bytes of a head's keys, for which the recurrence has registers."""


def blocks(N: int, P: int, elements: int, least: int = 1) -> dict[str, int]:
    """Choose rows and columns of a state in one program: `least` of each, as products need."""
    block_n = max(least, triton.next_power_of_2(N))
    block_p = max(least, min(triton.next_power_of_2(P), elements // block_n))
    return {"BLOCK_N": block_n, "BLOCK_P": block_p}


def recur_configuration(N: int, P: int, num_bytes: int) -> tuple[dict[str, int], int]:
    """Choose blocks and stages of the recurrence, for keys of so many bytes a channel. Each stage
    has rows of W and of k in shared memory."""
    return blocks(N, P, STATE_BYTES // num_bytes, least=16), 3 if num_bytes == 2 else 1


@triton.jit
def _at(row, head, stride_row, stride_head):
    """Return the offset of a head of a row; flat tensors may have more than 2^31 elements."""
    return tl.cast(row, tl.int64) * stride_row + head * stride_head


@Kernel
@triton.jit(do_not_specialize=["num_rows"])
def unit_kernel(
    q_ptr,
    k_ptr,
    units_ptr,
    num_rows,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    H_QK: tl.constexpr,
    N: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Divide some rows of one head of q or of k by their lengths."""
    h, is_k = tl.program_id(1), tl.program_id(2)
    t, n = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_N)
    inside = (t[:, None] < num_rows) & (n[None, :] < N)
    if is_k == 0:
        x_ptrs = q_ptr + _at(t, h, stride_q_row, stride_q_head)[:, None] + n[None, :]
    else:
        x_ptrs = k_ptr + _at(t, h, stride_k_row, stride_k_head)[:, None] + n[None, :]
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=1) + EPS)[:, None]
    row = is_k.to(tl.int64) * num_rows + t
    tl.store(units_ptr + ((row * H_QK + h) * N)[:, None] + n[None, :], x, mask=inside)


def unit_rows(q_THN: Tensor, k_THN: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k with rows of length 1, contiguous, in one launch. Their last stride is 1."""
    T, H, N = q_THN.shape
    units_2THN = q_THN.new_empty(2, T, H, N)
    block_n = triton.next_power_of_2(N)
    block_t = max(1, UNIT_ELEMENTS // block_n)
    unit_kernel(
        (triton.cdiv(T, block_t), H, 2),
        (q_THN, k_THN, units_2THN),
        (T,),
        H_QK=H,
        N=N,
        EPS=L2NORM_EPS,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        num_warps=4,
    )
    return units_2THN[0], units_2THN[1]


@Kernel
@triton.jit(do_not_specialize=["num_sequences", "num_rows"])
def steps_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    pool_ptr,
    slots_ptr,
    o_ptr,
    out_ptr,
    rows_ptr,
    offsets_ptr,
    captures_ptr,
    num_sequences,
    num_rows,
    scale,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_g_row,
    stride_g_head,
    stride_beta_row,
    stride_beta_head,
    stride_pool_slot,
    stride_pool_head,
    stride_pool_key,
    stride_o_row,
    stride_o_head,
    stride_out_capture,
    stride_out_head,
    stride_out_key,
    stride_rows_sequence,
    HEADS_PER_KEY: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Run some values of one head of one sequence: S = exp(g) S; S += k beta (v - k S) in the pool,
    o = scale q S, token by token, with the states after captured ones; 0 in the rows after all
    sequences."""
    r, h = tl.program_id(0), tl.program_id(1)
    p, n = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    h_qk = h // HEADS_PER_KEY
    first = tl.load(rows_ptr + r * stride_rows_sequence).to(tl.int64)
    if o_ptr is not None:
        o_ptrs = o_ptr + h * stride_o_head + p
        if r >= num_sequences:
            for t in range(first, num_rows):
                tl.store(o_ptrs + t * stride_o_row, tl.zeros((BLOCK_P,), tl.float32), mask=p < P)
            return
    end = tl.load(rows_ptr + r * stride_rows_sequence + 1).to(tl.int64)
    slot = tl.load(slots_ptr + r).to(tl.int64)
    inside = (n[:, None] < N) & (p[None, :] < P)
    state_ptrs = pool_ptr + slot * stride_pool_slot + h * stride_pool_head
    state_ptrs += n[:, None] * stride_pool_key + p[None, :]
    state = tl.load(state_ptrs, mask=inside, other=0.0).to(tl.float32)
    if o_ptr is not None:
        capture, last = tl.load(offsets_ptr + r), tl.load(offsets_ptr + r + 1)
        wanted = tl.load(captures_ptr + capture, mask=capture < last, other=-1)
    for t in range(first, end):
        k_ptrs = k_ptr + _at(t, h_qk, stride_k_row, stride_k_head) + n
        k = tl.load(k_ptrs, mask=n < N, other=0.0).to(tl.float32)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
        v_ptrs = v_ptr + _at(t, h, stride_v_row, stride_v_head) + p
        v = tl.load(v_ptrs, mask=p < P, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + _at(t, h, stride_beta_row, stride_beta_head)).to(tl.float32)
        g_ptrs = g_ptr + _at(t, h, stride_g_row, stride_g_head)
        if PER_CHANNEL:
            state *= tl.exp(tl.load(g_ptrs + n, mask=n < N, other=0.0).to(tl.float32))[:, None]
        else:
            state *= tl.exp(tl.load(g_ptrs).to(tl.float32))
        written = beta * (v - tl.sum(state * k[:, None], axis=0))
        state += k[:, None] * written[None, :]
        if o_ptr is not None:
            q_ptrs = q_ptr + _at(t, h_qk, stride_q_row, stride_q_head) + n
            q = tl.load(q_ptrs, mask=n < N, other=0.0).to(tl.float32)
            q *= tl.rsqrt(tl.sum(q * q, axis=0) + EPS)
            o = scale * tl.sum(state * q[:, None], axis=0)
            tl.store(o_ptrs + t * stride_o_row, o, mask=p < P)
            # The next token begins with what a call of its own would find.
            state = state.to(pool_ptr.dtype.element_ty).to(tl.float32)
            if t + 1 == wanted:
                out_ptrs = out_ptr + _at(capture, h, stride_out_capture, stride_out_head)
                out_ptrs += n[:, None] * stride_out_key + p[None, :]
                tl.store(out_ptrs, state, mask=inside)
                capture += 1
                wanted = tl.load(captures_ptr + capture, mask=capture < last, other=-1)
    tl.store(state_ptrs, state, mask=inside)


def run_steps(
    q_THN: Tensor, k_THN: Tensor, v_THP: Tensor, g_TH: Tensor, beta_TH: Tensor, steps: Steps
) -> None:
    """Run the recurrence of `ops.gated_delta_rule` in place. g is `[T, H]`, or `[T, H, N]`; the
    last stride of all but g_TH and beta_TH is 1."""
    (_, H, P), N = v_THP.shape, k_THN.shape[2]
    sizes = blocks(N, P, STEP_ELEMENTS)
    steps_kernel(
        (steps.num_programs, H, triton.cdiv(P, sizes["BLOCK_P"])),
        (q_THN, k_THN, v_THP, g_TH, beta_TH, *steps.tensors()),
        (steps.num_sequences, steps.num_rows, N**-0.5),
        HEADS_PER_KEY=H // k_THN.shape[1],
        PER_CHANNEL=g_TH.dim() == 3,
        EPS=L2NORM_EPS,
        N=N,
        P=P,
        **sizes,
        num_warps=4,
    )


@Kernel
@triton.jit(do_not_specialize=["slots_ptr"])  # a slice from any decode on
def recur_kernel(
    k_ptr,
    W_ptr,
    U_ptr,
    cum_ptr,
    pool_ptr,
    slots_ptr,
    boundaries_ptr,
    firsts_ptr,
    places_ptr,
    starts_ptr,
    written_ptr,
    kept_ptr,
    stride_pool_slot,
    stride_pool_head,
    stride_pool_key,
    H: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Run some values of one head of one sequence, from chunk to chunk: what a chunk writes is
    V = U - W S, and S = exp2(c_last) S + sum_j exp2(c_last - c_j) k_j V_j.

    Where each channel has its decay, k already has the factor exp2(c_last - c_j).
    """
    r, h = tl.program_id(0), tl.program_id(1)
    p, n = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    slot = tl.load(slots_ptr + r).to(tl.int64)
    inside = (n[:, None] < N) & (p[None, :] < P)
    offsets = n[:, None] * P + p[None, :]
    state_ptrs = pool_ptr + slot * stride_pool_slot + h * stride_pool_head
    state_ptrs += n[:, None] * stride_pool_key + p[None, :]
    state = tl.load(state_ptrs, mask=inside, other=0.0).to(tl.float32)

    for c in range(tl.load(firsts_ptr + r), tl.load(firsts_ptr + r + 1)):
        chunk = tl.cast(c, tl.int64) * H + h
        tl.store(starts_ptr + chunk * N * P + offsets, state, mask=inside)
        place = tl.load(places_ptr + c)
        kept_ptrs = kept_ptr + (tl.cast(place, tl.int64) * H + h) * N * P + offsets
        tl.store(kept_ptrs, state, mask=inside & (place >= 0))

        end = tl.load(boundaries_ptr + c + 1)
        t = tl.load(boundaries_ptr + c) + tl.arange(0, CHUNK)
        row = t.to(tl.int64) * H + h
        used = t < end
        last = (end - 1).to(tl.int64) * H + h
        used_P = used[:, None] & (p[None, :] < P)
        W_ptrs = W_ptr + row[:, None] * N + n[None, :]
        W = tl.load(W_ptrs, mask=used[:, None] & (n[None, :] < N), other=0.0)
        U = tl.load(U_ptr + row[:, None] * P + p[None, :], mask=used_P, other=0.0)
        written = U - tl.dot(W, state.to(W.dtype))
        tl.store(written_ptr + row[:, None] * P + p[None, :], written, mask=used_P)

        if PER_CHANNEL:
            state *= tl.exp2(tl.load(cum_ptr + last * N + n, mask=n < N, other=0.0))[:, None]
        else:
            until = tl.load(cum_ptr + last)
            cum = tl.load(cum_ptr + row, mask=used, other=0.0)
            written *= tl.where(used, tl.exp2(until - cum), 0.0)[:, None]
            state *= tl.exp2(until)
        k_row = t.to(tl.int64) * (H // HEADS_PER_KEY) + h // HEADS_PER_KEY
        k_ptrs = k_ptr + k_row[None, :] * N + n[:, None]
        k = tl.load(k_ptrs, mask=(n[:, None] < N) & used[None, :], other=0.0)
        state = tl.dot(k, written.to(k.dtype), state)
    tl.store(state_ptrs, state, mask=inside)


def recur(
    k_THN: Tensor,
    W_THN: Tensor,
    U_THP: Tensor,
    cum_TH: Tensor,
    pool_S: Tensor,
    slot_ids_R: Tensor,
    chunks: AnchoredChunks,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the states from chunk to chunk, in one launch; final ones go to the pool.

    Args:
        k_THN: keys `[T, H_qk, N]`; of Kimi Delta Attention those with decays to the chunks' ends.
        W_THN, U_THP: the factors of the WY form, each contiguous.
        cum_TH: fp32 running sums of the decays, `[T, H]` or `[T, H, N]`.
        pool_S, slot_ids_R: see `SlotStates`; its last stride is 1.

    Returns:
        State at the start of each chunk `[S, H, N, P]` and what each token writes `[T, H, P]`, in
        the dtype of k; the fp32 states at the starts of the chunks with captures.
    """
    (_, H, P), N = U_THP.shape, k_THN.shape[2]
    starts_SHNP = k_THN.new_empty(len(chunks.sequences_S), H, N, P)
    kept_HNP = cum_TH.new_empty(len(chunks.place_chunks), H, N, P)
    written_THP = U_THP.new_empty(U_THP.shape)
    sizes, num_stages = recur_configuration(N, P, k_THN.element_size())
    tables = chunks.boundaries_S, chunks.first_chunks_R, chunks.places_S
    outputs = starts_SHNP, written_THP, kept_HNP
    recur_kernel(
        (len(slot_ids_R), H, triton.cdiv(P, sizes["BLOCK_P"])),
        (k_THN, W_THN, U_THP, cum_TH, pool_S, slot_ids_R, *tables, *outputs),
        H=H,
        HEADS_PER_KEY=H // k_THN.shape[1],
        PER_CHANNEL=cum_TH.dim() == 3,
        N=N,
        P=P,
        CHUNK=chunk_size,
        **sizes,
        num_warps=4,
        num_stages=num_stages,
    )
    return outputs
