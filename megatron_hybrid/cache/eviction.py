"""Eviction: the heaps of candidates, pinned items, and the loop that makes room.

The policy chooses the victim (policy/protocol.py); this file evicts it. Keys are tuples (class,
value, last use); the least key is evicted first.
"""

from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np

from megatron_hybrid.cache.index.prefix_index import PrefixIndex
from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Kind, Path
from megatron_hybrid.cache.lazy_heap import Key, LazyHeap
from megatron_hybrid.cache.lease import Lease
from megatron_hybrid.cache.pages.allocator import NULL_PAGE, PageAllocator, indices
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.protocol import NewState, Policy
from megatron_hybrid.cache.report import EVICTED_STATE, EVICTED_TAIL, CacheStats

MAX_RISEN = 64
"""Most risen values (as after uses) that one search for the least item recomputes."""


class CacheListener:
    """Callbacks to override; by default they do nothing. They must not change the cache."""

    def on_publish_state(self, lease: Lease, checkpoint: Checkpoint) -> None:
        """Handle a stored state of a lease's tokens."""

    def on_publish_blocks(self, lease: Lease, start: int, end: int) -> None:
        """Handle new KV in the tree: it now holds lease.tokens[:end], before only [:start]. The
        pages from the block of `start` on are those of the lease."""

    def on_evict_state(self, checkpoint: Checkpoint) -> None:
        """Handle a stored state before its eviction; its pages still hold the data."""

    def on_evict_blocks(self, edge: Edge, start: int) -> None:
        """Handle the KV of an edge after position `start` before its eviction, in pure attention;
        its pages still hold the data."""

    def on_clear(self) -> None:
        """Handle that the cache forgets everything."""


def tail_start(edge: Edge, spec: CacheSpec) -> int:
    """Return the first position of a leaf's evictable KV: the end of the block of its deepest state
    (a cut inside a block frees nothing), or `edge.held_end` if there is no such KV."""
    if edge.parent is None or not edge.is_held_leaf():
        return edge.held_end
    if not edge.stored:
        return edge.start
    return min(spec.num_blocks(edge.stored[-1]) * spec.block_size_tokens, edge.held_end)


def tail_key(edge: Edge, spec: CacheSpec, policy: Policy) -> Key | None:
    """Return the key of a leaf's tail, or None if it has no tail or no pages."""
    if not spec.kv_pages_per_block or tail_start(edge, spec) == edge.held_end:
        return None
    value = policy.tail_value(edge)
    return (0, 0.0, edge.last_access) if value is None else (1, value, edge.last_access)


def opportunistic_key(checkpoint: Checkpoint) -> Key | None:
    return None if checkpoint.pages is None else (-1, 0.0, checkpoint.last_use)


def is_gone(item: Edge | Checkpoint) -> bool:
    """Return whether an edge is no longer in the tree, or a state no longer stored."""
    return (item.parent if isinstance(item, Edge) else item.pages) is None


class PinnedItems:
    """Items pinned by running requests, kept out of the heaps so that eviction does not rescan
    them."""

    def __init__(self, allocator: PageAllocator):
        self.entries: dict[Edge | Checkpoint, tuple[Key, int]] = {}
        """Key and one page of each item."""
        self._allocator = allocator
        self._num_unpinned = 0

    def pop(self) -> Edge | Checkpoint | None:
        """Remove and return the item of the least key, or None if there is none. It looks at all
        items: it is the last resort, and running requests pin few."""
        item = min(self.entries, key=self.entries.__getitem__, default=None)
        self.entries.pop(item, None)
        return item

    def unpin(self) -> list[Edge | Checkpoint]:
        """Remove and return the items that no request holds now. Drop those that are gone, such as
        joined edges."""
        if not self.entries or self._allocator.num_unpinned == self._num_unpinned:
            return []
        self._num_unpinned = self._allocator.num_unpinned
        items = [item for item in self.entries if not is_gone(item)]
        entries = [self.entries[item] for item in items]
        pages = np.fromiter((page for _, page in entries), np.intp, len(items))
        is_held = self._allocator.ref_counts[pages].tolist()
        self.entries = {item: each for item, each, held in zip(items, entries, is_held) if held}
        return [item for item, held in zip(items, is_held) if not held]


class Evictor:
    """Frees pages by evicting the victims that the policy chooses. It implements `Evictable`, and
    has the parts that all parts of a cache share."""

    def __init__(
        self,
        spec: CacheSpec,
        index: PrefixIndex,
        allocator: PageAllocator,
        stats: CacheStats,
        policy: Policy,
        record: Callable[..., None],
    ):
        self.tails = LazyHeap(
            lambda edge: tail_key(edge, spec, policy), None if spec.needs_state else MAX_RISEN
        )
        index.on_tail = self.tails.add
        self.checkpoints = LazyHeap(self._key, MAX_RISEN)
        self.opportunistic = LazyHeap(opportunistic_key)
        # The heaps whose values change with time and learning.
        self._valued = [self.checkpoints] if spec.needs_state else [self.tails, self.checkpoints]
        self.listeners: list[CacheListener] = []
        self.spec = spec
        self.index = index
        self.allocator = allocator
        self.stats = stats
        self.policy = policy
        self.record = record
        self._pinned = PinnedItems(allocator)

    def _key(self, checkpoint: Checkpoint) -> Key | None:
        if checkpoint.pages is None:
            return None
        value = self.policy.state_value(checkpoint, self.allocator.ref_counts)
        return 1, value, checkpoint.last_use

    def make_room(self, num_pages: int, *, below: Key | None = None, force: bool = False) -> bool:
        """Evict until num_pages pages are free. Return whether they are.

        below: evict only items of a lesser key. force: when only pinned items are left, drop them
        from the index, too, as unpinned pages may lie beneath them; the leases keep their pages.
        """
        # Any other change that makes an item evictable adds it to its heap.
        for item in self._pinned.unpin():
            self.add(item)
        while self.allocator.num_free < num_pages:
            item, key = self.policy.victim(self) or (None, None)
            forced = item is None and force
            if forced:
                item = self._pinned.pop()
            elif item is not None and below is not None and key >= below:
                break
            if item is None:
                break
            self._heap_of(item).discard(item)
            try:
                gone = self._drop(item, num_pages, forced)
            except BaseException:  # the listener failed
                self.add(item)
                raise
            if not gone:
                self._pinned.entries[item] = key, self._last_page(item)
        return self.allocator.num_free >= num_pages

    def _last_page(self, item: Edge | Checkpoint) -> int:
        """Return a page of a state, or of an edge's last block: a request that holds the item holds
        this page."""
        if isinstance(item, Edge):
            return item.page_before(item.held_end, self.spec.block_size_tokens)
        return int(item.pages[-1]) if item.pages.size else NULL_PAGE

    def make_room_for(self, num_pages: int, value: float) -> bool:
        """Evict only candidates below `value` until num_pages pages are free; see `make_room`."""
        below = (1, value, self.policy.now)
        return self.allocator.can_free(num_pages) and self.make_room(num_pages, below=below)

    def make_room_for_state(self, new: NewState) -> bool:
        """Make room for a state: evict candidates of a lesser value, or replace the previous state
        on its path."""
        value = self.policy.new_value(new)
        if self.make_room_for(self.spec.checkpoint_pages, value):
            return True
        return self.policy.replaces(new) and self.drop_checkpoint(new.previous)

    def add(self, item: Edge | Checkpoint) -> None:
        """Add an edge's tail or a stored checkpoint."""
        self._heap_of(item).add(item)

    def update(self, checkpoint: Checkpoint) -> None:
        """Update a stored checkpoint whose key may have fallen."""
        self._heap_of(checkpoint).update(checkpoint)

    def _heap_of(self, item: Edge | Checkpoint) -> LazyHeap:
        if isinstance(item, Edge):
            return self.tails
        return self.opportunistic if item.kind is Kind.OPPORTUNISTIC else self.checkpoints

    def on_store(self, checkpoint: Checkpoint) -> None:
        """Update the heaps after a state was published: the KV before it is no longer a tail, and
        the previous state on its path is worth less."""
        self.add(checkpoint)
        self.tails.update(checkpoint.edge)
        previous = None if checkpoint.kind is Kind.OPPORTUNISTIC else checkpoint.previous()
        if previous is not None:
            self.checkpoints.update(previous)

    def on_release(self, path: Path, local_start: int) -> None:
        """Update the heaps after a request released its KV, or a part of that of local groups.
        Evicting the last state on its path now frees more, and so does evicting those with local
        blocks of it. States on other branches wait for `refresh`. local_start: first token of the
        released local KV."""
        left = path.left(path.known)
        checkpoint = left[0].deepest_on_path(left[1]) if left else None
        while checkpoint is not None:
            self.update(checkpoint)
            if checkpoint.position <= local_start:
                break
            checkpoint = checkpoint.edge.deepest_on_path(checkpoint.position - 1)

    def refresh(self, most: int) -> None:
        """Recompute the next `most` values of each heap whose values change, in rotation."""
        for heap in self._valued:
            heap.refresh(most)

    def clear(self) -> None:
        """Empty the heaps, after the index was cleared."""
        for items in (self.tails, self.checkpoints, self.opportunistic, self._pinned.entries):
            items.clear()

    def least(self) -> tuple[Edge | Checkpoint, Key] | None:
        """Return the item of the least key in all heaps, and the key, or None if there is none."""
        opportunistic = self.opportunistic.least()
        if opportunistic is not None:
            return self.opportunistic.top(), opportunistic
        tail = self.tails.least()
        state = None if tail is not None and tail[0] == 0 else self.checkpoints.least()
        if tail is not None and (state is None or tail < state):
            return self.tails.top(), tail
        return None if state is None else (self.checkpoints.top(), state)

    def candidates(self) -> Iterator[Edge | Checkpoint]:
        """Return the evictable items of all heaps; some may be pinned."""
        items = chain(self.opportunistic.items(), self.tails.items(), self.checkpoints.items())
        return (item for item in items if self._heap_of(item).key(item) is not None)

    def _drop(self, item: Edge | Checkpoint, num_pages: int, force: bool = False) -> bool:
        """Drop a checkpoint, or as many blocks of a tail as are needed. Return False if it is
        pinned."""
        if isinstance(item, Checkpoint):
            return self.drop_checkpoint(item, force)
        return self._drop_blocks(item, num_pages - self.allocator.num_free, force)

    def drop_checkpoint(self, checkpoint: Checkpoint, force: bool = False) -> bool:
        """Drop a stored state. Return False if it is pinned by a lease that restores it."""
        if checkpoint.pages is None:
            return True
        if not force and self.allocator.ref_counts[self._last_page(checkpoint)]:
            return False  # a request holds all pages of a state or none
        for listener in self.listeners:
            listener.on_evict_state(checkpoint)
        self.record(EVICTED_STATE, checkpoint.position)
        previous = checkpoint.previous() if checkpoint.kind is Kind.OPPORTUNISTIC else None
        self.index.drop_checkpoint(checkpoint)
        self._heap_of(checkpoint).discard(checkpoint)
        if previous is not None:
            self.checkpoints.update(previous)  # KV up to there may be its own again
        self.stats.checkpoints_evicted += 1
        return True

    def _drop_blocks(self, edge: Edge, wanted: int, force: bool) -> bool:
        start = tail_start(edge, self.spec)
        if start == edge.held_end:
            return True
        size = self.spec.block_size_tokens
        first = start // size  # the edge's start may lie inside a block
        rows = edge.pages(size)[first - edge.first_block :]
        end, drop, per_block = first + len(rows), len(rows), self.spec.kv_pages_per_block
        if not force:
            drop = min(drop, -(-wanted // per_block))
            if not self.spec.needs_state:
                drop = end - self.policy.equal_start(edge, (end - drop) * size) // size
            held = self.allocator.ref_counts[indices(rows[-drop:])].nonzero()[0]
            if held.size:
                drop -= int(held[-1]) // per_block + 1
        if drop:
            new_end = max((end - drop) * size, edge.start)
            if not self.spec.needs_state:
                for listener in self.listeners:
                    listener.on_evict_blocks(edge, new_end)
            self.record(EVICTED_TAIL, edge.start, edge.end, drop)
            self.index.drop_kv(edge, new_end)
            self.stats.kv_blocks_evicted += drop
        return drop > 0
