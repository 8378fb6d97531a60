"""Paged attention in Triton: prefill and decode of a ragged batch, every pattern, any block size.

Scores and sums are fp32. Keys are read in blocks whose places are absolute, and split into parts
for sequences with few new tokens (see `work.py`), so a row's bits depend neither on other sequences
nor on how many there are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.ops.attention.pattern import AttentionPattern
from megatron_hybrid.ops.attention.work import PARTIAL_BYTES, Tiles, split_keys, whole_keys
from megatron_hybrid.ops.kernels import SequenceTable
from megatron_hybrid.ops.launch import Kernel
from megatron_hybrid.ops.ragged import RaggedLayout

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(ptrs, inside, ALL: tl.constexpr):
    """Load a block, zeros where it is not `inside`, which is broadcast; with ALL, all is inside."""
    if ALL:
        block = tl.load(ptrs)
    else:
        block = tl.load(ptrs, mask=tl.broadcast_to(inside, ptrs.shape), other=0)
    return block


@triton.jit
def is_seen(j, position, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SKIPS_FIRST: tl.constexpr):
    """Return whether the queries at these positions see keys, `[queries, keys]`."""
    seen = j[None, :] <= position[:, None]
    if WINDOW > 0:
        seen = seen & (j[None, :] > position[:, None] - WINDOW)
    if CHUNK > 0:
        seen = seen & (j[None, :] >= position[:, None] // CHUNK * CHUNK)
    if SKIPS_FIRST:
        seen = seen & (j[None, :] >= tl.minimum(position[:, None], 1))
    return seen


@Kernel
@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    maxima_ptr,
    sums_ptr,
    sequences_ptr,
    row_starts_ptr,
    row_ends_ptr,
    key_starts_ptr,
    sizes_ptr,
    tokens_ptr,
    places_ptr,
    boundaries_ptr,
    starts_ptr,
    scale,
    softcap,
    stride_q_row,
    stride_q_head,
    stride_q_dim,
    stride_k_page,
    stride_k_row,
    stride_k_head,
    stride_k_dim,
    stride_v_page,
    stride_v_row,
    stride_v_head,
    stride_v_dim,
    stride_table_row,
    stride_table_column,
    stride_out_row,
    stride_out_head,
    stride_out_dim,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SKIPS_FIRST: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Attend from rows of one sequence and key/value head to all keys that they see, or a part.

    A row is a query and one of the GROUP query heads of the key/value head, heads side by side, so
    that keys are read once for all. Queries and keys are BLOCK_D + BLOCK_D2 wide; a program gives
    BLOCK_P columns of the output.
    """
    number, kv = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(sequences_ptr + number).to(tl.int64)
    first, end = tl.load(row_starts_ptr + number), tl.load(row_ends_ptr + number)
    row = tl.load(boundaries_ptr + sequence).to(tl.int64)
    start = tl.load(starts_ptr + sequence)

    place = first + tl.arange(0, BLOCK_M)
    query, head = place // GROUP, kv * GROUP + place % GROUP
    alive = place < end
    position = start + query
    low, high = 0, start + (end - 1) // GROUP + 1
    if WINDOW > 0:
        low = tl.maximum(start + first // GROUP - WINDOW + 1, 0)
    if CHUNK > 0:
        low = (start + first // GROUP) // CHUNK * CHUNK
    if SKIPS_FIRST:  # what lies there may be NaN, which a weight of 0 does not remove
        low = tl.maximum(low, tl.minimum(start + first // GROUP, 1))
    if SPLIT:
        part_start, size = tl.load(key_starts_ptr + number), tl.load(sizes_ptr + number)
        low = tl.maximum(low, part_start)
        high = tl.minimum(high, part_start + size)

    d, d2, p = tl.arange(0, BLOCK_D), BLOCK_D + tl.arange(0, BLOCK_D2), tl.arange(0, BLOCK_P)
    p += tl.program_id(2) * BLOCK_P
    q_rows = q_ptr + (row + query)[:, None] * stride_q_row + head[:, None] * stride_q_head
    live = alive[:, None]
    q = tl.load(q_rows + d[None, :] * stride_q_dim, mask=live & (d[None, :] < D), other=0.0)
    q2 = tl.load(q_rows + d2[None, :] * stride_q_dim, mask=live & (d2[None, :] < D), other=0.0)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    average = tl.zeros((BLOCK_M, BLOCK_P), tl.float32)
    begin = low // BLOCK_N * BLOCK_N
    whole = begin
    if WINDOW == 0 and CHUNK == 0 and not SKIPS_FIRST and (SPLIT or D <= 256):
        # Up to here all rows see all keys. A row's bits do not depend on where that is: both loops
        # compute the same, and say themselves what is fused. With rows that are wider, what both
        # loops keep would spill.
        whole = tl.minimum(start + first // GROUP + 1, high) // BLOCK_N * BLOCK_N
        whole = tl.maximum(begin, whole)
    if table_ptr is not None:
        table_row = table_ptr + sequence * stride_table_row
    factor = _LOG2_E
    if softcap is None:
        factor *= scale
    for MASKED in tl.static_range(2):
        if MASKED:
            first_key, last_key = whole, high
        else:
            first_key, last_key = begin, whole
        for j0 in range(first_key, last_key, BLOCK_N):
            j = j0 + tl.arange(0, BLOCK_N)
            known = (j >= low) & (j < high)
            if table_ptr is None:  # what is not known is read in the place of the last key
                page, in_page = row + tl.minimum(j, high - 1), 0
            elif B % BLOCK_N == 0:  # all keys of a block are in one page
                page = tl.load(table_row + j0 // B * stride_table_column).to(tl.int64)
                in_page = j0 % B + tl.arange(0, BLOCK_N)
            else:
                table_ptrs = table_row + (j // B) * stride_table_column
                page = _load(table_ptrs, known, not MASKED).to(tl.int64)
                in_page = j % B
            k_rows = k_ptr + page * stride_k_page + kv * stride_k_head + in_page * stride_k_row
            # Keys that a row does not see may be any: their scores are replaced below.
            k_ptrs = k_rows[None, :] + d[:, None] * stride_k_dim
            k = _load(k_ptrs, d[:, None] < D, BLOCK_D <= D).to(q.dtype)
            scores = tl.dot(q, k, input_precision="ieee")
            if BLOCK_D < D:
                k2_ptrs = k_rows[None, :] + d2[:, None] * stride_k_dim
                k2 = _load(k2_ptrs, d2[:, None] < D, BLOCK_D + BLOCK_D2 <= D).to(q.dtype)
                scores = tl.dot(q2, k2, scores, input_precision="ieee")
            if softcap is not None:
                scores *= scale
                scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))
            if MASKED:
                seen = is_seen(j, position, WINDOW, CHUNK, SKIPS_FIRST)
                if SPLIT:
                    seen = seen & known[None, :]
                scores = tl.where(seen, scores, float("-inf"))
            new = tl.maximum(largest, tl.max(scores, 1) * factor)
            shift = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(tl.fma(scores, factor, -shift[:, None]))
            kept = tl.exp2(largest - shift)
            total = tl.fma(total, kept, tl.sum(weights, 1))
            v_rows = v_ptr + page * stride_v_page + kv * stride_v_head + in_page * stride_v_row
            v_ptrs = v_rows[:, None] + p[None, :] * stride_v_dim
            if P % BLOCK_P == 0:
                v = _load(v_ptrs, known[:, None], not MASKED).to(q.dtype)
            else:
                v = _load(v_ptrs, known[:, None] & (p[None, :] < P), False).to(q.dtype)
            average = average * kept[:, None]
            average = tl.dot(weights.to(q.dtype), v, average, input_precision="ieee")
            largest = new

    if SPLIT:
        row_low = position * 0
        if WINDOW > 0:
            row_low = tl.maximum(position - WINDOW + 1, 0)
        if CHUNK > 0:
            row_low = position // CHUNK * CHUNK
        sees = alive & (part_start <= position) & (part_start + size > row_low)
        token = tl.load(tokens_ptr + number) + query - first // GROUP
        part = tl.load(places_ptr + token, mask=sees, other=0).to(tl.int64)
        part = (part + part_start // size - row_low // size) * H + head
        tl.store(
            partial_ptr + part[:, None] * P + p[None, :],
            average,
            mask=sees[:, None] & (p[None, :] < P),
        )
        tl.store(maxima_ptr + part, largest, mask=sees)
        tl.store(sums_ptr + part, total, mask=sees)
    else:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=alive, other=0.0).to(tl.float32)
            total += tl.exp2(sink * _LOG2_E - largest)
        # Loaded anew, or the pointers below would be made early and take registers in the loops.
        place = tl.load(row_starts_ptr + number, volatile=True) + tl.arange(0, BLOCK_M)
        query, head = place // GROUP, kv * GROUP + place % GROUP
        alive = place < tl.load(row_ends_ptr + number, volatile=True)
        live = alive[:, None]
        out_rows = out_ptr + (row + query)[:, None] * stride_out_row
        tl.store(
            out_rows + head[:, None] * stride_out_head + p[None, :] * stride_out_dim,
            average / tl.where(alive, total, 1.0)[:, None],
            mask=live & (p[None, :] < P),
        )


@Kernel
@triton.jit
def join_kernel(
    partial_ptr,
    maxima_ptr,
    sums_ptr,
    sinks_ptr,
    out_ptr,
    rows_ptr,
    places_ptr,
    stride_out_row,
    stride_out_head,
    stride_out_dim,
    H: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Join the parts of one row, in order."""
    number, head = tl.program_id(0), tl.program_id(1)
    p = tl.arange(0, BLOCK_P)
    largest, total = float("-inf"), 0.0
    average = tl.zeros((BLOCK_P,), tl.float32)
    for place in range(tl.load(places_ptr + number), tl.load(places_ptr + number + 1)):
        part = tl.cast(place, tl.int64) * H + head
        found = tl.load(maxima_ptr + part)
        new = tl.maximum(largest, found)
        kept, weight = tl.exp2(largest - new), tl.exp2(found - new)
        total = total * kept + tl.load(sums_ptr + part) * weight
        average = average * kept
        average += tl.load(partial_ptr + part * P + p, mask=p < P, other=0.0) * weight
        largest = new
    if sinks_ptr is not None:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * _LOG2_E - largest)
    row = tl.load(rows_ptr + number).to(tl.int64)
    out_row = out_ptr + row * stride_out_row + head * stride_out_head
    tl.store(out_row + p * stride_out_dim, average / total, mask=p < P)


def configuration(D: int, P: int, num_bytes: int, few: bool) -> dict[str, int]:
    """Choose the compile-time constants of the kernel that say how it works, its warps and stages.

    Widths that are no powers of two are split: 576 = 512 + 64, 96 = 64 + 32. Rows and keys of a
    block are as many as registers hold; fp32 products of matrices take no tensor cores, and more
    registers. Four warps have 64 rows: eight would compute each score twice. Of 64 rows they hold
    256 columns of the output, so wider values take more programs, each with all scores.

    Args:
        D, P: widths of keys and values.
        num_bytes: of an element of q.
        few: for sequences with few new tokens.
    """
    width = max(16, 1 << (D.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(D - width)) if width < D else 16
    values = max(16, triton.next_power_of_2(P))
    has_tensor_cores = num_bytes == 2
    is_tall = has_tensor_cores and not few
    values = min(values, 256) if is_tall else values
    widest = max(width, values)
    tile_bytes = 32768 if few and has_tensor_cores else 16384
    return {
        "BLOCK_M": 64 if is_tall else 16,
        "BLOCK_N": max(16, min(64, tile_bytes // (widest * num_bytes))),
        "BLOCK_D": width,
        "BLOCK_D2": rest,
        "BLOCK_P": values,
        "num_warps": 4 if is_tall or (has_tensor_cores and widest <= 256) else 8,
        "num_stages": 2 if few or widest > 128 else 3,
    }


def verify(q_THD: Tensor, k_pages_nBKD: Tensor, v_pages_nBKP: Tensor, *others: Any) -> str | None:
    pattern = others[2]
    if pattern.dropout:
        return "it has no dropout"
    if pattern.scale <= 0:
        return f"scale is {pattern.scale}; it takes those above 0"
    if (widest := max(q_THD.shape[-1], v_pages_nBKP.shape[-1])) > 576:
        return f"heads are {widest} wide; it takes up to 576"
    return None


def run(
    q_THD: Tensor,
    k_pages_nBKD: Tensor,
    v_pages_nBKP: Tensor,
    block_table_RM: Tensor | None,
    layout: RaggedLayout,
    pattern: AttentionPattern,
    sinks_H: Tensor | None = None,
    takes_whole: bool = True,
) -> Tensor:
    """See `ops.paged_attention`.

    Args:
        block_table_RM: with None each token is a page, in the place of its query.
        takes_whole: whether rows of sequences with many new tokens are written, too.
    """
    (T, H, D), (_, B, K, P) = q_THD.shape, v_pages_nBKP.shape
    out_THP = q_THD.new_empty(T, H, P)
    out_THP[layout.num_tokens :] = 0
    inputs = (q_THD, k_pages_nBKD, v_pages_nBKP, block_table_RM, sinks_H)
    table = SequenceTable.of(layout, q_THD.device)
    positions = table.boundaries, table.starts if layout.starts is None else layout.starts

    def attend(tiles: Tiles, partial: tuple[Tensor | None, ...], few: bool) -> None:
        constants = few_blocks if few else blocks
        attention_kernel(
            (len(tiles.sequences), K, triton.cdiv(P, constants["BLOCK_P"])),
            (*inputs, out_THP, *partial, *tiles, *positions),
            (pattern.scale, pattern.softcap),
            H=H,
            GROUP=H // K,
            D=D,
            P=P,
            B=B,
            WINDOW=pattern.window or 0,
            CHUNK=pattern.chunk or 0,
            SKIPS_FIRST=pattern.skips_first,
            SPLIT=few,
            **constants,
        )

    blocks, few_blocks = (configuration(D, P, q_THD.element_size(), few) for few in (False, True))
    most = PARTIAL_BYTES // (4 * H * (P + 2))
    launches = split_keys(layout, pattern, H // K, few_blocks["BLOCK_M"], most, q_THD.device)
    if launches:
        sizes = (max(parts.num_places for parts in launches), H)
        partial = tuple(q_THD.new_empty(*sizes, *n, dtype=torch.float32) for n in ((P,), (), ()))
    for parts in launches:
        attend(parts.tiles, partial, few=True)
        join_kernel(
            (len(parts.rows), H),
            (*partial, sinks_H, out_THP, parts.rows, parts.tiles.places),
            H=H,
            P=P,
            BLOCK_P=triton.next_power_of_2(P),
            num_warps=4,
        )
    if not takes_whole:
        return out_THP
    tiles = whole_keys(layout, H // K, blocks["BLOCK_M"], q_THD.device)
    if tiles is not None:
        attend(tiles, (None, None, None), few=False)
    return out_THP
