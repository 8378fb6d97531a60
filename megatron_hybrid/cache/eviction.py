"""What to drop next. Two pure key functions, a lazy heap, and the loop that makes room.

Keys are tuples (class, value, last access); the least goes first.

Class 0: KV that no checkpoint can reach, the tail of a leaf; by recency.
Class 1: checkpoints, and where KV alone resumes also tails; by Greedy-Dual-Size-Frequency
(Cherkasova 1998, without the frequency): value = clock at last use + tokens to rebuild without it
/ pages. The clock is the value of the last victim, so what is not used sinks against what is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from megatron_hybrid.cache.page_allocator import PageAllocator
from megatron_hybrid.cache.prefix_index import PrefixIndex
from megatron_hybrid.cache.report import EVICTED_STATE, EVICTED_TAIL, CacheStats
from megatron_hybrid.cache.spec import CacheSpec
from megatron_hybrid.cache.tree import Checkpoint, Edge

Key = tuple[int, float, int]


def tail_start(edge: Edge, spec: CacheSpec) -> int:
    """Where a leaf's droppable tail starts: after its deepest checkpoint, and after that one's
    block where there are blocks (cutting inside one frees nothing). `edge.end`: no tail."""
    if edge.children or edge.parent is None:
        return edge.end
    deepest = max(edge.checkpoints, default=edge.start)
    if spec.kv_pages_per_block and deepest > edge.start:
        deepest = spec.num_blocks(deepest) * spec.block_size_tokens
    return min(deepest, edge.end)


def tail_key(edge: Edge, spec: CacheSpec) -> Key | None:
    """Order of a leaf's tail; None: it has none."""
    if tail_start(edge, spec) == edge.end:
        return None
    if spec.needs_state or not spec.kv_pages_per_block:
        return 0, 0.0, edge.last_access
    return 1, edge.clock + spec.block_size_tokens / spec.kv_pages_per_block, edge.last_access


def rebuild_tokens(edge: Edge, position: int, needs_state: bool) -> int:
    """Tokens to compute again to get to a position on an edge without a checkpoint there."""
    if not needs_state:
        return 1  # KV alone resumes; what is missing is the last hidden state
    while edge.parent is not None:
        below = edge.deepest_checkpoint(position - 1)
        if below is not None:
            return position - below.position
        edge = edge.parent
    return position


def checkpoint_value(tokens: int, num_pages: int) -> float:
    """Tokens saved per page held."""
    return tokens / max(1, num_pages)


def checkpoint_key(checkpoint: Checkpoint, spec: CacheSpec) -> Key | None:
    """Order of a checkpoint; None: it was dropped."""
    if checkpoint.edge is None:
        return None
    tokens = rebuild_tokens(checkpoint.edge, checkpoint.position, spec.needs_state)
    pages = sum(held.size for held in checkpoint.page_lists())
    return 1, checkpoint.clock + checkpoint_value(tokens, pages), checkpoint.last_access


class EvictionQueue:
    """A heap of items whose keys change behind its back.

    An item's `queued` is the key of its one valid entry. A key that rose is noticed when the
    entry surfaces; one that fell has to be told (`lowered`).
    """

    def __init__(self, key: Callable[[object], Key | None]):
        self._key = key
        self._heap: list[tuple[Key, int, object]] = []
        self._pushed = 0

    def add(self, item) -> None:
        """Enter an item if it is not in already."""
        if item.queued is None:
            self._push(item, self._key(item))

    def lowered(self, item) -> None:
        """The item's key may be lower than when it was entered."""
        key = self._key(item)
        if item.queued is None or (key is not None and key < item.queued):
            self._push(item, key)

    def _push(self, item, key: Key | None) -> None:
        item.queued = key
        if key is not None:
            self._pushed += 1  # breaks ties in order of arrival
            heapq.heappush(self._heap, (key, self._pushed, item))

    def least(self) -> Key | None:
        """The least key; brings its item to the top."""
        while self._heap:
            key, _, item = self._heap[0]
            if item.queued == key:
                now = self._key(item)
                if now == key:
                    return key
                heapq.heappop(self._heap)
                self._push(item, now)
            else:
                heapq.heappop(self._heap)
        return None

    def pop(self):
        """Take out the item of the least key; call `least` before."""
        item = heapq.heappop(self._heap)[2]
        item.queued = None
        return item

    def clear(self) -> None:
        self._heap.clear()


class Evictor:
    """Makes room in the pool by dropping what is worth least."""

    def __init__(
        self,
        spec: CacheSpec,
        index: PrefixIndex,
        allocator: PageAllocator,
        stats: CacheStats,
        tails: EvictionQueue,
        record: Callable[..., None],
    ):
        self.clock = 0.0
        self.tails = tails
        self.checkpoints = EvictionQueue(lambda checkpoint: checkpoint_key(checkpoint, spec))
        self._spec = spec
        self._index = index
        self._allocator = allocator
        self._stats = stats
        self._record = record

    def make_room(self, num_pages: int, *, below: Key | None = None, force: bool = False) -> bool:
        """Evict until num_pages pages are free; whether they are.

        below: drop only what has a lesser key. force: when all that is left is pinned by a lease,
        take even that out of the index (the lease keeps its pages): it may be the only way to
        what lies under it.
        """
        pinned = []
        while self._allocator.num_free < num_pages:
            queue, key = self._next()
            if queue is None and force and pinned:
                self._drop(pinned.pop(0), num_pages, force=True)
            elif queue is None or (below is not None and key >= below):
                break
            else:
                item = queue.pop()
                if self._drop(item, num_pages):
                    self.clock = max(self.clock, key[1])
                else:
                    pinned.append(item)
        for item in pinned:
            self.add(item)
        return self._allocator.num_free >= num_pages

    def make_room_for(self, num_pages: int, value: float, tick: int) -> bool:
        """Room for a checkpoint of this value (`checkpoint_value`), among what is worth less.

        A refusal brings the clock forward by the value that it cost (as in Young's Landlord, 1998):
        old things that nobody uses give way at last to small ones that keep asking.
        """
        if num_pages > self._allocator.num_free + self._allocator.num_evictable:
            return False  # leases hold the room; that says nothing against what is cached
        if self.make_room(num_pages, below=(1, self.clock + value, tick)):
            return True
        self.clock += value
        return False

    def add(self, item: Edge | Checkpoint) -> None:
        """Enter an edge's tail or a checkpoint."""
        (self.checkpoints if isinstance(item, Checkpoint) else self.tails).add(item)

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Enter a new checkpoint; those next above it on its paths are worth less now."""
        self.checkpoints.add(checkpoint)
        edge = checkpoint.edge
        above = [p for p in edge.checkpoints if p > checkpoint.position]
        if above:
            self.checkpoints.lowered(edge.checkpoints[min(above)])
            return
        for child in edge.children.values():
            if child.checkpoints:
                self.checkpoints.lowered(child.checkpoints[min(child.checkpoints)])

    def clear(self) -> None:
        """The index was cleared."""
        self.tails.clear()
        self.checkpoints.clear()

    def forget_tokens(self, limit: int) -> None:
        """Where tails hold no pages, bound the tokens that the index keeps in host memory."""
        while self._index.num_tokens > limit and self.tails.least() is not None:
            edge = self.tails.pop()
            self._record(EVICTED_TAIL, edge.start, edge.end, 0)
            self._index.drop_tail(edge, tail_start(edge, self._spec))

    def _next(self) -> tuple[EvictionQueue | None, Key | None]:
        """The queue whose top goes next. Tails without pages are not worth dropping for room."""
        checkpoint = self.checkpoints.least()
        tail = self.tails.least() if self._spec.kv_pages_per_block else None
        if tail is not None and (checkpoint is None or tail < checkpoint):
            return self.tails, tail
        return (None, None) if checkpoint is None else (self.checkpoints, checkpoint)

    def _drop(self, item: Edge | Checkpoint, num_pages: int, force: bool = False) -> bool:
        """Drop a checkpoint, or as many blocks of a tail as are needed. False: it is pinned."""
        if isinstance(item, Checkpoint):
            return self._drop_checkpoint(item, force)
        return self._drop_blocks(item, num_pages - self._allocator.num_free, force)

    def _drop_checkpoint(self, checkpoint: Checkpoint, force: bool) -> bool:
        if checkpoint.edge is None:
            return True
        if not force and self._allocator.ref_counts[checkpoint.pages].any():
            return False
        self._record(EVICTED_STATE, checkpoint.position)
        self._index.drop_checkpoint(checkpoint)
        self._stats.checkpoints_evicted += 1
        return True

    def _drop_blocks(self, edge: Edge, wanted: int, force: bool) -> bool:
        start = tail_start(edge, self._spec)
        if start == edge.end:
            return True
        size = self._spec.block_size_tokens
        first = start // size  # the edge's start may lie inside a block
        rows = edge.pages(size)[first - edge.first_block :]
        if force:
            drop = len(rows)
        else:
            held = self._allocator.ref_counts[rows].any(axis=1)[::-1]
            free = int(held.argmax()) if held.any() else len(rows)
            drop = min(free, -(-wanted // self._spec.kv_pages_per_block))
        if drop:
            self._record(EVICTED_TAIL, edge.start, edge.end, drop)
            self._index.drop_tail(edge, (first + len(rows) - drop) * size)
            self._stats.kv_blocks_evicted += drop
        return drop > 0
