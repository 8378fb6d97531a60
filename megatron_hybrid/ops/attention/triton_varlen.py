"""Attention of whole sequences with a soft cap in Triton, with a gradient; torch's own kernels
serve the other patterns.

The forward pass is that of prefills, over pages of one token. The backward pass keeps the inputs
alone: with p the weights of a query, g the gradient of its output and v the values, the gradient of
score j is p_j (g . v_j - sum_i p_i g . v_i). A program has the sums of some queries from one pass
over their keys, and the gradients from a second one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hybrid.ops.attention.triton import is_seen
from megatron_hybrid.ops.attention.triton import run as run_paged
from megatron_hybrid.ops.kernels import SequenceTable
from megatron_hybrid.ops.launch import Kernel
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.to_device import all_to_device

WIDEST = 512
"""Bytes of the widest head: the gradients of some keys and values are in a program's registers."""


@triton.jit
def _rows(ptr, row, places, length, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W):
    """Return pointers to some tokens of a sequence and one head, of contiguous `[T, HEADS, WIDTH]`,
    and which of them there are."""
    w = tl.arange(0, BLOCK_W)
    ptrs = ptr + ((row + places)[:, None] * HEADS + head) * WIDTH + w[None, :]
    return ptrs, (places < length)[:, None] & (w < WIDTH)[None, :]


@triton.jit
def _scores(q, k, i, j, scale, softcap, WINDOW, CHUNK, SKIPS_FIRST):
    """Compute the scores of queries at i and keys at j, and their derivatives by q . k."""
    part = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    part = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * part / softcap))  # its tanh
    seen = is_seen(j, i, WINDOW, CHUNK, SKIPS_FIRST)
    return tl.where(seen, softcap * part, float("-inf")), scale * (1.0 - part * part)


@Kernel
@triton.jit
def query_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    sinks_ptr,
    grad_q_ptr,
    lse_ptr,
    means_ptr,
    sequences_ptr,
    firsts_ptr,
    boundaries_ptr,
    scale,
    softcap,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SKIPS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Compute the gradients of BLOCK queries of one head, the log-sum-exps of their scores, and the
    means of g . v by their weights."""
    number, head = tl.program_id(0), tl.program_id(1)
    sequence, first = tl.load(sequences_ptr + number), tl.load(firsts_ptr + number)
    row = tl.load(boundaries_ptr + sequence).to(tl.int64)
    length = (tl.load(boundaries_ptr + sequence + 1) - row).to(tl.int32)
    i, kv = first + tl.arange(0, BLOCK), head // GROUP
    q_ptrs, q_mask = _rows(q_ptr, row, i, length, head, H, D, BLOCK_D)
    g_ptrs, g_mask = _rows(grad_ptr, row, i, length, head, H, P, BLOCK_P)
    q, g = tl.load(q_ptrs, mask=q_mask, other=0.0), tl.load(g_ptrs, mask=g_mask, other=0.0)
    low, high = 0, tl.minimum(first + BLOCK, length)
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0) // BLOCK * BLOCK
    if CHUNK > 0:
        low = first // CHUNK * CHUNK // BLOCK * BLOCK
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total, mean = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    lse = total
    grad_q = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for SECOND in tl.static_range(2):
        for j0 in range(low, high, BLOCK):
            j = j0 + tl.arange(0, BLOCK)
            k_ptrs, k_mask = _rows(k_ptr, row, j, length, kv, H // GROUP, D, BLOCK_D)
            v_ptrs, v_mask = _rows(v_ptr, row, j, length, kv, H // GROUP, P, BLOCK_P)
            k, v = tl.load(k_ptrs, mask=k_mask, other=0.0), tl.load(v_ptrs, mask=v_mask, other=0.0)
            scores, slopes = _scores(q, k, i, j, scale, softcap, WINDOW, CHUNK, SKIPS_FIRST)
            moved = tl.dot(g, tl.trans(v), input_precision="ieee")
            if SECOND:
                weights = tl.exp(scores - lse[:, None]) * (moved - mean[:, None]) * slopes
                grad_q = tl.dot(weights.to(k.dtype), k, grad_q, input_precision="ieee")
            else:
                new = tl.maximum(largest, tl.max(scores, 1))
                shift = tl.where(new == float("-inf"), 0.0, new)
                weights, kept = tl.exp(scores - shift[:, None]), tl.exp(largest - shift)
                total = total * kept + tl.sum(weights, 1)
                mean = mean * kept + tl.sum(weights * moved, 1)
                largest = new
        if not SECOND:
            if sinks_ptr is not None:
                total += tl.exp(tl.load(sinks_ptr + head).to(tl.float32) - largest)
            lse, mean = largest + tl.log(total), mean / total
    grad_q_ptrs, _ = _rows(grad_q_ptr, row, i, length, head, H, D, BLOCK_D)
    tl.store(grad_q_ptrs, grad_q, mask=q_mask)
    tl.store(lse_ptr + (row + i) * H + head, lse, mask=i < length)
    tl.store(means_ptr + (row + i) * H + head, mean, mask=i < length)


@Kernel
@triton.jit
def key_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    grad_k_ptr,
    grad_v_ptr,
    lse_ptr,
    means_ptr,
    sequences_ptr,
    firsts_ptr,
    boundaries_ptr,
    scale,
    softcap,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SKIPS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Compute the gradients of BLOCK keys and values of a head from all queries that see any."""
    number, kv = tl.program_id(0), tl.program_id(1)
    sequence, first = tl.load(sequences_ptr + number), tl.load(firsts_ptr + number)
    row = tl.load(boundaries_ptr + sequence).to(tl.int64)
    length = (tl.load(boundaries_ptr + sequence + 1) - row).to(tl.int32)
    j, last = first + tl.arange(0, BLOCK), length
    k_ptrs, k_mask = _rows(k_ptr, row, j, length, kv, H // GROUP, D, BLOCK_D)
    v_ptrs, v_mask = _rows(v_ptr, row, j, length, kv, H // GROUP, P, BLOCK_P)
    k, v = tl.load(k_ptrs, mask=k_mask, other=0.0), tl.load(v_ptrs, mask=v_mask, other=0.0)
    if WINDOW > 0:
        last = tl.minimum(length, first + BLOCK - 1 + WINDOW)
    if CHUNK > 0:
        last = tl.minimum(length, ((first + BLOCK - 1) // CHUNK + 1) * CHUNK)
    grad_k = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    grad_v = tl.zeros((BLOCK, BLOCK_P), tl.float32)
    for head in range(kv * GROUP, (kv + 1) * GROUP):
        for i0 in range(first, last, BLOCK):
            i = i0 + tl.arange(0, BLOCK)
            q_ptrs, q_mask = _rows(q_ptr, row, i, length, head, H, D, BLOCK_D)
            g_ptrs, g_mask = _rows(grad_ptr, row, i, length, head, H, P, BLOCK_P)
            q, g = tl.load(q_ptrs, mask=q_mask, other=0.0), tl.load(g_ptrs, mask=g_mask, other=0.0)
            lse = tl.load(lse_ptr + (row + i) * H + head, mask=i < length, other=float("inf"))
            mean = tl.load(means_ptr + (row + i) * H + head, mask=i < length, other=0.0)
            scores, slopes = _scores(q, k, i, j, scale, softcap, WINDOW, CHUNK, SKIPS_FIRST)
            weights = tl.exp(scores - lse[:, None])
            grad_v = tl.dot(tl.trans(weights).to(g.dtype), g, grad_v, input_precision="ieee")
            moved = tl.dot(g, tl.trans(v), input_precision="ieee")
            weights *= (moved - mean[:, None]) * slopes
            grad_k = tl.dot(tl.trans(weights).to(q.dtype), q, grad_k, input_precision="ieee")
    grad_k_ptrs, _ = _rows(grad_k_ptr, row, j, length, kv, H // GROUP, D, BLOCK_D)
    grad_v_ptrs, _ = _rows(grad_v_ptr, row, j, length, kv, H // GROUP, P, BLOCK_P)
    tl.store(grad_k_ptrs, grad_k, mask=k_mask)
    tl.store(grad_v_ptrs, grad_v, mask=v_mask)


def verify(q_THD: Tensor, k_TKD: Tensor, v_TKP: Tensor, *others: Any) -> str | None:
    pattern = others[1]
    if pattern.softcap is None:
        return "it is for scores with a softcap; torch's kernels serve others"
    if pattern.dropout:
        return "it has no dropout"
    if not q_THD.dtype == k_TKD.dtype == v_TKP.dtype:
        return f"q, k and v are of {q_THD.dtype}, {k_TKD.dtype} and {v_TKP.dtype}"
    if (widest := max(q_THD.shape[-1], v_TKP.shape[-1]) * q_THD.element_size()) > WIDEST:
        return f"heads have {widest} bytes; it takes up to {WIDEST}"
    return None


def run(*inputs: Any) -> Tensor:
    """See `ops.varlen_attention`."""
    q_THD, k_TKD, v_TKP, layout, pattern, sinks_H = inputs

    def from_zero() -> RaggedLayout:
        return RaggedLayout(layout.lengths, (0,) * layout.num_sequences, (), layout.num_padding)

    whole = layout.cached("from position 0", from_zero)
    pages = k_TKD.unsqueeze(1), v_TKP.unsqueeze(1)
    return run_paged(q_THD, *pages, None, whole, pattern, sinks_H)


def again(*_: Any) -> Callable[..., Tensor]:
    """Return the function that has the kernels' gradient."""
    return _Gradient.apply


class _Gradient(torch.autograd.Function):
    """Attention whose output has been computed: nobody reads what this gives."""

    @staticmethod
    def forward(ctx, q_THD, k_TKD, v_TKP, layout, pattern, sinks_H):
        ctx.layout, ctx.pattern = layout, pattern
        ctx.save_for_backward(q_THD, k_TKD, v_TKP, sinks_H)
        return q_THD.new_empty(*q_THD.shape[:2], v_TKP.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_THP):
        *qkv, sinks_H = ctx.saved_tensors
        inputs = [each.contiguous() for each in (*qkv, grad_THP)]
        layout, pattern = ctx.layout, ctx.pattern
        (T, H, D), (_, K, P) = inputs[0].shape, inputs[2].shape
        # As many as registers of sm_90 hold, by the compiler's numbers.
        block = 64 if grad_THP.element_size() == 2 and max(D, P) <= 128 else 16

        def make() -> list[Tensor]:
            tiles = [
                (r, first)
                for r, length in enumerate(layout.lengths)
                for first in range(0, length, block)
            ]
            return all_to_device(list(zip(*tiles, strict=True)), grad_THP.device)

        tiles = layout.cached(("tiles", block, grad_THP.device), make)
        tables = (*tiles, SequenceTable.of(layout, grad_THP.device).boundaries)
        form = {
            **{"H": H, "GROUP": H // K, "D": D, "P": P},
            **{"WINDOW": pattern.window or 0, "CHUNK": pattern.chunk or 0},
            **{"SKIPS_FIRST": pattern.skips_first, "BLOCK": block},
            **{"BLOCK_D": max(16, triton.next_power_of_2(D))},
            **{"BLOCK_P": max(16, triton.next_power_of_2(P)), "num_warps": 8, "num_stages": 1},
        }
        numbers, R = (pattern.scale, pattern.softcap), len(tiles[0])
        grads = [torch.zeros_like(each) for each in inputs[:3]]
        sums = [grad_THP.new_empty(T, H, dtype=torch.float32) for _ in range(2)]
        outputs = (sinks_H, grads[0], *sums)
        query_gradient_kernel((R, H), (*inputs, *outputs, *tables), numbers, **form)
        key_gradient_kernel((R, K), (*inputs, *grads[1:], *sums, *tables), numbers, **form)
        grad_H = None
        if sinks_H is not None:
            lse_TH, mean_TH = (each[: layout.num_tokens] for each in sums)
            grad_H = -(torch.exp(sinks_H - lse_TH) * mean_TH).sum(0).to(sinks_H.dtype)
        return *grads, None, None, grad_H
