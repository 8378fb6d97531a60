"""Paged attention in Triton: prefill and decode of a ragged batch, every pattern, any block size.

Scores and sums are fp32. Keys are read in blocks whose places are absolute, and split into parts of
`SPLIT` for sequences with few new tokens, so a row's bits depend neither on other sequences nor on
how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.ops.attention.pattern import AttentionPattern
from megatron_hybrid.ops.attention.reference import check
from megatron_hybrid.ops.kernels import SequenceTable, dtype_refusal, gradient_refusal
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.to_device import to_device

SPLIT = 1024
"""Keys that one program reads where there are few queries; a multiple of any key block."""

FEW_TOKENS = 16
"""New tokens up to which the keys of a sequence are split over programs."""

_LOG2_E = tl.constexpr(1.4426950408889634)


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
    tile_sequences_ptr,
    tile_firsts_ptr,
    boundaries_ptr,
    starts_ptr,
    offsets_ptr,
    scale,
    softcap,
    num_splits,
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
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Rows of one sequence and one key/value head, over all keys that they see or one part of them.

    A row is a query and one of the GROUP query heads of the key/value head, heads side by side, so
    that keys are read once for all. Queries and keys are BLOCK_D + BLOCK_D2 wide.
    """
    tile, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequences_ptr + tile).to(tl.int64)
    first = tl.load(tile_firsts_ptr + tile)
    row = tl.load(boundaries_ptr + sequence).to(tl.int64)
    length = tl.load(boundaries_ptr + sequence + 1).to(tl.int32) - row.to(tl.int32)
    start = tl.load(starts_ptr + sequence)

    place = first + tl.arange(0, BLOCK_M)
    query, head = place // GROUP, kv * GROUP + place % GROUP
    alive = query < length
    position = start + query
    last_query = tl.minimum(first + BLOCK_M - 1, length * GROUP - 1) // GROUP
    low, high = 0, start + last_query + 1
    if WINDOW > 0:
        low = tl.maximum(start + first // GROUP - WINDOW + 1, 0)
    if CHUNK > 0:
        low = (start + first // GROUP) // CHUNK * CHUNK
    if SPLIT_KEYS > 0:
        low = tl.maximum(low, split * SPLIT_KEYS)
        high = tl.minimum(high, (split + 1) * SPLIT_KEYS)

    d, d2, p = tl.arange(0, BLOCK_D), BLOCK_D + tl.arange(0, BLOCK_D2), tl.arange(0, BLOCK_P)
    q_rows = q_ptr + (row + query)[:, None] * stride_q_row + head[:, None] * stride_q_head
    live = alive[:, None]
    q = tl.load(q_rows + d[None, :] * stride_q_dim, mask=live & (d[None, :] < D), other=0.0)
    q2 = tl.load(q_rows + d2[None, :] * stride_q_dim, mask=live & (d2[None, :] < D), other=0.0)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    average = tl.zeros((BLOCK_M, BLOCK_P), tl.float32)
    for j0 in range(low // BLOCK_N * BLOCK_N, high, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        known = (j >= low) & (j < high)
        page = tl.load(
            table_ptr + sequence * stride_table_row + (j // B) * stride_table_column,
            mask=known,
            other=0,
        ).to(tl.int64)
        k_rows = k_ptr + page * stride_k_page + (j % B) * stride_k_row + kv * stride_k_head
        k = tl.load(
            k_rows[None, :] + d[:, None] * stride_k_dim,
            mask=known[None, :] & (d[:, None] < D),
            other=0.0,
        ).to(q.dtype)
        scores = tl.dot(q, k, input_precision="ieee")
        if BLOCK_D < D:
            k2 = tl.load(
                k_rows[None, :] + d2[:, None] * stride_k_dim,
                mask=known[None, :] & (d2[:, None] < D),
                other=0.0,
            ).to(q.dtype)
            scores = tl.dot(q2, k2, scores, input_precision="ieee")
        scores *= scale
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))
        seen = known[None, :] & (j[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (j[None, :] > position[:, None] - WINDOW)
        if CHUNK > 0:
            seen = seen & (j[None, :] >= position[:, None] // CHUNK * CHUNK)
        scores = tl.where(seen, scores * _LOG2_E, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights, kept = tl.exp2(scores - shift[:, None]), tl.exp2(largest - shift)
        total = total * kept + tl.sum(weights, 1)
        v_rows = v_ptr + page * stride_v_page + (j % B) * stride_v_row + kv * stride_v_head
        v = tl.load(
            v_rows[:, None] + p[None, :] * stride_v_dim,
            mask=known[:, None] & (p[None, :] < P),
            other=0.0,
        ).to(q.dtype)
        average = tl.dot(weights.to(q.dtype), v, average * kept[:, None], input_precision="ieee")
        largest = new

    inside = live & (p[None, :] < P)
    if SPLIT_KEYS > 0:
        offset = tl.load(offsets_ptr + sequence).to(tl.int64)
        part = ((offset + query) * H + head) * num_splits + split
        tl.store(partial_ptr + part[:, None] * P + p[None, :], average, mask=inside)
        tl.store(maxima_ptr + part, largest, mask=alive)
        tl.store(sums_ptr + part, total, mask=alive)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=alive, other=0.0).to(tl.float32)
            total += tl.exp2(sink * _LOG2_E - largest)
        out_rows = out_ptr + (row + query)[:, None] * stride_out_row
        tl.store(
            out_rows + head[:, None] * stride_out_head + p[None, :] * stride_out_dim,
            average / tl.where(alive, total, 1.0)[:, None],
            mask=inside,
        )


@triton.jit
def join_kernel(
    partial_ptr,
    maxima_ptr,
    sums_ptr,
    sinks_ptr,
    out_ptr,
    rows_ptr,
    positions_ptr,
    num_splits,
    stride_out_row,
    stride_out_head,
    stride_out_dim,
    H: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The parts of one row, joined in order."""
    number, head = tl.program_id(0), tl.program_id(1)
    row, position = tl.load(rows_ptr + number).to(tl.int64), tl.load(positions_ptr + number)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, 0)
    if CHUNK > 0:
        low = position // CHUNK * CHUNK
    p = tl.arange(0, BLOCK_P)
    largest, total = float("-inf"), 0.0
    average = tl.zeros((BLOCK_P,), tl.float32)
    parts = (number.to(tl.int64) * H + head) * num_splits
    for split in range(low // SPLIT_KEYS, position // SPLIT_KEYS + 1):
        part = parts + split
        found = tl.load(maxima_ptr + part)
        new = tl.maximum(largest, found)
        kept, weight = tl.exp2(largest - new), tl.exp2(found - new)
        total = total * kept + tl.load(sums_ptr + part) * weight
        average = average * kept
        average += tl.load(partial_ptr + part * P + p, mask=p < P, other=0.0) * weight
        largest = new
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * _LOG2_E - largest)
    out_row = out_ptr + row * stride_out_row + head * stride_out_head
    tl.store(out_row + p * stride_out_dim, average / total, mask=p < P)


@dataclass(frozen=True)
class Tiles:
    """Work of one launch: rows of some sequences, BLOCK_M at a time, as int32 tensors."""

    sequences: Tensor
    firsts: Tensor
    """First row of each tile in its sequence."""
    offsets: Tensor
    """Number of each sequence's first token among those of these sequences."""
    rows: Tensor
    """Flat rows of these tokens."""
    positions: Tensor
    """Their positions."""

    @classmethod
    def of(
        cls, layout: RaggedLayout, few: bool, group: int, block_m: int, device: torch.device
    ) -> Tiles | None:
        """Tiles of the sequences with few new tokens, or of the others; None: there are none."""

        def make() -> Tiles | None:
            sequences, firsts, offsets, rows, positions = [], [], [], [], []
            for r, length in enumerate(layout.lengths):
                offsets.append(len(rows))
                if (length <= FEW_TOKENS) == few:
                    tiles = range(0, length * group, block_m)
                    sequences += [r] * len(tiles)
                    firsts += tiles
                    rows += range(layout.cu_seqlens[r], layout.cu_seqlens[r + 1])
                    positions += range(layout.start_positions[r], layout.end_positions[r])
            if not sequences:
                return None
            numbers = (sequences, firsts, offsets, rows, positions)
            return cls(*(to_device(n, device, torch.int32) for n in numbers))

        return layout.cached(("attention tiles", few, group, block_m, device), make)


def configuration(D: int, P: int, num_bytes: int, few: bool) -> tuple[dict[str, int], int]:
    """Compile-time constants of the kernel that say how it works, and its warps.

    Widths that are no powers of two are split: 576 = 512 + 64, 96 = 64 + 32. Rows and keys of a
    block are as many as registers hold without spills; fp32 products of matrices take no tensor
    cores, and more registers.

    Args:
        D, P: widths of keys and values.
        num_bytes: of an element of q.
        few: for sequences with few new tokens.
    """
    width = max(16, 1 << (D.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(D - width)) if width < D else 16
    values = max(16, triton.next_power_of_2(P))
    widest = max(width, values)
    rows = 16 if few or num_bytes > 2 or widest > 128 else 64
    constants = {
        "BLOCK_M": rows,
        "BLOCK_N": max(16, min(64, 16384 // (widest * num_bytes))),
        "BLOCK_D": width,
        "BLOCK_D2": rest,
        "BLOCK_P": values,
    }
    return constants, 8 if widest > 256 or num_bytes > 2 or constants[
        "BLOCK_M"
    ] * widest > 4096 else 4


def verify(
    q_THD: Tensor,
    k_pages_nBKD: Tensor,
    v_pages_nBKP: Tensor,
    block_table_RM: Tensor,
    layout: RaggedLayout,
    pattern: AttentionPattern,
    sinks_H: Tensor | None = None,
) -> str | None:
    """See `Backend.verify`."""
    tensors = (q_THD, k_pages_nBKD, v_pages_nBKP, sinks_H)
    if pattern.dropout:
        return "it has no dropout"
    if (widest := max(q_THD.shape[-1], v_pages_nBKP.shape[-1])) > 576:
        return f"heads are {widest} wide; it takes up to 576"
    return dtype_refusal(*tensors) or gradient_refusal(*tensors)


def run(
    q_THD: Tensor,
    k_pages_nBKD: Tensor,
    v_pages_nBKP: Tensor,
    block_table_RM: Tensor,
    layout: RaggedLayout,
    pattern: AttentionPattern,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `ops.paged_attention`."""
    check(q_THD, k_pages_nBKD, v_pages_nBKP, block_table_RM, layout, sinks_H)
    (T, H, D), (_, B, K, P) = q_THD.shape, v_pages_nBKP.shape
    out_THP = q_THD.new_empty(T, H, P)
    out_THP[layout.num_tokens :] = 0
    shape = {
        "H": H,
        "P": P,
        "WINDOW": pattern.window or 0,
        "CHUNK": pattern.chunk or 0,
        "HAS_SINKS": sinks_H is not None,
    }
    table = SequenceTable.of(layout, q_THD.device)
    for few, split_keys in ((True, SPLIT), (False, 0)):
        blocks, num_warps = configuration(D, P, q_THD.element_size(), few)
        tiles = Tiles.of(layout, few, H // K, blocks["BLOCK_M"], q_THD.device)
        if tiles is None:
            continue
        num_splits, parts = 1, (None, None, None)
        if split_keys:
            num_splits = -(-layout.last_end // SPLIT)
            sizes = (len(tiles.rows), H, num_splits)
            parts = tuple(q_THD.new_empty(*sizes, *n, dtype=torch.float32) for n in ((P,), (), ()))
        attention_kernel[len(tiles.firsts), K, num_splits](
            q_THD,
            k_pages_nBKD,
            v_pages_nBKP,
            block_table_RM,
            sinks_H,
            out_THP,
            *parts,
            tiles.sequences,
            tiles.firsts,
            table.boundaries,
            table.starts,
            tiles.offsets,
            pattern.scale,
            pattern.softcap or 1.0,
            num_splits,
            *q_THD.stride(),
            *k_pages_nBKD.stride(),
            *v_pages_nBKP.stride(),
            *block_table_RM.stride(),
            *out_THP.stride(),
            **shape,
            GROUP=H // K,
            D=D,
            B=B,
            HAS_SOFTCAP=pattern.softcap is not None,
            SPLIT_KEYS=split_keys,
            **blocks,
            num_warps=num_warps,
        )
        if split_keys:
            join_kernel[len(tiles.rows), H](
                *parts,
                sinks_H,
                out_THP,
                tiles.rows,
                tiles.positions,
                num_splits,
                *out_THP.stride(),
                **shape,
                SPLIT_KEYS=split_keys,
                BLOCK_P=blocks["BLOCK_P"],
                num_warps=4,
            )
    return out_THP
