"""Attention by torch's scaled_dot_product_attention; with softcap or sinks, written out."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from megatron_hybrid.ops.activations import sigmoid
from megatron_hybrid.ops.attention.pattern import AttentionPattern
from megatron_hybrid.ops.checks import compute_dtype, join, pad_rows, rows_between, without_autocast
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.to_device import to_device

QUERY_TILE = 128
"""Positions whose queries share one mask and one run of keys, zeros where a sequence has none: a
query has the same sums in a decode as in any prefill. Tiles are anchored at position 0. Keys that
no query of a tile sees are skipped: half of a causal square, which torch's CPU kernel reads even
with is_causal."""

SCORE_TILE = 32
"""The same for written-out scores, as those of a tile are in memory for all heads at once, and for
short windows, of which a decode would read several otherwise."""

QUERY_ROWS = 4
"""Rows of queries that products are given a multiple of: fewer round otherwise, on some CPUs, also
as the rest of many that torch's kernel takes in blocks."""

GATHER_BYTES = 8 << 20
"""Bytes of keys and values that one group of decodes gathers at a time: many decodes over one long
shared prefix must not all copy it at once."""


def paged_attention(
    q_THD: torch.Tensor,
    k_pages_nBKD: torch.Tensor,
    v_pages_nBKP: torch.Tensor,
    block_table_RM: torch.Tensor,
    layout: RaggedLayout,
    pattern: AttentionPattern,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each sequence's new tokens to its pages, into which their K and V were written.

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
    B, kv_lengths = k_pages_nBKD.shape[1], layout.end_positions
    outs = []
    if layout.num_steps:
        q_steps = rows_between(q_THD, 0, layout.num_step_tokens)
        pages = k_pages_nBKD, v_pages_nBKP
        outs.append(_decode(q_steps, pages, block_table_RM, layout, pattern, sinks_H))
    for r in range(layout.num_steps, layout.num_sequences):
        start = layout.start_positions[r]
        first = max(0, pattern.first_visible(start))
        blocks = block_table_RM[r, first // B : -(-kv_lengths[r] // B)]
        keys = slice(first % B, kv_lengths[r] - first // B * B)
        k, v = (
            pages.index_select(0, blocks).flatten(0, 1)[None, keys]
            for pages in (k_pages_nBKD, v_pages_nBKP)
        )
        k, v = k.to(q_THD.dtype), v.to(q_THD.dtype)
        q = q_THD[None, layout.cu_seqlens[r] : layout.cu_seqlens[r + 1]]
        outs.append(_attend(q, k, v, start, first, pattern, sinks_H).squeeze(0))
    return pad_rows(join(outs), layout)


def varlen_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKP: torch.Tensor,
    layout: RaggedLayout,
    pattern: AttentionPattern,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend within each sequence: the forward of training and of uncached runs.

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
    qkv = [rows_between(t, 0, layout.num_tokens) for t in (q_THD, k_TKD, v_TKP)]
    if len(set(layout.lengths)) == 1:
        q, k, v = (t.unflatten(0, (layout.num_sequences, layout.lengths[0])) for t in qkv)
        return pad_rows(_attend(q, k, v, 0, 0, pattern, sinks_H).flatten(0, 1), layout)
    outs = [
        _attend(q[None], k[None], v[None], 0, 0, pattern, sinks_H).squeeze(0)
        for q, k, v in zip(*(t.split(layout.lengths) for t in qkv), strict=True)
    ]
    return pad_rows(join(outs), layout)


def _attend(
    q_bsHD: torch.Tensor,
    k_btKD: torch.Tensor,
    v_btKP: torch.Tensor,
    start: int,
    first_key: int,
    pattern: AttentionPattern,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from query rows i, at positions start + i, to key rows j, at first_key + j."""
    q, k, v = (t.transpose(1, 2) for t in (q_bsHD, k_btKD, v_btKP))
    end = start + q.shape[2]
    if not _is_fused(pattern, sinks_H, k, v):
        q, k, v = (t.to(compute_dtype(q)) for t in (q, k, v))
        sinks_H = None if sinks_H is None else sinks_H.view(-1, 1, 1)
    tile = _tile_size(pattern, sinks_H, k, v)
    first, last = _keys_of(start, tile, pattern)[0], _keys_of(end - 1, tile, pattern)[1]
    k, v = (F.pad(t, (0, 0, first_key - first, last - end)) for t in (k, v))
    begin, outs = start, []
    while begin < end:
        low, high = _keys_of(begin, tile, pattern)
        rows = torch.arange(begin, min(high, end), device=q.device).unsqueeze(1)
        columns = torch.arange(low, high, device=q.device)
        visible = columns <= rows
        if pattern.is_local or pattern.skips_first:
            visible &= columns >= pattern.first_visible(rows)
        keys, own = slice(low - first, high - first), slice(begin - start, high - start)
        o = _softmax_average(q[:, :, own], k[:, :, keys], v[:, :, keys], visible, pattern, sinks_H)
        outs.append(o.transpose(1, 2))
        begin = high
    return join(outs, dim=1).to(q_bsHD.dtype)


def _tile_size(
    pattern: AttentionPattern, sinks: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor
) -> int:
    is_short = pattern.is_local and (pattern.window or pattern.chunk) < 4 * QUERY_TILE
    return SCORE_TILE if is_short or not _is_fused(pattern, sinks, k, v) else QUERY_TILE


def _keys_of(position: int, tile: int, pattern: AttentionPattern) -> tuple[int, int]:
    """Return the first and the end of the keys that a query is computed with: those of its tile.
    Near a sequence's start the tile is smaller, so that a decode there reads few keys in vain."""
    size = min(tile, max(SCORE_TILE, 1 << max(0, position.bit_length() - 3)))
    first = position // size * size
    return max(0, pattern.first_visible(first)), first + size


def _is_fused(
    pattern: AttentionPattern, sinks: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor
) -> bool:
    """Return whether torch's fused kernels cover the pattern, and values as wide as these."""
    return pattern.softcap is None and sinks is None and k.shape[-1] >= v.shape[-1]


def _softmax_average(
    q_bHsD: torch.Tensor,
    k_bKtD: torch.Tensor,
    v_bKtP: torch.Tensor,
    visible_st: torch.Tensor,
    pattern: AttentionPattern,
    sinks_H11: torch.Tensor | None,
) -> torch.Tensor:
    """Average the values by the softmax of the scores, `[b, H, s, P]`.

    `visible` and `sinks` have any shape that broadcasts against the scores `[b, H, s, t]`.
    """
    if missing := -q_bHsD.shape[2] % QUERY_ROWS:
        if q_bHsD.shape[2] == 1:  # copied: rows in one place are rounded otherwise
            q_bHsD = q_bHsD.expand(-1, -1, QUERY_ROWS, -1).contiguous()
        else:  # the first ones again, by one copy
            q_bHsD, visible_st, sinks_H11 = (
                x if x is None or x.shape[-2] == 1 else torch.cat((x, x[..., :missing, :]), -2)
                for x in (q_bHsD, visible_st, sinks_H11)
            )
        o_bHsP = _softmax_average(q_bHsD, k_bKtD, v_bKtP, visible_st, pattern, sinks_H11)
        return o_bHsP[:, :, :-missing]
    if _is_fused(pattern, sinks_H11, k_bKtD, v_bKtP):
        if q_bHsD.is_cuda:
            q_bHsD, k_bKtD, v_bKtP = map(aligned, (q_bHsD, k_bKtD, v_bKtP))
        # They want values as wide as keys, and are worth the zeros.
        D, P = k_bKtD.shape[-1], v_bKtP.shape[-1]
        o_bHsD = F.scaled_dot_product_attention(
            q_bHsD,
            k_bKtD,
            F.pad(v_bKtP, (0, D - P)) if P < D else v_bKtP,
            attn_mask=visible_st,
            dropout_p=pattern.dropout,
            scale=pattern.scale,
            enable_gqa=q_bHsD.shape[1] != k_bKtD.shape[1],
        )
        return o_bHsD if P == D else o_bHsD[..., :P]
    return _written_out(q_bHsD, k_bKtD, v_bKtP, visible_st, pattern, sinks_H11)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied unless all its rows begin at multiples of 16 bytes. torch's fused
    kernels read 16 bytes at a time on a GPU; of a part of a wider tensor they may read at an odd
    address, which ends the process's use of the device."""
    starts = (x.storage_offset(), *x.stride()[:-1])
    size = x.element_size()
    return x if all(start * size % 16 == 0 for start in starts) else x.contiguous()


@without_autocast
def _written_out(
    q_bHsD: torch.Tensor,
    k_bKtD: torch.Tensor,
    v_bKtP: torch.Tensor,
    visible_st: torch.Tensor,
    pattern: AttentionPattern,
    sinks_H11: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `_softmax_average` with softcap and sinks."""
    # The query heads of a key/value head side by side, so that keys are read once for all of them.
    q_bKqD = (q_bHsD * pattern.scale).reshape(len(q_bHsD), k_bKtD.shape[1], -1, q_bHsD.shape[-1])
    scores_bHst = (q_bKqD @ k_bKtD.mT).view(*q_bHsD.shape[:3], -1)
    if pattern.softcap is not None:
        scores_bHst = (scores_bHst / pattern.softcap).tanh() * pattern.softcap
    scores_bHst = scores_bHst.masked_fill(~visible_st, -torch.inf)
    weights_bKqt = scores_bHst.softmax(-1).view(*q_bKqD.shape[:3], -1)
    if pattern.dropout:
        weights_bKqt = F.dropout(weights_bKqt, pattern.dropout)
    o_bHsP = (weights_bKqt @ v_bKtP).view(*q_bHsD.shape[:3], -1)
    if sinks_H11 is not None:
        # The part of the softmax without the sink: exp(lse) / (exp(lse) + exp(sink)).
        lse_bHs1 = scores_bHst.logsumexp(-1, keepdim=True)
        o_bHsP = o_bHsP * sigmoid(lse_bHs1 - sinks_H11.to(lse_bHs1.dtype))
    return o_bHsP


def _decode(
    q_THD: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    block_table_RM: torch.Tensor,
    layout: RaggedLayout,
    pattern: AttentionPattern,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from the tokens of the leading decodes, a group of them at a time."""
    K, has_sinks, num_columns = pages[0].shape[2], sinks_H is not None, block_table_RM.shape[1]

    def make() -> tuple[list[tuple], torch.Tensor | None, torch.dtype]:
        is_fused = _is_fused(pattern, sinks_H, *pages)
        dtype = q_THD.dtype if is_fused else compute_dtype(q_THD)
        block_bytes = sum(math.prod(page.shape[1:]) * page.element_size() for page in pages)
        sizes = pages[0].shape[1], num_columns, max(1, GATHER_BYTES // block_bytes)
        if layout.starts is not None:
            return _fixed_groups(layout, pattern, *sizes), None, dtype
        # torch would make a mask of numbers out of one of bools in each layer.
        mask_dtype = dtype if is_fused and q_THD.is_cpu else torch.bool
        tile = _tile_size(pattern, sinks_H, *pages)
        return *_decode_groups(layout, pattern, *sizes, tile, q_THD.device, mask_dtype), dtype

    key = pattern, has_sinks, num_columns, pages[0].shape, pages[1].shape, q_THD.dtype, q_THD.device
    groups, inverse, dtype = layout.derived(("decode groups", *key), make)
    sinks_KG1 = None if sinks_H is None else sinks_H.view(K, -1, 1)
    outs = []
    for rows, places, keys, visible_r11t, edges in groups:
        q_rHD = _in_dtype(q_THD if rows is None else q_THD[rows], dtype)
        blocks, r = block_table_RM.take(places), len(visible_r11t)
        k, v = (
            _in_dtype(page.index_select(0, blocks), dtype).view(r, -1, *page.shape[2:])
            for page in pages
        )
        if keys is not None:
            k, v = k[:, keys], v[:, keys]
        for edge, hidden_re11 in edges:
            # Unwritten memory may hold NaN, and 0 * NaN would reach the output.
            for x in (k[:, edge], v[:, edge]):
                x.zero_() if hidden_re11 is None else x.masked_fill_(hidden_re11, 0.0)
        # The query heads of a key/value head as its query rows: keys are read once for all.
        o = _softmax_average(
            q_rHD.view(r, K, -1, q_rHD.shape[2]),
            k.transpose(1, 2),
            v.transpose(1, 2),
            visible_r11t,
            pattern,
            sinks_KG1,
        )
        outs.append(o.flatten(1, 2))
    o_THP = join(outs) if inverse is None else torch.cat(outs).index_select(0, inverse)
    return _in_dtype(o_THP, q_THD.dtype)


def _in_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A call of `to` that does nothing takes as long as a small copy.
    return x if x.dtype == dtype else x.to(dtype)


def _decode_groups(
    layout: RaggedLayout,
    pattern: AttentionPattern,
    B: int,
    num_columns: int,
    max_blocks: int,
    tile: int,
    device: torch.device,
    mask_dtype: torch.dtype,
) -> tuple[list[tuple], torch.Tensor | None]:
    """Group decodes with as many keys side by side, at most `max_blocks` blocks in a group.

    Returns, for each group, its rows `[r]`, or None for all; the places in the block table of their
    m blocks `[r m]`, as of `torch.take`; the slice of their m * B keys that the tiles have, or None
    for all; which of these t are visible `[r, 1, 1, t]` (bool, or numbers to add to scores); and
    the slices of t that hold all hidden ones, each with those `[r, e, 1, 1]`, or with None for all.
    Then the place of each row after all groups, None for one group of all rows.
    """
    starts, lengths = layout.start_positions, layout.lengths[: layout.num_steps]
    owned = [
        (start + i, r) for r, start in enumerate(starts[: len(lengths)]) for i in range(lengths[r])
    ]
    alike: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by number of keys, rows before them
    for row, (position, _) in enumerate(owned):
        low, high = _keys_of(position, tile, pattern)
        alike.setdefault((high - low, low % B), []).append((row, low))
    groups, order = [], []
    for (size, skipped), members in alike.items():
        num_blocks = -(-(skipped + size) // B)
        step = max(1, max_blocks // num_blocks)
        for group in (members[i : i + step] for i in range(0, len(members), step)):
            rows, lows = zip(*group)
            own, owners = zip(*(owned[row] for row in rows))
            # By numpy, whose small arrays take less time than torch's.
            low, position, owner = (np.array(numbers)[:, None] for numbers in (lows, own, owners))
            numbers = low + np.arange(size)
            hides = numbers > position
            # Columns that hold hidden keys alone repeat those next to them.
            columns = np.minimum(low // B + np.arange(num_blocks), position // B)
            edges = [slice(min(own[i] - lows[i] for i in range(len(own))) + 1, size)]
            if pattern.is_local or pattern.skips_first:
                first = np.maximum(pattern.first_visible(position), 0)
                hides |= numbers < first
                columns = np.maximum(columns, first // B)
                edges.append(slice(0, int((first - low).max())))
            hidden = [(edge, None) for edge in edges if edge.start < edge.stop]
            if len(own) > 1:  # else they hold hidden keys alone
                hidden_rt11 = to_device(hides[:, :, None, None], device, torch.bool)
                hidden = [(edge, hidden_rt11[:, edge]) for edge, _ in hidden]
            if mask_dtype == torch.bool:
                visible = ~hides
            else:
                visible = np.where(hides, np.float32(-np.inf), np.float32(0))
            visible_r11t = to_device(visible[:, None, None], device, mask_dtype)
            places = to_device((columns + num_columns * owner).ravel(), device)
            keys = None if num_blocks * B == size else slice(skipped, skipped + size)
            groups.append((rows, places, keys, visible_r11t, hidden))
            order += rows
    if len(groups) == 1:
        return [(None, *groups[0][1:])], None
    inverse = sorted(range(len(order)), key=order.__getitem__)
    groups = [(to_device(rows, device), *group) for rows, *group in groups]
    return groups, to_device(inverse, device)


def _fixed_groups(
    layout: RaggedLayout, pattern: AttentionPattern, B: int, num_columns: int, max_blocks: int
) -> list[tuple]:
    """Do what `_decode_groups` does for positions on the device: each decode reads as many blocks
    as one at the largest position, and the groups are in the order of the rows."""
    positions_T1 = layout.live_positions().long().unsqueeze(1)
    last_blocks = positions_T1 // B
    lows = (torch.zeros_like(positions_T1) + pattern.first_visible(positions_T1)).clamp_(min=0)
    size = -(-layout.last_end // B)
    if pattern.is_local:
        size = min(size, ((pattern.window or pattern.chunk) - 1) // B + 2)
    firsts = lows // B
    columns = (firsts + torch.arange(size, device=firsts.device)).minimum(last_blocks)
    keys = firsts * B + torch.arange(size * B, device=firsts.device)
    visible = (keys <= positions_T1) & (keys >= lows)
    owners = torch.arange(layout.num_tokens, device=firsts.device) // layout.lengths[0]
    places = columns + num_columns * owners.unsqueeze(1)
    hidden = ~visible[:, :, None, None]
    step = max(1, max_blocks // size)
    return [
        (
            slice(begin, begin + step),
            places[begin : begin + step].flatten(),
            None,
            visible[begin : begin + step, None, None],
            [(slice(0, size * B), hidden[begin : begin + step])],
        )
        for begin in range(0, layout.num_tokens, step)
    ]
