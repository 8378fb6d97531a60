"""What to drop next. Pure key functions, a lazy heap, and the loop that makes room.

Keys are tuples (class, value, last access); the least goes first.

Class 0: KV that no checkpoint can reach, or where KV alone resumes none that is watched, the tail
of a leaf; by recency.
Class 1: checkpoints, and where KV alone resumes also tails. The value of either is what it saves
per page and request: uses to be expected per request (`ReuseModel`) x work to be done again without
it (`CacheSpec.work`: tokens, those with a long context for more) / pages that go with it, of a
checkpoint its own and those of the KV that only leads to it, unless a running request holds that.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np

from megatron_hybrid.cache.index.prefix_index import PrefixIndex
from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Path
from megatron_hybrid.cache.pages.allocator import NULL_PAGE, PageAllocator, indices
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.reuse import ReuseModel
from megatron_hybrid.cache.report import EVICTED_STATE, EVICTED_TAIL, CacheStats

Key = tuple[int, float, int]

MAX_RISEN = 64
"""Values that are found to have risen, as after learning, on the way to one item that goes next."""
MAX_STALE = 64
"""Entries of a queue that are not valid any more, beyond as many as are, before it is cleaned."""
CLEANED_AT_ONCE = 4
"""Entries that are looked at for each that is entered, while a queue is cleaned."""


def tail_start(edge: Edge, spec: CacheSpec) -> int:
    """Where a leaf's droppable KV starts: after its deepest state, and after that one's block
    (cutting inside one frees nothing). `edge.held_end`: there is none."""
    if edge.parent is None or not edge.is_held_leaf():
        return edge.held_end
    deepest = edge.deepest_checkpoint(edge.held_end)
    if deepest is None:
        return edge.start
    return min(spec.num_blocks(deepest.position) * spec.block_size_tokens, edge.held_end)


def tail_key(edge: Edge, spec: CacheSpec, reuse: ReuseModel) -> Key | None:
    """Order of a leaf's tail; None: it has none, or no pages.

    Where KV alone resumes, the last block is worth as much as all of the edge on average: it took
    the most work, but serves only together with what comes before it. By its own work the ends of
    long prompts would outlive what is worth more, and then go with the rest all the same.
    """
    if not spec.kv_pages_per_block or tail_start(edge, spec) == edge.held_end:
        return None
    beyond = [] if spec.needs_state else rates_beyond(edge, last_block(edge, spec), reuse)
    if not beyond:
        return 0, 0.0, edge.last_access
    work = spec.block_size_tokens * spec.mean_work(edge.start, edge.held_end)
    return 1, value_per_page(max(beyond), work, spec.kv_pages_per_block), edge.last_access


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

    If it came in for the deeper one, its own uses are the others (as if half a use more had been
    seen). Else, or if it has no record yet, as those of other states that are covered.
    """
    if checkpoint.uses < 2 or deeper is None or deeper.stand_in != checkpoint.position:
        return reuse.rate(checkpoint, covered=True)
    came_in = min(deeper.missed, checkpoint.uses)
    return reuse.rate(checkpoint) * (1 - came_in / (checkpoint.uses + 0.5))


def value_per_page(rate: float, work: float, pages: int) -> float:
    """Work saved per page and request."""
    return rate * work / max(1, pages)


def kv_is_held(checkpoint: Checkpoint, spec: CacheSpec, ref_counts: np.ndarray) -> bool:
    """Whether a request holds the KV up to a position: it would stay if the state went. Who resumes
    there holds the full blocks; of the last one it has a copy."""
    size = spec.block_size_tokens
    position = checkpoint.position // size * size or checkpoint.position
    page = checkpoint.edge.at(position).page_before(position, size)
    return bool(ref_counts[page])


def checkpoint_value(
    checkpoint: Checkpoint, spec: CacheSpec, reuse: ReuseModel, ref_counts: np.ndarray
) -> float:
    """What a stored state saves per page and request. ref_counts: `PageAllocator.ref_counts`."""
    covered, pages, below = reuse.is_covered(checkpoint), checkpoint.num_pages, None
    if spec.needs_state:
        below = checkpoint.below()
        if not covered and not kv_is_held(checkpoint, spec, ref_counts):
            pages += kv_pages(exclusive_tokens(checkpoint, below), spec)
    work = rebuild_work(checkpoint, below, spec)
    return value_per_page(reuse.rate(checkpoint, covered), work, pages)


def is_gone(item: Edge | Checkpoint) -> bool:
    """Whether it is no edge of the tree, or no stored state, any more."""
    return (item.parent if isinstance(item, Edge) else item.pages) is None


def kv_pages(tokens: int, spec: CacheSpec) -> int:
    """Pages of full-attention KV of so many tokens, rounded."""
    return tokens * spec.kv_pages_per_block // spec.block_size_tokens


class EvictionQueue:
    """A heap of items whose keys change behind its back.

    An item's `queued` is the key of its one valid entry. A key that rose is noticed when the
    entry surfaces; one that fell has to be told (`changed`), or waits for `refresh`.

    Args:
        key: of an item; None: it cannot go.
        max_risen: keys found to have risen on the way to the least one, beyond which the next item
            is taken for the least (None: no bound; as many rise as were used since).
    """

    def __init__(self, key: Callable[[object], Key | None], max_risen: int | None = None):
        self._key = key
        self._max_risen = max_risen
        self._heap: list[tuple[Key, int, object]] = []
        self._old: list[tuple[Key, int, object]] = []  # a heap too: it is cleaned from its end
        self._items: OrderedDict[object, None] = OrderedDict()  # in the order of `refresh`
        self._pushed = 0

    def __len__(self) -> int:
        """Items, those aside that cannot go any more and were not noticed yet."""
        return len(self._items)

    def add(self, item) -> None:
        """Enter an item if it is not in already."""
        if item.queued is None:
            self._push(item, self._key(item))

    def changed(self, item) -> None:
        """The item's key may be lower than when it was entered, or it may not go any more."""
        key = self._key(item)
        if key is None or item.queued is None or key < item.queued:
            self._push(item, key)

    def _push(self, item, key: Key | None) -> None:
        item.queued = key
        if key is None:
            self._items.pop(item, None)
            return
        self._items[item] = None
        self._pushed += 1  # breaks ties in order of arrival
        heapq.heappush(self._heap, (key, self._pushed, item))
        if not self._old and len(self._heap) > 2 * len(self._items) + MAX_STALE:
            self._heap, self._old = self._old, self._heap
        for _ in range(min(CLEANED_AT_ONCE, len(self._old))):
            entry = self._old.pop()  # the last one: what is left is a heap
            if entry[2].queued is entry[0]:
                heapq.heappush(self._heap, entry)

    def _first(self) -> list[tuple[Key, int, object]]:
        """The heap whose top is the least entry."""
        if self._old and (not self._heap or self._old[0] < self._heap[0]):
            return self._old
        return self._heap

    def least(self) -> Key | None:
        """The least key, or that of the item that was the least before many rose at once; brings
        the item to the top."""
        risen = 0
        while heap := self._first():
            key, _, item = heap[0]
            if item.queued is not key:
                heapq.heappop(heap)
                continue
            now = self._key(item)
            if now == key or (now is not None and risen == self._max_risen):
                return now
            heapq.heappop(heap)
            self._push(item, now)
            if now is not None:
                if now < key:  # it was the least before
                    return now
                risen += 1
        return None

    def pop(self):
        """Take out the item of the least key; call `least` before."""
        item = heapq.heappop(self._first())[2]
        self.discard(item)
        return item

    def discard(self, item) -> None:
        """Take an item out, if it is in."""
        self._push(item, None)

    def refresh(self, most: int) -> None:
        """Compute the keys of the next `most` items anew, in rotation, each once at most."""
        for _ in range(min(most, len(self._items))):
            item = next(iter(self._items))
            self._items.move_to_end(item)
            key = self._key(item)
            if key != item.queued:
                self._push(item, key)

    def clear(self) -> None:
        self._heap.clear()
        self._old.clear()
        self._items.clear()


class Held:
    """What could not go since a request holds it: out of the queues until that lets go of it, or
    each search for room would come across it again."""

    def __init__(self, allocator: PageAllocator):
        self.entries: dict[Edge | Checkpoint, tuple[Key, int]] = {}
        """The key that each had, and a page of it."""
        self._allocator = allocator
        self._heap: list[tuple[tuple[Key, int], int, Edge | Checkpoint]] = []
        self._added = 0
        self._clean_at = MAX_STALE
        self._num_let_go = 0

    def add(self, item: Edge | Checkpoint, key: Key, page: int) -> None:
        """Enter an item; one that is in gets this key."""
        entry = self.entries[item] = key, page
        self._added += 1  # breaks ties in order of arrival
        heapq.heappush(self._heap, (entry, self._added, item))
        if len(self._heap) > self._clean_at:
            self._clean()

    def _clean(self) -> None:
        """Away with edges that were joined, states that went with KV, and entries of the past."""
        self.entries = {item: entry for item, entry in self.entries.items() if not is_gone(item)}
        self._heap = [each for each in self._heap if self.entries.get(each[2]) is each[0]]
        heapq.heapify(self._heap)
        self._clean_at = 2 * len(self._heap) + MAX_STALE

    def pop(self) -> Edge | Checkpoint | None:
        """Take out the item of the least key; None: there is none."""
        while self._heap:
            entry, _, item = heapq.heappop(self._heap)
            if self.entries.get(item) is entry:
                del self.entries[item]
                return item
        return None

    def let_go(self) -> list[Edge | Checkpoint]:
        """Take out what no request holds any more."""
        if not self.entries or self._allocator.num_let_go == self._num_let_go:
            return []
        self._num_let_go = self._allocator.num_let_go
        pages = np.fromiter((page for _, page in self.entries.values()), np.intp, len(self.entries))
        items = list(self.entries)
        free = [items[i] for i in np.flatnonzero(self._allocator.ref_counts[pages] == 0).tolist()]
        for item in free:
            del self.entries[item]
        return free

    def clear(self) -> None:
        self.entries.clear()
        self._heap.clear()


class Leaving(Protocol):
    """Told what leaves the pool while its pages still hold it."""

    def state_leaves(self, checkpoint: Checkpoint) -> None:
        """A stored state makes room."""

    def blocks_leave(self, edge: Edge, end: int) -> None:
        """Where KV alone resumes: blocks at the end of an edge, which holds KV up to `end`, make
        room."""


class Evictor:
    """Makes room in the pool by dropping what is worth least."""

    def __init__(
        self,
        spec: CacheSpec,
        index: PrefixIndex,
        allocator: PageAllocator,
        stats: CacheStats,
        reuse: ReuseModel,
        record: Callable[..., None],
    ):
        self.tails = EvictionQueue(
            lambda edge: tail_key(edge, spec, reuse), None if spec.needs_state else MAX_RISEN
        )
        index.on_tail = self.tails.add
        self.checkpoints = EvictionQueue(self._key, MAX_RISEN)
        # Whose values change with time and with what is learnt.
        self._valued = [self.checkpoints] if spec.needs_state else [self.tails, self.checkpoints]
        self.leaving: Leaving | None = None
        self._spec = spec
        self._index = index
        self._allocator = allocator
        self._stats = stats
        self._reuse = reuse
        self._record = record
        self._held = Held(allocator)

    def _key(self, checkpoint: Checkpoint) -> Key | None:
        if checkpoint.pages is None:
            return None
        value = checkpoint_value(checkpoint, self._spec, self._reuse, self._allocator.ref_counts)
        return 1, value, checkpoint.last_use

    def make_room(self, num_pages: int, *, below: Key | None = None, force: bool = False) -> bool:
        """Evict until num_pages pages are free; whether they are.

        below: drop only what has a lesser key. force: when all that is left is pinned by a lease,
        take even that out of the index (the lease keeps its pages): it may be the only way to
        what lies under it.
        """
        # Whatever else makes an item droppable enters it anew where it happens.
        for item in self._held.let_go():
            self.add(item)
        while self._allocator.num_free < num_pages:
            item, (queue, key) = None, self._next()
            forced = queue is None and force
            if forced:
                item = self._held.pop()
            elif queue is not None and (below is None or key < below):
                item = queue.pop()
            if item is None:
                break
            try:
                gone = self._drop(item, num_pages, forced)
            except BaseException:  # `leaving` failed
                self.add(item)
                raise
            if not gone:
                self._held.add(item, key, self._last_page(item))
        return self._allocator.num_free >= num_pages

    def _last_page(self, item: Edge | Checkpoint) -> int:
        """A page that a request holds if it holds a stored state, or an edge's last block."""
        if isinstance(item, Edge):
            return item.page_before(item.held_end, self._spec.block_size_tokens)
        return int(item.pages[-1]) if item.pages.size else NULL_PAGE

    def make_room_for(self, num_pages: int, value: float) -> bool:
        """Room for a checkpoint of this value, among what is worth less."""
        below = (1, value, self._reuse.now)
        return self._allocator.can_free(num_pages) and self.make_room(num_pages, below=below)

    def add(self, item: Edge | Checkpoint) -> None:
        """Enter an edge's tail or a stored checkpoint."""
        (self.checkpoints if isinstance(item, Checkpoint) else self.tails).add(item)

    def stored(self, checkpoint: Checkpoint) -> None:
        """A state was published: the KV up to there is no tail any more, and the state below it on
        its path is worth less."""
        self.checkpoints.add(checkpoint)
        self.tails.changed(checkpoint.edge)
        below = checkpoint.below()
        if below is not None:
            self.checkpoints.changed(below)

    def let_go(self, path: Path) -> None:
        """A request let go of the KV on its path: the last state there leads to more that would go
        with it."""
        left = path.left(path.known)
        checkpoint = left[0].deepest_on_path(left[1]) if left else None
        if checkpoint is not None:
            self.checkpoints.changed(checkpoint)

    def num_values(self) -> int:
        """In the longest of the queues whose values change."""
        return max(map(len, self._valued))

    def refresh(self, most: int) -> None:
        """Compute the next `most` of each of these queues anew, in rotation."""
        for queue in self._valued:
            queue.refresh(most)

    def clear(self) -> None:
        """The index was cleared."""
        self.tails.clear()
        self.checkpoints.clear()
        self._held.clear()

    def _next(self) -> tuple[EvictionQueue | None, Key | None]:
        """The queue whose top goes next."""
        tail = self.tails.least()
        checkpoint = None if tail is not None and tail[0] == 0 else self.checkpoints.least()
        if tail is not None and (checkpoint is None or tail < checkpoint):
            return self.tails, tail
        return (None, None) if checkpoint is None else (self.checkpoints, checkpoint)

    def _drop(self, item: Edge | Checkpoint, num_pages: int, force: bool = False) -> bool:
        """Drop a checkpoint, or as many blocks of a tail as are needed. False: it is pinned."""
        if isinstance(item, Checkpoint):
            return self.drop_checkpoint(item, force)
        return self._drop_blocks(item, num_pages - self._allocator.num_free, force)

    def drop_checkpoint(self, checkpoint: Checkpoint, force: bool = False) -> bool:
        """Drop a stored state. False: it is pinned by a lease that restores it."""
        if checkpoint.pages is None:
            return True
        if not force and self._allocator.ref_counts[self._last_page(checkpoint)]:
            return False  # held are all of its pages or none
        if self.leaving is not None:
            self.leaving.state_leaves(checkpoint)
        self._record(EVICTED_STATE, checkpoint.position)
        self._reuse.changes(checkpoint)
        below = checkpoint.below()
        if below is not None:
            self._reuse.changes(below)
        self._index.drop_checkpoint(checkpoint)
        self.checkpoints.discard(checkpoint)
        self._stats.checkpoints_evicted += 1
        return True

    def _drop_blocks(self, edge: Edge, wanted: int, force: bool) -> bool:
        start = tail_start(edge, self._spec)
        if start == edge.held_end:
            return True
        size = self._spec.block_size_tokens
        first = start // size  # the edge's start may lie inside a block
        rows = edge.pages(size)[first - edge.first_block :]
        end, drop, per_block = first + len(rows), len(rows), self._spec.kv_pages_per_block
        if not force:
            drop = min(drop, -(-wanted // per_block))
            if not self._spec.needs_state:
                drop = end - equal_start(edge, (end - drop) * size, self._spec, self._reuse) // size
            held = self._allocator.ref_counts[indices(rows[-drop:])].nonzero()[0]
            if held.size:
                drop -= int(held[-1]) // per_block + 1
        if drop:
            if self.leaving is not None and not self._spec.needs_state:
                self.leaving.blocks_leave(edge, edge.held_end)
            self._record(EVICTED_TAIL, edge.start, edge.end, drop)
            self._index.drop_kv(edge, (end - drop) * size)
            self._stats.kv_blocks_evicted += drop
        return drop > 0
