"""TailDistances: how far before the end of a prompt its successors leave it."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

_WINDOW = 256
"""Observed distances that are remembered."""
_PRIOR_DISTANCES = (0, 32, 128, 512)
"""Prior distances, a quarter of an observation each."""


class TailDistances:
    """Histogram of the distances before the end of a prompt at which successors leave it; 0: they
    continue from the end.

    Where a different question follows a document each time, a state at the very end serves no other
    prompt; one at the usual distance before the end serves most.
    """

    def __init__(self):
        self._recent: deque[int] = deque()
        self._counts: dict[int, float] = dict.fromkeys(_PRIOR_DISTANCES, 0.25)
        self._distances: list[int] = sorted(_PRIOR_DISTANCES)  # the keys of _counts

    @property
    def known(self) -> bool:
        """Whether a distance was observed."""
        return bool(self._recent)

    def observe(self, distance: int) -> None:
        """A prompt left another one `distance` tokens before the end of that one."""
        self._recent.append(distance)
        self._count(distance, 1)
        if len(self._recent) > _WINDOW:
            self._count(self._recent.popleft(), -1)

    def _count(self, distance: int, more: int) -> None:
        if distance not in self._counts:
            self._counts[distance] = 0.0
            insort(self._distances, distance)
        self._counts[distance] += more
        if not self._counts[distance]:
            del self._counts[distance]
            self._distances.remove(distance)

    def weights(self) -> Iterator[tuple[int, float]]:
        """(distance, share of the prompts that part at it or later), ascending distances."""
        total = len(self._recent) + 0.25 * len(_PRIOR_DISTANCES)
        share = 0.0
        for distance in self._distances:
            share += self._counts[distance] / total
            yield distance, share
