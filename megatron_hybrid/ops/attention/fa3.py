"""Prefills by FlashAttention 3 on the pages themselves, where its wheel (tokenspeed-fa3) is: for
GPUs of compute capability 9.0.

It is called with one split of the keys, so that a row's sums do not depend on the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.ops.activations import sigmoid
from megatron_hybrid.ops.attention import flash
from megatron_hybrid.ops.attention.work import of_many_tokens
from megatron_hybrid.ops.dispatch import planning
from megatron_hybrid.ops.to_device import all_to_device


def run(*inputs: Any) -> Tensor:
    """See `ops.paged_attention`: sequences with many new tokens here, the others by our kernel."""
    q_THD, k_pages_nBKD, v_pages_nBKD, block_table_RM, layout, pattern, sinks_H = inputs
    from flash_attn_interface import flash_attn_with_kvcache

    from megatron_hybrid.ops.attention import triton

    many = of_many_tokens(layout)
    out_THD = triton.run(*inputs, takes_whole=not many)
    if not many:
        return out_THD

    def numbers() -> list[Tensor]:
        spans = [range(layout.cu_seqlens[r], layout.cu_seqlens[r + 1]) for r in many]
        ends = [layout.start_positions[r] + layout.lengths[r] for r in many]
        # It reads whole tiles of keys, and weighs hidden values by 0, which NaN outlives. A block
        # that no row sees may be the null page: read the first that is seen in its place.
        starts = (max(0, int(pattern.first_visible(layout.start_positions[r]))) for r in many)
        blocks = np.arange(block_table_RM.shape[1])
        blocks = np.concatenate([np.maximum(blocks, at // k_pages_nBKD.shape[1]) for at in starts])
        lists = np.concatenate(spans), many, ends, np.cumsum([0, *map(len, spans)]), blocks
        return all_to_device(lists, q_THD.device)

    key = ("fa3", pattern.window, pattern.chunk, block_table_RM.shape[1], q_THD.device)
    rows, sequences, ends, cu_queries, blocks = layout.cached(key, numbers)
    table_rM = block_table_RM[sequences]
    found_nHD, lse_Hn, *_ = flash_attn_with_kvcache(
        q_THD[rows],
        k_pages_nBKD,
        v_pages_nBKD,
        cache_seqlens=ends,
        page_table=table_rM.gather(1, blocks.view_as(table_rM).long()),
        cu_seqlens_q=cu_queries,
        max_seqlen_q=max(layout.lengths),
        softmax_scale=pattern.scale,
        causal=True,
        window_size=(-1, -1) if pattern.window is None else (pattern.window - 1, 0),
        attention_chunk=pattern.chunk or 0,
        num_splits=1,
        return_softmax_lse=True,
    )
    if sinks_H is not None:  # a score without a value, see `flash`
        found_nHD = found_nHD * sigmoid(lse_Hn - sinks_H.to(lse_Hn.dtype)[:, None]).t()[..., None]
    return out_THD.index_copy_(0, rows.long(), found_nHD.to(out_THD.dtype))


def verify(*inputs: Any) -> str | None:
    q_THD, k_pages_nBKD, v_pages_nBKD, _, _, pattern, *_ = inputs
    if pattern.softcap is not None:
        return f"it has no softcap, which is {pattern.softcap}: its wheel is built without"
    D, P = q_THD.shape[-1], v_pages_nBKD.shape[-1]
    if not q_THD.dtype == k_pages_nBKD.dtype == v_pages_nBKD.dtype:
        return f"q and pages are of {q_THD.dtype}, {k_pages_nBKD.dtype} and {v_pages_nBKD.dtype}"
    if D != P or 64 < D <= 96:
        return f"heads are {D} and {P} wide; it takes equal widths, and none from 65 to 96"
    if planning.get() is None and torch.cuda.get_device_capability(q_THD.device) != (9, 0):
        return "it needs a GPU of compute capability 9.0"
    return flash.verify_paged(*inputs)
