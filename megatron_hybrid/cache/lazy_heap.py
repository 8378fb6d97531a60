"""LazyHeap: a heap of items whose keys change."""

import heapq
from collections import OrderedDict
from collections.abc import Callable

Key = tuple[int, float, int]
"""Order of eviction, the least key first: class, value, last use. Class -1 has opportunistic
states, class 0 KV from which no position resumes, and class 1 items with a value."""

MAX_STALE = 64
"""A heap is compacted when it has this many more stale entries than valid ones."""


class LazyHeap:
    """A heap of items whose keys change without a callback.

    An item's `queued` is the key of its only valid entry. A risen key is noticed when its entry
    reaches the top, a fallen key by `update` or `refresh`.

    Args:
        key: gives the key of an item, or None if it cannot be evicted.
        max_risen: after this many risen keys in one search, the next item counts as the least. By
            default there is no limit.
    """

    def __init__(self, key: Callable[[object], Key | None], max_risen: int | None = None):
        self.key = key
        self._max_risen = max_risen
        self._heap: list[tuple[Key, int, object]] = []
        self._items: OrderedDict[object, None] = OrderedDict()  # in the order of `refresh`
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> list:
        """Return all items; some may no longer be evictable."""
        return list(self._items)

    def add(self, item) -> None:
        """Add an item, unless it is in the heap."""
        if item.queued is None:
            self._push(item, self.key(item))

    def update(self, item) -> None:
        """Update an item whose key may have fallen, or which may no longer be evictable."""
        key = self.key(item)
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
        if len(self._heap) > 2 * len(self._items) + MAX_STALE:
            self._heap = [entry for entry in self._heap if entry[2].queued is entry[0]]
            heapq.heapify(self._heap)

    def least(self) -> Key | None:
        """Return the least key, or after `max_risen` risen keys the next one, and move its item to
        the top."""
        risen = 0
        while self._heap:
            key, _, item = self._heap[0]
            if item.queued is not key:
                heapq.heappop(self._heap)
                continue
            now = self.key(item)
            if now == key or (now is not None and risen == self._max_risen):
                return now
            heapq.heappop(self._heap)
            self._push(item, now)
            if now is not None:
                if now < key:  # it was the least before
                    return now
                risen += 1
        return None

    def top(self):
        """Return the item of the least key; call `least` before."""
        return self._heap[0][2]

    def pop(self):
        """Remove and return the item of the least key; call `least` before."""
        item = heapq.heappop(self._heap)[2]
        self.discard(item)
        return item

    def discard(self, item) -> None:
        """Remove an item, if it is in the heap."""
        self._push(item, None)

    def refresh(self, most: int) -> None:
        """Recompute the keys of the next `most` items, in rotation, each at most once."""
        for _ in range(min(most, len(self._items))):
            item = next(iter(self._items))
            self._items.move_to_end(item)
            key = self.key(item)
            if key != item.queued:
                self._push(item, key)

    def clear(self) -> None:
        self._heap.clear()
        self._items.clear()
