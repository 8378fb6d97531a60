"""A heap of items whose keys change behind its back."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

Key = tuple[int, float, int]
"""Order of eviction, the least first: class, value, last use. Class 0: KV that nothing resumes
from. Class 1: what has a value."""

MAX_STALE = 64
"""Entries of a heap that are not valid any more, beyond as many as are, before it is cleaned."""
CLEANED_AT_ONCE = 4
"""Entries that are looked at for each that is entered, while a heap is cleaned."""


class LazyHeap:
    """A heap of items whose keys change behind its back.

    An item's `queued` is the key of its one valid entry. A key that rose is noticed when the
    entry surfaces; one that fell has to be told (`update`), or waits for `refresh`.

    Args:
        key: of an item; None: it cannot go.
        max_risen: keys found to have risen on the way to the least one, beyond which the next item
            is taken for the least (None: no bound; as many rise as were used since).
    """

    def __init__(self, key: Callable[[object], Key | None], max_risen: int | None = None):
        self.key = key
        self._max_risen = max_risen
        self._heap: list[tuple[Key, int, object]] = []
        self._old: list[tuple[Key, int, object]] = []  # a heap too: it is cleaned from its end
        self._items: OrderedDict[object, None] = OrderedDict()  # in the order of `refresh`
        self._pushed = 0

    def __len__(self) -> int:
        """Items, those aside that cannot go any more and were not noticed yet."""
        return len(self._items)

    def items(self) -> list:
        """All items, those included that cannot go any more and were not noticed yet."""
        return list(self._items)

    def add(self, item) -> None:
        """Enter an item if it is not in already."""
        if item.queued is None:
            self._push(item, self.key(item))

    def update(self, item) -> None:
        """The item's key may be lower than when it was entered, or it may not go any more."""
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
            now = self.key(item)
            if now == key or (now is not None and risen == self._max_risen):
                return now
            heapq.heappop(heap)
            self._push(item, now)
            if now is not None:
                if now < key:  # it was the least before
                    return now
                risen += 1
        return None

    def top(self):
        """The item of the least key; call `least` before."""
        return self._first()[0][2]

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
            key = self.key(item)
            if key != item.queued:
                self._push(item, key)

    def clear(self) -> None:
        self._heap.clear()
        self._old.clear()
        self._items.clear()
