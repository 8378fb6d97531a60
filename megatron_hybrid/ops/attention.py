"""Causal attention over ragged sequences: from a paged cache, or uncached for training."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_hybrid.ops.checks import check_rows, check_shape, join, pad_rows, rows_between
from megatron_hybrid.ops.ragged import RaggedLayout

QUERY_TILE = 128
"""Queries that share one mask. Keys that no query of a tile sees are skipped, which is half of all
in a causal square (torch's CPU kernel reads them even with is_causal), and masks stay small."""

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
        k_pages_nBKD, v_pages_nBKD: `[pages, B, K, D]`; may be views with any stride between pages,
            and of another dtype than q: what is read is converted.
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
        q_steps = rows_between(q_THD, 0, layout.num_steps)
        pages = k_pages_nBKD, v_pages_nBKD
        outs.append(_decode(q_steps, pages, block_table_RM, layout, softmax_scale, window))
    for r in range(layout.num_steps, layout.num_sequences):
        start = layout.start_positions[r]
        first = 0 if window is None else max(0, start - window + 1) // B
        blocks = block_table_RM[r, first : -(-kv_lengths[r] // B)]
        k, v = (
            pages.index_select(0, blocks).flatten(0, 1)[None, : kv_lengths[r] - first * B]
            for pages in (k_pages_nBKD, v_pages_nBKD)
        )
        k, v = k.to(q_THD.dtype), v.to(q_THD.dtype)
        q = q_THD[None, layout.cu_seqlens[r] : layout.cu_seqlens[r + 1]]
        outs.append(_attend(q, k, v, start - first * B, softmax_scale, window).squeeze(0))
    return pad_rows(join(outs), layout)


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
    qkv = [rows_between(t, 0, layout.num_tokens) for t in (q_THD, k_TKD, v_TKD)]
    if len(set(layout.lengths)) == 1:
        q, k, v = (t.unflatten(0, (layout.num_sequences, layout.lengths[0])) for t in qkv)
        return pad_rows(_attend(q, k, v, 0, softmax_scale, window).flatten(0, 1), layout)
    outs = [
        _attend(q[None], k[None], v[None], 0, softmax_scale, window).squeeze(0)
        for q, k, v in zip(*(t.split(layout.lengths) for t in qkv), strict=True)
    ]
    return pad_rows(join(outs), layout)


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
    size = q.shape[2]
    tiles = []
    for i in range(0, size, QUERY_TILE):
        end = min(i + QUERY_TILE, size)
        low = 0 if window is None else max(0, offset + i - window + 1)
        high = offset + end
        rows = torch.arange(offset + i, high, device=q.device).unsqueeze(1)
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
            enable_gqa=q.shape[1] != k.shape[1],
        )
        tiles.append(o.transpose(1, 2))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)


def _decode(
    q_RHD: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    block_table_RM: torch.Tensor,
    layout: RaggedLayout,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """One query per sequence, a group of sequences at a time."""
    _, B, K, D = pages[0].shape
    max_blocks = max(1, GATHER_BYTES // (2 * B * K * D * pages[0].element_size()))
    groups, inverse = layout.cached(
        ("decode groups", B, window, max_blocks, q_RHD.device),
        lambda: _decode_groups(layout, B, window, max_blocks, q_RHD.device),
    )
    outs = []
    for rows, columns, visible_rt, edges in groups:
        blocks = block_table_RM[rows.unsqueeze(1), columns].flatten()
        k, v = (
            page.index_select(0, blocks).to(q_RHD.dtype).view(len(rows), -1, K, D) for page in pages
        )
        for edge in edges:
            # Memory that nobody wrote yet may hold NaN, and 0 * NaN would reach the output.
            hidden = ~visible_rt[:, edge, None, None]
            k[:, edge].masked_fill_(hidden, 0.0)
            v[:, edge].masked_fill_(hidden, 0.0)
        # The query heads of a key/value head as its query rows: keys are read once for all.
        o = F.scaled_dot_product_attention(
            q_RHD[rows].unflatten(1, (K, -1)),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=visible_rt[:, None, None],
            scale=scale,
        )
        outs.append(o.flatten(1, 2))
    return join(outs).index_select(0, inverse)


def _decode_groups(
    layout: RaggedLayout, B: int, window: int | None, max_blocks: int, device: torch.device
) -> tuple[list[tuple], torch.Tensor]:
    """Decodes of like length side by side: at most `max_blocks` in a group, at most half padding.

    Returns, for each group, its rows `[r]`, the block table columns to read `[r, m]`, which of
    their t = m * B keys are visible `[r, t]`, and the slices of t that hold all hidden ones; and
    the place of each row behind all groups.
    """
    lengths = [start + 1 for start in layout.start_positions[: layout.num_steps]]
    firsts = [0 if window is None else max(0, n - window) // B for n in lengths]
    sizes = [-(-n // B) - first for n, first in zip(lengths, firsts, strict=True)]
    order = sorted(range(len(sizes)), key=lambda r: -sizes[r])
    members: list[list[int]] = []
    for r in order:
        longest = sizes[members[-1][0]] if members else 0
        if 2 * sizes[r] >= longest > 0 and (len(members[-1]) + 1) * longest <= max_blocks:
            members[-1].append(r)
        else:
            members.append([r])
    groups = []
    for group in members:
        first, length = (
            torch.tensor([numbers[r] for r in group], device=device).unsqueeze(1)
            for numbers in (firsts, lengths)
        )
        size = sizes[group[0]]
        # Columns behind a sequence's end repeat its last block, and their keys are not visible.
        columns = (first + torch.arange(size, device=device)).minimum((length - 1) // B)
        positions = first * B + torch.arange(size * B, device=device)
        visible = positions < length
        edges = [slice(min(lengths[r] - firsts[r] * B for r in group), size * B)]
        if window is not None:
            visible &= positions >= length - window
            edges.append(slice(0, B))
        groups.append((torch.tensor(group, device=device), columns, visible, edges))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return groups, torch.tensor(inverse, device=device)


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
