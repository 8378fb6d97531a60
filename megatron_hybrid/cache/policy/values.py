"""What states and tails of KV are worth per page and request. Pure functions.

The uses to be expected per request (`ReuseModel`) x the work to be done again without it
(`CacheSpec.work`: tokens, those with a long context for more) / the pages that go with it: of a
state its own and those of the KV that only leads to it, unless a running request holds that.
"""

from __future__ import annotations

import numpy as np

from megatron_hybrid.cache.index.tree import Checkpoint, Edge
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.parts import ALL_PARTS, Parts
from megatron_hybrid.cache.policy.reuse import ReuseModel


def value_per_page(rate: float, work: float, pages: int) -> float:
    """Work saved per page and request."""
    return rate * work / max(1, pages)


def kv_pages(tokens: int, spec: CacheSpec) -> int:
    """Pages of full-attention KV of so many tokens, rounded."""
    return tokens * spec.kv_pages_per_block // spec.block_size_tokens


def tail_value(edge: Edge, spec: CacheSpec, reuse: ReuseModel) -> float | None:
    """Where KV alone resumes: what a leaf's last block is worth; None: nothing that is watched
    resumes from it.

    The last block is worth as much as all of the edge on average: it took
    the most work, but serves only together with what comes before it. By its own work the ends of
    long prompts would outlive what is worth more, and then go with the rest all the same.
    """
    beyond = rates_beyond(edge, last_block(edge, spec), reuse)
    if not beyond:
        return None
    work = spec.block_size_tokens * spec.mean_work(edge.start, edge.held_end)
    return value_per_page(max(beyond), work, spec.kv_pages_per_block)


def last_block(edge: Edge, spec: CacheSpec) -> int:
    """Where the last block begins that an edge holds KV of."""
    return (edge.held_end - 1) // spec.block_size_tokens * spec.block_size_tokens


def rates_beyond(edge: Edge, position: int, reuse: ReuseModel) -> list[float]:
    """Uses per request to be expected of what is watched on an edge beyond a position: where KV
    alone resumes, a block serves those who go on from anywhere beyond its start."""
    return [
        reuse.rate(checkpoint)
        for watched, checkpoint in edge.checkpoints.items()
        if watched > position
    ]


def equal_start(edge: Edge, start: int, spec: CacheSpec, reuse: ReuseModel) -> int:
    """How far back, `start` at most, the blocks at a leaf's end are worth no more than the last one
    (where KV alone resumes): so far they may go at once."""
    block = last_block(edge, spec)
    inner = sorted([p for p in edge.checkpoints if start < p <= block], reverse=True)
    rate = max(rates_beyond(edge, block, reuse), default=0.0) if inner else 0.0
    for position in inner:
        checkpoint = edge.checkpoints[position]
        if reuse.rate(checkpoint) > rate:
            return spec.num_blocks(position) * spec.block_size_tokens
    return start


def rebuild_work(checkpoint: Checkpoint, below: Checkpoint | None, spec: CacheSpec) -> float:
    """Work to get to its position without it. below: `checkpoint.below()`."""
    if not spec.needs_state:
        return 1.0  # KV alone resumes; what is missing is the last hidden state
    return spec.work(below.position if below else 0, checkpoint.position)


def exclusive_tokens(checkpoint: Checkpoint, below: Checkpoint | None) -> int:
    """Tokens whose KV only leads to this state, beneath which none is stored: back to `below`, the
    next one, or to a fork with another."""
    edge = checkpoint.edge
    start = below.edge if below else None
    while edge is not start:
        parent = edge.parent
        others = parent.num_stored - edge.num_stored - len(parent.stored)
        if others or parent.parent is None:
            return checkpoint.position - edge.start
        edge = parent
    return checkpoint.position - below.position


def own_rate(checkpoint: Checkpoint, deeper: Checkpoint | None, reuse: ReuseModel) -> float:
    """Uses per request that a state keeps if a deeper one on its path is stored. deeper: what is
    known of that position.

    If it served in place of the deeper one, its own uses are the others (as if half a use more had
    been seen). Otherwise, or without a record, the rate is that of other covered states.
    """
    if checkpoint.uses < 2 or deeper is None or deeper.served_by != checkpoint.position:
        return reuse.rate(checkpoint, covered=True)
    in_its_place = min(deeper.served_count, checkpoint.uses)
    return reuse.rate(checkpoint) * (1 - in_its_place / (checkpoint.uses + 0.5))


def kv_is_held(checkpoint: Checkpoint, spec: CacheSpec, ref_counts: np.ndarray) -> bool:
    """Whether a request holds the KV up to a position: it would stay if the state went. Who resumes
    there holds the full blocks; of the last one it has a copy."""
    size = spec.block_size_tokens
    position = checkpoint.position // size * size or checkpoint.position
    page = checkpoint.edge.at(position).page_before(position, size)
    return bool(ref_counts[page])


def checkpoint_value(
    checkpoint: Checkpoint,
    spec: CacheSpec,
    reuse: ReuseModel,
    ref_counts: np.ndarray,
    parts: Parts = ALL_PARTS,
) -> float:
    """What a stored state saves per page and request. ref_counts: `PageAllocator.ref_counts`."""
    covered, pages, below = reuse.is_covered(checkpoint), checkpoint.num_pages, None
    if spec.needs_state:
        below = checkpoint.below()
        alone = not covered and parts.exclusive_kv
        if alone and not (parts.held_kv and kv_is_held(checkpoint, spec, ref_counts)):
            pages += kv_pages(exclusive_tokens(checkpoint, below), spec)
    work = rebuild_work(checkpoint, below, spec) if parts.work else 1.0
    return value_per_page(reuse.rate(checkpoint, covered), work, pages)
