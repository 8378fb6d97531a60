"""Journal: what has changed since a version, without a look at the rest."""

from collections import deque
from itertools import takewhile
from typing import Generic, TypeVar

MAX_REMOVED = 10_000
"""Removed items that are told of; who lacks more begins anew."""
T = TypeVar("T")


class Journal(Generic[T]):
    """Items by their last change, and the numbers of those that were removed."""

    def __init__(self) -> None:
        self._changed: dict[T, int] = {}  # at which version, ascending
        self._removed: deque[tuple[int, int]] = deque()  # the version and the number, ascending
        self._oldest = 0  # version that is known
        self.version = 0
        """Number of events so far."""

    def __len__(self) -> int:
        return len(self._changed)

    def __contains__(self, item: T) -> bool:
        return item in self._changed

    def note(self, item: T) -> None:
        """An item is new or has changed."""
        self.version += 1
        self._changed.pop(item, None)
        self._changed[item] = self.version

    def remove(self, item: T, number: int) -> None:
        """An item is gone; who has it knows it by its number."""
        self.version += 1
        self._changed.pop(item, None)
        self._removed.append((self.version, number))
        if len(self._removed) > MAX_REMOVED:
            self._oldest, _ = self._removed.popleft()

    def clear(self) -> None:
        """All items are gone: no earlier version is known any more."""
        self.version += 1
        self._oldest = self.version
        self._changed.clear()
        self._removed.clear()

    def knows(self, version: int) -> bool:
        return self._oldest <= version <= self.version

    def since(self, version: int | None, limit: int | None) -> tuple[list[T], list[int], int]:
        """Items that have changed since a version that it knows (None: all that there are), those
        of the longest ago first; the numbers of removed ones; and the version up to which that is.

        limit: most items; None: any number. The version is the present if there are fewer; else
        the next call may tell of removed items again.
        """
        seen, removed = version or 0, []
        if version is not None:
            later = takewhile(lambda each: each[0] > seen, reversed(self._removed))
            removed = [number for _, number in later]
        later = takewhile(lambda each: each[1] > seen, reversed(self._changed.items()))
        changed, until = list(later)[::-1], self.version
        if limit is not None and len(changed) > limit:
            changed = changed[:limit]
            until = changed[-1][1]
        return [item for item, _ in changed], removed[::-1], until
