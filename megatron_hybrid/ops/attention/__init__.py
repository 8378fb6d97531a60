"""Causal attention over ragged sequences: from a paged cache, or uncached for training."""

from __future__ import annotations

import torch

from megatron_hybrid.ops.attention import reference
from megatron_hybrid.ops.attention.pattern import AttentionPattern
from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.kernels import TRITON, kernel_backend
from megatron_hybrid.ops.ragged import RaggedLayout

__all__ = ["AttentionPattern", "paged_attention", "varlen_attention"]

_GROUPS = {"K and H % K == 0": "{H} query heads are not a multiple of {K} kv heads"}
_paged_attention = Op(
    "paged_attention",
    reference.paged_attention,
    {
        "q_THD": "T H D",
        "k_pages_nBKD": "number pages B K D",
        "v_pages_nBKP": "number pages B K any",
        "block_table_RM": "int R M",
        "sinks_H": "H or None",
    },
    {
        **_GROUPS,
        "layout.last_end <= M * B": "a sequence has {layout.last_end} keys, but the block table "
        "has {M} columns of {B} tokens: give it more columns",
    },
)
_paged_attention.register(
    kernel_backend("triton", "megatron_hybrid.ops.attention.triton", TRITON, priority=10)
)
_varlen_attention = Op(
    "varlen_attention",
    reference.varlen_attention,
    {"q_THD": "T H D", "k_TKD": "T K D", "v_TKP": "T K any", "sinks_H": "H or None"},
    _GROUPS,
)


def paged_attention(
    q_THD: torch.Tensor,
    k_pages_nBKD: torch.Tensor,
    v_pages_nBKP: torch.Tensor,
    block_table_RM: torch.Tensor,
    layout: RaggedLayout,
    pattern: AttentionPattern,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each sequence's new tokens over its pages, into which their K and V were
    written.

    Blocks before the first visible position are not read; their entries in the block table may be
    anything.

    Args:
        q_THD: queries `[T, H, D]`; H is a multiple of the key/value heads K.
        k_pages_nBKD, v_pages_nBKP: `[pages, B, K, D]` and `[pages, B, K, P]`; may be views with any
            strides (values may be a part of the keys), and of another dtype than q, to which they
            are converted.
        block_table_RM: int32 or int64 `[R, M]`: position p of sequence r lies in page
            `block_table[r, p // B]`, row `p % B`.
        layout: lengths and start positions; sequence r has start + length keys.
        pattern: visible positions, which are absolute, and the form of scores.
        sinks_H: one logit per query head that joins the softmax and carries no value, `[H]`, any
            floating dtype (attention sinks of GPT-OSS); None for none.

    Returns:
        `[T, H, P]` in the dtype of q, zeros in padding rows. Differentiable. With a softcap or
        sinks the arithmetic is fp32 for all inputs (float64 for float64 ones); else that of torch's
        scaled_dot_product_attention.

    Raises:
        TypeError: q or the sinks are not floating-point.
        ValueError: shapes that do not fit, or a block table too short for a sequence.
    """
    return _paged_attention(
        q_THD, k_pages_nBKD, v_pages_nBKP, block_table_RM, layout, pattern, sinks_H
    )


def varlen_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKP: torch.Tensor,
    layout: RaggedLayout,
    pattern: AttentionPattern,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each sequence over itself: the forward of training and of uncached runs.

    Args:
        q_THD: queries `[T, H, D]`; H is a multiple of the key/value heads K.
        k_TKD, v_TKP: `[T, K, D]` and `[T, K, P]`.
        layout: lengths of the sequences, each a whole one; start positions are ignored.
        pattern: visible positions, counted from each sequence's first token; form of scores.
        sinks_H: one logit per query head that joins the softmax and carries no value, `[H]`, any
            floating dtype (attention sinks of GPT-OSS); None for none.

    Returns:
        `[T, H, P]` in the dtype of q, zeros in padding rows. Differentiable. Arithmetic as in
        `paged_attention`.

    Raises:
        TypeError: q, k, v or the sinks are not floating-point.
        ValueError: shapes that do not fit.
    """
    return _varlen_attention(q_THD, k_TKD, v_TKP, layout, pattern, sinks_H)
