"""ExposureClock: when to count the exposure of a checkpoint: at ages of 8, 16, 32, ... requests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from megatron_hybrid.cache.index.tree import Checkpoint

FIRST_AGE = 8
"""Age, in requests since its last use, at which a checkpoint is first due; then whenever its age
has doubled."""
_COMPACTED_GROUPS = 2048
"""Groups (checkpoints with one last use) that one call of `compact` checks."""
_MAX_STALE = 64
"""Stale entries (of checkpoints that were used again, or are forgotten), beyond a quarter of the
valid ones, that are kept."""


class ExposureClock:
    """Returns each checkpoint whenever the number of requests since its last use has doubled.

    So the exposure of young checkpoints, which show new traffic, is counted soon. Sweeps over all
    checkpoints would delay it the more, the more are watched.
    """

    def __init__(self):
        self._used_at: dict[int, list[Checkpoint]] = {}  # by their last use
        self._num = 0

    def add(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is new, or was used just now."""
        self._used_at.setdefault(checkpoint.last_use, []).append(checkpoint)
        self._num += 1

    def due(self, now: int) -> list[tuple[int, list[Checkpoint]]]:
        """Ages, each with the checkpoints that have this age at request `now`."""
        found, age = [], FIRST_AGE
        while age <= now:
            if now - age in self._used_at:
                found.append((age, self._all_of(now - age)))
            age *= 2
        return found

    def compact(self, num_watched: int) -> None:
        """Drop stale entries, a part at a time, where there are too many. num_watched: number of
        watched checkpoints."""
        if self._num <= 5 * num_watched // 4 + _MAX_STALE:
            return
        for last_use in list(islice(self._used_at, _COMPACTED_GROUPS)):
            kept = self._all_of(last_use)
            self._num += len(kept) - len(self._used_at.pop(last_use))
            if kept:
                self._used_at[last_use] = kept  # behind the groups not checked yet

    def check_integrity(self, watched: Iterable[Checkpoint]) -> None:
        """Raises RuntimeError unless exactly these checkpoints will be due again."""
        coming = {id(each) for last_use in self._used_at for each in self._all_of(last_use)}
        if coming != set(map(id, watched)):
            raise RuntimeError("a checkpoint has no visit to come, or is not in the tree")

    def _all_of(self, last_use: int) -> list[Checkpoint]:
        """The valid entries of a group: the others were used since, or are forgotten."""
        return [
            each
            for each in self._used_at[last_use]
            if each.last_use == last_use and each.edge is not None
        ]
