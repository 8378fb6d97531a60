"""Values of states and of tails of KV. Pure functions.

value = expected uses per request (`ReuseModel`) x work to be done again without it
(`CacheSpec.work`) / pages that are freed with it: those of a state and of KV that no other state
needs, unless a running request holds them.
"""

import numpy as np

from megatron_hybrid.cache.index.tree import Checkpoint, Edge
from megatron_hybrid.cache.pages.allocator import indices
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.reuse import ALL_FLAGS, PolicyFlags, ReuseModel


def value_per_page(rate: float, work: float, pages: int) -> float:
    """Return the work saved per page and request."""
    return rate * work / (pages or 1)


def kv_pages(tokens: int, spec: CacheSpec) -> int:
    """Count the pages of full-attention KV of `tokens` tokens, rounded down."""
    return tokens * spec.kv_pages_per_block // spec.block_size_tokens


def tail_value(edge: Edge, spec: CacheSpec, reuse: ReuseModel) -> float | None:
    """Return the value of a leaf's last block in pure attention, or None if no watched position
    needs it. Its work is that of an average block of the edge: it took the most work, but serves
    only together with the blocks before it."""
    beyond = rates_beyond(edge, last_block(edge, spec), reuse)
    if not beyond:
        return None
    work = spec.block_size_tokens * spec.mean_work(edge.start, edge.held_end)
    return value_per_page(max(beyond), work, spec.kv_pages_per_block)


def last_block(edge: Edge, spec: CacheSpec) -> int:
    """Return the first position of the last block that an edge holds KV of."""
    return (edge.held_end - 1) // spec.block_size_tokens * spec.block_size_tokens


def rates_beyond(edge: Edge, position: int, reuse: ReuseModel) -> list[float]:
    """List the expected uses per request of the watched positions on an edge beyond `position`. In
    pure attention a block serves every request that resumes beyond its start."""
    return [
        reuse.rate(checkpoint)
        for watched, checkpoint in edge.checkpoints.items()
        if watched > position
    ]


def equal_start(edge: Edge, start: int, spec: CacheSpec, reuse: ReuseModel) -> int:
    """Return the position, `start` or later, from which on the blocks of a leaf are worth no more
    than the last one, in pure attention, so that they may be dropped at once."""
    block = last_block(edge, spec)
    inner = sorted([p for p in edge.checkpoints if start < p <= block], reverse=True)
    rate = max(rates_beyond(edge, block, reuse), default=0.0) if inner else 0.0
    for position in inner:
        checkpoint = edge.checkpoints[position]
        if reuse.rate(checkpoint) > rate:
            return spec.num_blocks(position) * spec.block_size_tokens
    return start


def rebuild_work(
    previous: Checkpoint | None, position: int, spec: CacheSpec, parts: PolicyFlags = ALL_FLAGS
) -> float:
    """Return the work to compute the state at a position again from the stored state before it."""
    if not (spec.needs_state and parts.work):
        return 1.0  # KV alone resumes; only the last hidden state is missing
    return spec.work(previous.position if previous else 0, position)


def exclusive_tokens(checkpoint: Checkpoint, previous: Checkpoint | None) -> int:
    """Count the tokens whose KV no other state needs, for a state with none deeper on its paths:
    back to `previous`, or to a fork that leads to another state."""
    edge = checkpoint.edge
    start = previous.edge if previous else None
    while edge is not start:
        parent = edge.parent
        others = parent.num_stored - edge.num_stored - len(parent.stored)
        if others or parent.parent is None:
            return checkpoint.position - edge.start
        edge = parent
    return checkpoint.position - previous.position


def kv_is_held(checkpoint: Checkpoint, spec: CacheSpec, ref_counts: np.ndarray) -> bool:
    """Return whether a request holds the KV up to a checkpoint, so that this KV would stay without
    the state. A request that resumes there holds the full blocks, and a copy of the last one."""
    size = spec.block_size_tokens
    position = checkpoint.position // size * size or checkpoint.position
    page = checkpoint.edge.at(position).page_before(position, size)
    return bool(ref_counts[page])


def freed_pages(checkpoint: Checkpoint, ref_counts: np.ndarray) -> int:
    """Count the pages of a stored state that its eviction would free. Local blocks that a request
    holds would stay."""
    pages = checkpoint.num_pages
    for local in checkpoint.local_pages:
        pages -= int(np.count_nonzero(ref_counts[indices(local)]))
    return pages


def checkpoint_value(
    checkpoint: Checkpoint,
    spec: CacheSpec,
    reuse: ReuseModel,
    ref_counts: np.ndarray,
    parts: PolicyFlags = ALL_FLAGS,
) -> float:
    """Return the value of a stored state. ref_counts: `PageAllocator.ref_counts`."""
    pages, previous = freed_pages(checkpoint, ref_counts), None
    if spec.needs_state:
        previous = checkpoint.previous()
        alone = parts.exclusive_kv and not checkpoint.is_shadowed()
        if alone and not kv_is_held(checkpoint, spec, ref_counts):
            pages += kv_pages(exclusive_tokens(checkpoint, previous), spec)
    work = rebuild_work(previous, checkpoint.position, spec, parts)
    return value_per_page(reuse.rate(checkpoint), work, pages)
