"""When the time at risk of what is watched is counted: at ages of 8, 16, 32, ... requests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from megatron_hybrid.cache.index.tree import Checkpoint

FIRST_AGE = 8
"""Requests from the last use of a checkpoint to the first visit; the next ones come as its age
doubles."""
_COMPACTED_GROUPS = 2048
"""Groups (checkpoints of one last use) that one call of `compact` looks at."""
_MAX_STALE = 64
"""Stale entries (of checkpoints that were used again since, or are forgotten) beyond a quarter of
the others, from which on they are dropped."""


class ExposureClock:
    """Hands out each checkpoint whenever the number of requests since its last use has doubled.

    So the young, by which new traffic shows, are counted soon, and the old without haste. A round
    over all of them would take the longer the more are known, and nothing would be learnt meanwhile
    of what is new.
    """

    def __init__(self):
        self._used_at: dict[int, list[Checkpoint]] = {}  # by their last use
        self._num = 0

    def add(self, checkpoint: Checkpoint) -> None:
        """It is new, or was used just now."""
        self._used_at.setdefault(checkpoint.last_use, []).append(checkpoint)
        self._num += 1

    def due(self, now: int) -> list[tuple[int, list[Checkpoint]]]:
        """Ages, and those that are of this age at request `now`."""
        found, age = [], FIRST_AGE
        while age <= now:
            if now - age in self._used_at:
                found.append((age, self._all_of(now - age)))
            age *= 2
        return found

    def compact(self, num_watched: int) -> None:
        """Now and then: so many are watched. What is not any more, and what was used since, goes
        where it is too much, a part at a time."""
        if self._num <= 5 * num_watched // 4 + _MAX_STALE:
            return
        for last_use in list(islice(self._used_at, _COMPACTED_GROUPS)):
            kept = self._all_of(last_use)
            self._num += len(kept) - len(self._used_at.pop(last_use))
            if kept:
                self._used_at[last_use] = kept  # behind those that are yet to be looked at

    def check_integrity(self, watched: Iterable[Checkpoint]) -> None:
        """Raises RuntimeError unless these are the ones that will be visited."""
        coming = {id(each) for last_use in self._used_at for each in self._all_of(last_use)}
        if coming != set(map(id, watched)):
            raise RuntimeError("a checkpoint has no visit to come, or is not in the tree")

    def _all_of(self, last_use: int) -> list[Checkpoint]:
        """Those that were last used then. Others that are listed there were used since, or their
        tokens are forgotten."""
        return [
            each
            for each in self._used_at[last_use]
            if each.last_use == last_use and each.edge is not None
        ]
