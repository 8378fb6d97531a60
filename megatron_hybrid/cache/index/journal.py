"""Journal: lists what has changed since a version, without a look at the rest."""

from collections import deque
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

MAX_REMOVED = 10_000
"""Most removed items that are remembered; a reader that has missed more begins anew."""
T = TypeVar("T")


class Version(NamedTuple):
    """A point of time."""

    changed: int
    removed: int


class Journal(Generic[T]):
    """Items by their last change, and the numbers of those that were removed."""

    def __init__(self) -> None:
        self._changed: dict[T, int] = {}  # ascending
        self._removed: deque[int] = deque(maxlen=MAX_REMOVED)
        self._num_changes = self._num_removed = 0

    @property
    def version(self) -> Version:
        """Number of the latest event."""
        return Version(self._num_changes, self._num_removed)

    def __len__(self) -> int:
        return len(self._changed)

    def __contains__(self, item: T) -> bool:
        return item in self._changed

    def note(self, item: T) -> None:
        """Note that an item is new or has changed."""
        self._num_changes += 1
        self._changed.pop(item, None)
        self._changed[item] = self._num_changes

    def remove(self, item: T, number: int) -> None:
        """Note that an item is gone. Readers know it by its number."""
        self._changed.pop(item, None)
        self._num_removed += 1
        self._removed.append(number)

    def clear(self) -> None:
        """Forget all items, so that no earlier version is known any more."""
        self._changed.clear()
        self._removed.clear()
        self._num_removed += 1

    def knows(self, version: Version) -> bool:
        return (
            0 <= version.changed <= self._num_changes
            and 0 <= self._num_removed - version.removed <= len(self._removed)
        )

    def since(
        self, version: Version | None, limit: int | None
    ) -> tuple[list[T], list[int], Version]:
        """Return the items that have changed since a known version (by default all items), the
        earliest changes first; the numbers of removed items; and the version that this leads to.

        limit: most items, by default any number. The version is the present one if all fit.
        """
        seen, num_removed = version or Version(0, self._num_removed)
        changed = []
        for item, at in reversed(self._changed.items()):
            if at <= seen:
                break
            changed.append((item, at))
        changed.reverse()
        until = self._num_changes
        if limit is not None and len(changed) > limit:
            changed = changed[:limit]
            until = changed[-1][1]
        first = len(self._removed) - (self._num_removed - num_removed)
        removed = list(islice(self._removed, first, None))
        return [item for item, _ in changed], removed, Version(until, self._num_removed)
