"""Causal attention over ragged sequences: from a paged cache, or uncached for training."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_hybrid.ops.checks import check_rows, check_shape, pad_rows
from megatron_hybrid.ops.ragged import RaggedLayout

QUERY_TILE = 256
"""Queries that share one mask: bounds the mask's memory and skips the keys that no query sees."""

GATHER_BYTES = 8 << 20
"""Keys and values that one group of decodes gathers: many decodes over one long shared prefix
must not copy it as many times as they are."""


def paged_attention(
    q_THD: torch.Tensor,
    k_pages_nBKD: torch.Tensor,
    v_pages_nBKD: torch.Tensor,
    block_table_RM: torch.Tensor,
    layout: RaggedLayout,
    softmax_scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of each sequence's new tokens over its pages, which hold them already.

    The token at absolute position t sees the positions (t - window, t], or [0, t] without a
    window. Blocks wholly before the first visible position are not read, so their entries in the
    block table may be anything.

    Args:
        q_THD: queries `[T, H, D]`; H is a multiple of the key/value heads K.
        k_pages_nBKD, v_pages_nBKD: `[pages, B, K, D]`; may be views with any stride between pages.
        block_table_RM: int32 or int64 `[R, M]`: position p of sequence r lies in page
            `block_table[r, p // B]`, row `p % B`.
        layout: lengths and start positions; sequence r has start + length keys.
        softmax_scale: factor of q . k.
        window: positions that a token sees, itself included; None for all.

    Returns:
        `[T, H, D]` in the dtype of q, zeros in padding rows. Differentiable, though a cache seldom
        is.

    Raises:
        ValueError: shapes that do not fit, or a block table too short for a sequence.
    """
    check_rows("q", q_THD, layout)
    _check_heads(q_THD, k_pages_nBKD, v_pages_nBKD, "[pages, B, K, D]", window)
    B = k_pages_nBKD.shape[1]
    check_shape("block_table", block_table_RM, (layout.num_sequences, None), "[R, M]")
    kv_lengths = [
        start + n for start, n in zip(layout.start_positions, layout.lengths, strict=True)
    ]
    if max(kv_lengths) > block_table_RM.shape[1] * B:
        raise ValueError(
            f"a sequence has {max(kv_lengths)} keys, but the block table has "
            f"{block_table_RM.shape[1]} columns of {B} tokens: give it more columns"
        )
    outs = []
    if layout.num_steps:
        outs.append(
            _decode(
                q_THD[: layout.num_steps],
                (k_pages_nBKD, v_pages_nBKD),
                block_table_RM,
                kv_lengths[: layout.num_steps],
                softmax_scale,
                window,
            )
        )
    for r in range(layout.num_steps, layout.num_sequences):
        start = layout.start_positions[r]
        first = 0 if window is None else max(0, start - window + 1) // B
        blocks = block_table_RM[r, first : -(-kv_lengths[r] // B)]
        k, v = (
            pages[blocks].flatten(0, 1)[None, : kv_lengths[r] - first * B]
            for pages in (k_pages_nBKD, v_pages_nBKD)
        )
        q = q_THD[None, layout.cu_seqlens[r] : layout.cu_seqlens[r + 1]]
        outs.append(_attend(q, k, v, start - first * B, softmax_scale, window).squeeze(0))
    return pad_rows(torch.cat(outs), layout)


def varlen_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    layout: RaggedLayout,
    softmax_scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of each sequence over itself: the forward of training and of uncached runs.

    Args:
        q_THD: queries `[T, H, D]`; H is a multiple of the key/value heads K.
        k_TKD, v_TKD: `[T, K, D]`.
        layout: lengths of the sequences; each is taken as whole, start positions are ignored.
        softmax_scale: factor of q . k.
        window: positions that a token sees, itself included; None for all.

    Returns:
        `[T, H, D]` in the dtype of q, zeros in padding rows. Differentiable.

    Raises:
        ValueError: shapes that do not fit.
    """
    for name, tensor in (("q", q_THD), ("k", k_TKD), ("v", v_TKD)):
        check_rows(name, tensor, layout)
    _check_heads(q_THD, k_TKD.unsqueeze(1), v_TKD.unsqueeze(1), "[T, 1, K, D]", window)
    qkv = [t[: layout.num_tokens] for t in (q_THD, k_TKD, v_TKD)]
    if len(set(layout.lengths)) == 1:
        q, k, v = (t.unflatten(0, (layout.num_sequences, layout.lengths[0])) for t in qkv)
        return pad_rows(_attend(q, k, v, 0, softmax_scale, window).flatten(0, 1), layout)
    outs = [
        _attend(q[None], k[None], v[None], 0, softmax_scale, window).squeeze(0)
        for q, k, v in zip(*(t.split(layout.lengths) for t in qkv), strict=True)
    ]
    return pad_rows(torch.cat(outs), layout)


def _attend(
    q_bsHD: torch.Tensor,
    k_btKD: torch.Tensor,
    v_btKD: torch.Tensor,
    offset: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Query row i sees the key rows (offset + i - window, offset + i]."""
    q, k, v = (t.transpose(1, 2) for t in (q_bsHD, k_btKD, v_btKD))
    gqa = q.shape[1] != k.shape[1]
    size = q.shape[2]
    if offset == 0 and (window is None or window >= size):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        return o.transpose(1, 2)
    tiles = []
    for i in range(0, size, QUERY_TILE):
        end = min(i + QUERY_TILE, size)
        low = 0 if window is None else max(0, offset + i - window + 1)
        high = offset + end
        rows = torch.arange(offset + i, offset + end, device=q.device).unsqueeze(1)
        columns = torch.arange(low, high, device=q.device)
        visible = columns <= rows
        if window is not None:
            visible &= columns > rows - window
        o = F.scaled_dot_product_attention(
            q[:, :, i:end],
            k[:, :, low:high],
            v[:, :, low:high],
            attn_mask=visible,
            scale=scale,
            enable_gqa=gqa,
        )
        tiles.append(o.transpose(1, 2))
    return torch.cat(tiles, dim=1)


def _decode(
    q_RHD: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    block_table_RM: torch.Tensor,
    kv_lengths: list[int],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """One query per sequence: sequences of like length side by side, padded to the longest."""
    _, B, K, D = pages[0].shape
    bytes_per_block = 2 * B * K * D * pages[0].element_size()
    firsts = [0 if window is None else max(0, n - window) // B for n in kv_lengths]
    sizes = [-(-n // B) - first for n, first in zip(kv_lengths, firsts, strict=True)]
    order = sorted(range(len(sizes)), key=lambda r: -sizes[r])
    device = q_RHD.device
    outs, done = [], 0
    while done < len(order):
        size = sizes[order[done]]
        fits = max(1, GATHER_BYTES // (size * bytes_per_block))
        group = order[done : done + fits]
        done += len(group)
        rows = torch.tensor(group, device=device)
        first = torch.tensor([firsts[r] for r in group], device=device).unsqueeze(1)
        length = torch.tensor([kv_lengths[r] for r in group], device=device).unsqueeze(1)
        column = first + torch.arange(size, device=device)
        # Columns behind a sequence's end repeat its last block: whatever they hold is masked.
        column = column.minimum((length - 1) // B)
        blocks = block_table_RM[rows.unsqueeze(1), column]
        k, v = (page[blocks].flatten(1, 2).transpose(1, 2) for page in pages)
        position = (first * B) + torch.arange(size * B, device=device)
        visible = position < length
        if window is not None:
            visible &= position >= length - window
        o = F.scaled_dot_product_attention(
            q_RHD[rows].unsqueeze(2),
            k,
            v,
            attn_mask=visible[:, None, None],
            scale=scale,
            enable_gqa=q_RHD.shape[1] != K,
        )
        outs.append(o.squeeze(2))
    inverse = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=device)
    return torch.cat(outs).index_select(0, inverse)


def _check_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meaning: str, window: int | None
) -> None:
    if q.dim() != 3:
        raise ValueError(f"q has shape {list(q.shape)}, expected [T, H, D]")
    check_shape("k", k, (None, None, None, q.shape[2]), meaning)
    check_shape("v", v, tuple(k.shape), meaning)
    if q.shape[1] % k.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[2]} kv heads")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a token sees at least itself, so it is at least 1")
