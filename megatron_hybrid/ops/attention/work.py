"""Which program of the attention kernel computes which rows over which keys.

A sequence with many new tokens has enough rows for all programs of a GPU: each reads all keys that
its rows see. One with few has not, so its keys are split into parts, each with a program of its
own, and a second kernel joins what the parts give. The parts of a token follow from its position
and the pattern alone, so its result has the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.ops.attention.pattern import AttentionPattern
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.to_device import all_to_device

FEW_TOKENS = 16
"""New tokens up to which the keys of a sequence are split."""

PART = 512
"""Keys of the smallest part; a multiple of any block of keys."""

MAX_PARTS = 32
"""Parts of the keys that one token sees. Beyond `MAX_PARTS` times `PART` keys parts get larger."""

PARTIAL_BYTES = 64 << 20
"""What the parts of one launch give takes no more; what needs more is done in several launches."""


class Tiles(NamedTuple):
    """Programs of one launch, as int32 tensors with a number for each."""

    sequences: Tensor
    row_starts: Tensor
    """First row: token of the sequence in this call * query heads of a key/value head + head."""
    row_ends: Tensor
    """End of the rows."""
    key_starts: Tensor | None = None
    """First key of the part, a multiple of its size; None means all keys."""
    sizes: Tensor | None = None
    """Keys of the part."""
    tokens: Tensor | None = None
    """Number of the first row's token in `Parts`."""
    places: Tensor | None = None
    """Places where the results of each token's parts begin, and their number: `[n + 1]`."""


@dataclass(frozen=True)
class Parts:
    """One launch over parts of keys, and how its results are joined."""

    tiles: Tiles
    rows: Tensor
    """int32, flat row of each token: `[n]`."""
    num_places: int
    """Results of all of them."""


def of_many_tokens(layout: RaggedLayout) -> list[int]:
    """Find the sequences with many new tokens. Decodes are none, as their drafts split keys."""
    lengths = enumerate(layout.lengths)
    return [r for r, length in lengths if length > FEW_TOKENS and r >= layout.num_decodes]


def whole_keys(
    layout: RaggedLayout, group: int, block_m: int, device: torch.device
) -> Tiles | None:
    """Lay out the sequences with many new tokens, `block_m` rows a program; None without any.

    Args:
        group: query heads of a key/value head.
    """

    def make() -> Tiles | None:
        numbers = [
            (r, first, min(first + block_m, layout.lengths[r] * group))
            for r in of_many_tokens(layout)
            for first in range(0, layout.lengths[r] * group, block_m)
        ]
        if not numbers:
            return None
        return Tiles(*all_to_device(list(zip(*numbers, strict=True)), device))

    return layout.cached(("whole keys", group, block_m, device), make)


def split_keys(
    layout: RaggedLayout,
    pattern: AttentionPattern,
    group: int,
    block_m: int,
    most_places: int,
    device: torch.device,
) -> list[Parts]:
    """Lay out the sequences with few new tokens, in launches of at most `most_places` results."""
    key = ("split keys", pattern.window, pattern.chunk, group, block_m, most_places, device)
    if layout.starts is not None:
        return layout.derived(
            key, lambda: list(_fixed_launches(layout, pattern, group, block_m, most_places))
        )
    return layout.cached(
        key, lambda: list(_launches(layout, pattern, group, block_m, most_places, device))
    )


def part_size(positions: np.ndarray, pattern: AttentionPattern) -> np.ndarray:
    """Count the keys of each part of the tokens at these positions: `PART` times a power of two."""
    firsts, sizes = _first_keys(positions, pattern), np.full_like(positions, PART)
    while (too_many := positions // sizes - firsts // sizes >= MAX_PARTS).any():
        sizes[too_many] *= 2
    return sizes


def _counted_up_to(counts: np.ndarray) -> np.ndarray:
    """Count 0 .. n - 1 for each of the counts n, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _first_keys(positions: np.ndarray, pattern: AttentionPattern) -> np.ndarray:
    return np.maximum(pattern.first_visible(positions), 0)


def _launches(
    layout: RaggedLayout,
    pattern: AttentionPattern,
    group: int,
    block_m: int,
    most_places: int,
    device: torch.device,
) -> Iterator[Parts]:
    few = sorted({*range(layout.num_sequences)} - {*of_many_tokens(layout)})
    if not few:
        return
    # Of each token: its sequence, its number there, its position.
    lengths = np.array([layout.lengths[r] for r in few])
    sequences = np.repeat(few, lengths)
    queries = _counted_up_to(lengths)
    positions = np.array(layout.start_positions)[sequences] + queries
    rows = np.array(layout.cu_seqlens)[sequences] + queries
    sizes = part_size(positions, pattern)
    first_parts = _first_keys(positions, pattern) // sizes
    counts = positions // sizes - first_parts + 1

    # A run is a few tokens of one sequence whose parts are of one size: what a program can take.
    per_run = max(1, block_m // group)
    starts = queries % per_run == 0
    starts[1:] |= sizes[1:] != sizes[:-1]
    (firsts,) = starts.nonzero()
    lasts = np.append(firsts[1:], len(starts)) - 1
    ends = np.cumsum(counts)
    before = (ends - counts)[firsts]
    # Runs of a launch begin below `budget`, so the last one of them ends below `most_places`.
    budget = max(1, most_places - int((ends[lasts] - before).max()) + 1)
    cuts = (np.diff(before // budget, prepend=-1) > 0).nonzero()[0]

    for begin, end in zip(cuts, (*cuts[1:], len(firsts)), strict=True):
        first, last = firsts[begin:end], lasts[begin:end]
        token, token_end = first[0], last[-1] + 1
        places = np.append(ends - counts, ends[-1])[token : token_end + 1]
        places = places - places[0]
        # A program for each run, BLOCK_M of its rows, and part of its keys.
        num_tiles = -(-((last - first + 1) * group) // block_m)
        num_parts = positions[last] // sizes[first] - first_parts[first] + 1
        runs = np.repeat(np.arange(len(first)), num_tiles * num_parts)
        tile, part = np.divmod(_counted_up_to(num_tiles * num_parts), num_parts[runs])
        at, until = first[runs], last[runs]
        row_starts = queries[at] * group + tile * block_m
        tiles = (
            sequences[at],
            row_starts,
            np.minimum(row_starts + block_m, (queries[until] + 1) * group),
            (first_parts[at] + part) * sizes[at],
            sizes[at],
            at - token + row_starts // group - queries[at],
        )
        *numbers, rows_n, places_n = all_to_device((*tiles, rows[token:token_end], places), device)
        yield Parts(Tiles(*numbers, places_n), rows_n, int(places[-1]))


def _fixed_launches(
    layout: RaggedLayout,
    pattern: AttentionPattern,
    group: int,
    block_m: int,
    most_places: int,
) -> Iterator[Parts]:
    """Lay out the `_launches` of decodes whose positions are on the device: each token has the
    programs of the largest position. Those after its own parts begin after its keys, so they read
    and store nothing."""
    positions, last = layout.live_positions(), layout.last_end - 1
    reach = min(last, (pattern.window or pattern.chunk or layout.last_end) - 1)
    lows = (torch.zeros_like(positions) + pattern.first_visible(positions)).clamp_(min=0)
    sizes, largest = torch.full_like(positions, PART), PART
    while reach // largest + 1 >= MAX_PARTS:  # as in `part_size`, as often as any may need it
        sizes *= 1 + (positions // sizes - lows // sizes >= MAX_PARTS).int()
        largest *= 2
    firsts = lows // sizes
    counts = positions // sizes - firsts + 1
    # A multiple of four, so that each field begins at a multiple of 16 bytes: see `all_to_device`.
    most_parts = -(-min(MAX_PARTS, last // PART + 1, reach // PART + 2) // 4) * 4

    numbers = torch.arange(layout.num_tokens, dtype=torch.int32, device=positions.device)
    sequences, first_rows = numbers, torch.zeros_like(numbers)
    if layout.num_tokens > layout.num_sequences:
        sequences = numbers // layout.lengths[0]
        first_rows = numbers % layout.lengths[0] * group
    tile_starts = torch.arange(0, group, block_m, dtype=torch.int32, device=positions.device)
    parts = torch.arange(most_parts, dtype=torch.int32, device=positions.device)
    step = max(1, most_places // most_parts)
    step -= step % 4 if step > 4 else 0  # for rows, as above
    for begin in range(0, layout.num_tokens, step):
        own = slice(begin, begin + step)
        rows, first_row = numbers[own], first_rows[own, None, None]
        shape = len(rows), len(tile_starts), most_parts
        fields = (
            sequences[own, None, None],
            first_row + tile_starts[:, None],
            first_row + (tile_starts + block_m).clamp_(max=group)[:, None],
            ((firsts[own, None] + parts) * sizes[own, None])[:, None],
            sizes[own, None, None],
            (rows - begin)[:, None, None],
        )
        places = F.pad(counts[own].cumsum(0, dtype=torch.int32), (1, 0))
        # Copied: an expanded field is one number in memory, and a program reads its own.
        numbers_6n = torch.stack([each.expand(shape) for each in fields]).flatten(1)
        tiles = Tiles(*numbers_6n, places)
        yield Parts(tiles, rows, len(rows) * most_parts)
