"""Edges with states, and given expected uses of these."""

import numpy as np

from megatron_hybrid.cache import eviction
from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Kind
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.policy.hybrid import HybridPolicy

FULL = KVGroup(2, 64)
HYBRID = CacheSpec(16, (FULL,), state_bytes=4000, hidden_bytes=64)  # checkpoints of 2 pages
HEAVY = CacheSpec(
    16, (FULL,), state_bytes=40_000, hidden_bytes=64
)  # of 20: intervals are far apart
PURE = CacheSpec(16, (FULL,), state_bytes=0, hidden_bytes=64)
STATE_ONLY = CacheSpec(16, (), state_bytes=4000, hidden_bytes=64)
FREE = np.zeros(64, np.int16)  # requests that hold each page


def edge(start, end, checkpoints=(), parent=None, spec=HYBRID, held_end=None, first_page=None):
    """An edge with stored states at these positions; its pages ascend from `first_page`."""
    if parent is None:
        parent = Edge(None, 0, np.zeros(start, np.int32), np.zeros((0, 1), np.int32))
    blocks = spec.num_blocks(end) - start // 16
    tokens, pages = np.arange(end - start, dtype=np.int32), np.zeros((blocks, 1), np.int32)
    if first_page is not None:
        pages += np.arange(first_page, first_page + blocks, dtype=np.int32)[:, None]
    new = Edge(parent, start, tokens, pages)
    new.first_block = start // 16
    new.held_end = end if held_end is None else held_end
    parent.num_held_children += new.held_end > start
    parent.children[len(parent.children)] = new
    for position in checkpoints:
        new.checkpoints[position] = Checkpoint(new, position, Kind.JUNCTION, now=0)
        new.checkpoints[position].pages = np.zeros(2, np.int32)
        new.stored.append(position)
    above = new
    while above is not None:
        above.num_stored += len(checkpoints)
        above = above.parent
    return new


class Rates:
    """Given expected uses, by checkpoint; 1 by default."""

    def __init__(self):
        self.now, self.rates = 0, {}

    def rate(self, checkpoint):
        return self.rates.get(checkpoint, 1.0)


def valued_by(rates, spec):
    """The policy with expected uses from `rates`."""
    policy = HybridPolicy(spec)
    policy.reuse = rates
    return policy


def tail_key(tail, spec, rates):
    return eviction.tail_key(tail, spec, valued_by(rates, spec))
