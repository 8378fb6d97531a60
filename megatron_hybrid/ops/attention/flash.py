"""Attention by torch's FlashAttention 2, as `torch.nn.attention.varlen` has it: whole sequences,
packed, with a gradient, and prefills on keys gathered from pages.

A sink is a score without a value: with the log-sum-exp L of the other scores, outputs are
multiplied by sigmoid(L - sink), and the backward pass, which is given outputs and log-sum-exps, is
given those with the sink. (The gradient of `varlen_attn` leaves that of its log-sum-exp out.)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hybrid.ops.activations import sigmoid
from megatron_hybrid.ops.attention.pattern import AttentionPattern
from megatron_hybrid.ops.attention.reference import aligned
from megatron_hybrid.ops.attention.work import of_many_tokens
from megatron_hybrid.ops.checks import compute_dtype, has_tangent, pad_rows, rows_between
from megatron_hybrid.ops.dispatch import planning
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.to_device import all_to_device

forward_op: Any = getattr(torch.ops.aten, "_flash_attention_forward", None)
backward_op: Any = getattr(torch.ops.aten, "_flash_attention_backward", None)
MISSING = None if forward_op and backward_op else "torch has no FlashAttention 2"


class Spans(NamedTuple):
    """Runs of queries of a sequence, each with all keys that one of them sees: the last query sees
    the last key. Index tensors are int32."""

    cu_queries: Tensor
    cu_keys: Tensor
    rows: Tensor
    """Row of each query."""
    owners: Tensor
    """The sequence of each key."""
    positions: Tensor
    """The position of each key."""
    most_queries: int
    most_keys: int
    left: int
    """Keys before its own that a query sees; -1 means all."""

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """Where queries and keys begin, and the most of each, as FlashAttention takes them."""
        return self.cu_queries, self.cu_keys, self.most_queries, self.most_keys

    @classmethod
    def of(
        cls, layout: RaggedLayout, pattern: AttentionPattern, device: torch.device, paged: bool
    ) -> Spans | None:
        """Return the spans of a layout, cached in it; None if there are none.

        Args:
            paged: whether sequences begin at their start positions, and those with few new tokens
                are left out.
        """

        def build() -> Spans | None:
            spans, many = [], {*of_many_tokens(layout)}
            for r, length in enumerate(layout.lengths):
                if paged and r not in many:
                    continue
                first = layout.start_positions[r] if paged else 0
                row, size = layout.cu_seqlens[r] - first, pattern.chunk or first + length
                ends = range(first - first % size + size, first + length, size)
                for end in (*ends, first + length):
                    spans.append((r, row, first, end, max(0, int(pattern.first_visible(first)))))
                    first = end
            if not spans:
                return None
            queries = [end - first for _, _, first, end, _ in spans]
            keys = [end - low for *_, end, low in spans]
            numbers = all_to_device(
                (
                    np.cumsum([0, *queries]),
                    np.cumsum([0, *keys]),
                    np.concatenate(
                        [np.arange(row + at, row + end) for _, row, at, end, _ in spans]
                    ),
                    np.repeat([r for r, *_ in spans], keys),
                    np.concatenate([np.arange(low, end) for *_, end, low in spans]),
                ),
                device,
            )
            left = -1 if pattern.window is None else pattern.window - 1
            return cls(*numbers, max(queries), max(keys), left)

        key = ("spans", pattern.window, pattern.chunk, device, paged)
        return layout.cached(key, build)


class _Attention(torch.autograd.Function):
    """`[T, H, D]`, `[S, K, D]` twice, sinks `[H]` or None -> `[T, H, D]`."""

    @staticmethod
    def forward(ctx, q_THD, k_SKD, v_SKD, sinks_H, spans, pattern):
        window = {"window_size_left": spans.left, "window_size_right": 0}
        # What both of torch's functions take in addition to tensors.
        ctx.form = (*spans.lengths, 0.0, pattern.window is None), {"scale": pattern.scale, **window}
        out_THD, lse_HT, *random, _ = forward_op(
            q_THD, k_SKD, v_SKD, *ctx.form[0], return_debug_mask=False, **ctx.form[1]
        )
        if sinks_H is not None:
            sinks_H1 = sinks_H.to(lse_HT.dtype).unsqueeze(1)
            part_THD = sigmoid(lse_HT - sinks_H1).t().unsqueeze(-1)
            out_THD = (out_THD * part_THD).to(out_THD.dtype)
            lse_HT = torch.logaddexp(lse_HT, sinks_H1)
        ctx.save_for_backward(q_THD, k_SKD, v_SKD, sinks_H, out_THD, lse_HT, *random)
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_THD):
        q_THD, k_SKD, v_SKD, sinks_H, out_THD, lse_HT, *random = ctx.saved_tensors
        inputs = (grad_THD.contiguous(), q_THD, k_SKD, v_SKD, out_THD, lse_HT)
        grads = backward_op(*inputs, *ctx.form[0], *random, **ctx.form[1])
        grad_H = None
        if sinks_H is not None:
            weights_HT = torch.exp(sinks_H.to(lse_HT.dtype).unsqueeze(1) - lse_HT)
            moved_TH = (grad_THD.to(lse_HT.dtype) * out_THD).sum(-1)
            grad_H = -(weights_HT * moved_TH.t()).sum(1).to(sinks_H.dtype)
        return (*grads, grad_H, None, None)


@functools.cache
def capped_attention() -> Callable[..., Tensor] | None:
    """Import flash-attn's function, which caps scores unlike torch's; None if it is missing."""
    try:
        from flash_attn import flash_attn_varlen_func as found
    except (ImportError, OSError):
        return None
    return found if "softcap" in inspect.signature(found).parameters else None


def _attend(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKP: Tensor,
    spans: Spans,
    pattern: AttentionPattern,
    sinks_H: Tensor | None,
) -> Tensor:
    P = v_SKP.shape[-1]
    v_SKD = F.pad(v_SKP, (0, q_THD.shape[-1] - P)) if q_THD.shape[-1] > P else v_SKP
    tensors = map(aligned, (q_THD, k_SKD, v_SKD))
    if pattern.softcap is not None:
        window = {"causal": True, "window_size": (spans.left, 0)}
        form = {"softmax_scale": pattern.scale, "softcap": pattern.softcap, **window}
        return capped_attention()(*tensors, *spans.lengths, **form)[..., :P]
    return _Attention.apply(*tensors, sinks_H, spans, pattern)[..., :P]


def run(*inputs: Any) -> Tensor:
    """See `ops.varlen_attention`."""
    q_THD, k_TKD, v_TKP, layout, pattern, sinks_H = inputs
    spans = Spans.of(layout, pattern, q_THD.device, paged=False)
    qkv = (rows_between(t, 0, layout.num_tokens) for t in (q_THD, k_TKD, v_TKP))
    return pad_rows(_attend(*qkv, spans, pattern, sinks_H), layout)


def run_paged(*inputs: Any) -> Tensor:
    """See `ops.paged_attention`: sequences with many new tokens here, the others by our kernel."""
    q_THD, k_pages_nBKD, v_pages_nBKP, block_table_RM, layout, pattern, sinks_H = inputs
    from megatron_hybrid.ops.attention import triton

    spans = Spans.of(layout, pattern, q_THD.device, paged=True)
    out_THP = triton.run(*inputs, takes_whole=spans is None)
    if spans is not None:
        B = k_pages_nBKD.shape[1]
        places = block_table_RM[spans.owners, spans.positions // B], spans.positions % B
        k, v = (pages[places].to(q_THD.dtype) for pages in (k_pages_nBKD, v_pages_nBKP))
        rows_THP = _attend(q_THD[spans.rows], k, v, spans, pattern, sinks_H)
        out_THP.index_copy_(0, spans.rows.long(), rows_THP)
    return out_THP


def verify(q_THD: Tensor, k_TKD: Tensor, v_TKP: Tensor, *others: Any) -> str | None:
    if any(map(has_tangent, (q_THD, k_TKD, v_TKP))):
        return "it has no derivative in forward mode, and one is wanted"
    if not q_THD.dtype == k_TKD.dtype == v_TKP.dtype:
        return f"q, k and v are of {q_THD.dtype}, {k_TKD.dtype} and {v_TKP.dtype}"
    return _refusal(q_THD, k_TKD, v_TKP, *others[1:])


def verify_paged(*inputs: Any) -> str | None:
    from megatron_hybrid.ops.attention import triton

    q_THD, k_pages_nBKD, v_pages_nBKP, _, _, *others = inputs
    return _refusal(q_THD, k_pages_nBKD, v_pages_nBKP, *others) or triton.verify(*inputs)


def _refusal(
    q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, sinks: Tensor | None = None
) -> str | None:
    """Return why it cannot serve such heads and this pattern."""
    D, P = q.shape[-1], v.shape[-1]
    if pattern.softcap is not None and (sinks is not None or capped_attention() is None):
        return f"it takes softcap={pattern.softcap} by flash-attn 2.6 or newer, without sinks"
    for name in ("skips_first", "dropout"):
        if value := getattr(pattern, name):
            return f"it has no {name}, which is {value}"
    if compute_dtype(q) == q.dtype:
        return f"it takes 16 bits, not {q.dtype}"
    if D % 8 or D > 256 or P > D:
        return f"heads are {D} and {P} wide; it takes multiples of 8 up to 256, and P up to D"
    if planning.get() is None:
        if q.device.type != "cuda":
            return f"it runs on cuda devices, the inputs are on {q.device.type}"
        if torch.cuda.get_device_capability(q.device) < (8, 0):
            return "it needs a GPU of compute capability 8.0"
    return None
