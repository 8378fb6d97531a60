"""When the time at risk of what is watched is counted: as its age doubles, or sooner."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_hybrid.cache.tree import Checkpoint

LEAST_WAIT = 8
"""Requests from one visit to the next, at least."""
SHARE, LEAST_LONGEST = 64, 128
"""And at most: 1 / 64 of as many as are watched, or 128. So one request makes some 64 visits, and a
few for what is young."""
_MOMENTS = 6
"""A wait is rounded up by 1 / 2^6 of itself at most, so that there are few lists."""
AT_ONCE = 2048
"""Visits that are made in one request at most: about two milliseconds."""
_GONE = 64
"""Visits that will not be made, since they were put off or what they go to is forgotten, beyond a
quarter of the others, before they are let go of."""


class Visits:
    """Hands out each checkpoint at ages of about 8, 16, 32, ... requests since its last use.

    So the young, by which new traffic shows, are counted soon, and the old without haste. A round
    over all of them would take the longer the more are known, and nothing would be learnt meanwhile
    of what is new.
    """

    def __init__(self):
        self._due: dict[int, list[Checkpoint]] = {}
        self._num = 0
        self._longest = LEAST_LONGEST

    def add(self, checkpoint: Checkpoint, now: int) -> None:
        """Visit it when its age has doubled or after the longest wait, and not before."""
        wait = min(self._longest, max(LEAST_WAIT, now - checkpoint.last_use))
        bits = max(0, wait.bit_length() - 1 - _MOMENTS)
        self._enter(checkpoint, (((now + wait - 1) >> bits) + 1) << bits)

    def _enter(self, checkpoint: Checkpoint, moment: int) -> None:
        # The list stands for the moment: a number in each checkpoint would take 32 bytes.
        checkpoint.visit = self._due.setdefault(moment, [])
        checkpoint.visit.append(checkpoint)
        self._num += 1

    def due(self, now: int) -> list[Checkpoint]:
        """Those whose visit is at request `now`; each is added again. To be asked at every one."""
        found = []
        waiting = self._due.pop(now, [])
        self._num -= len(waiting)
        for each in waiting:
            if each.edge is None or each.visit is not waiting:
                continue  # forgotten, or put off
            if len(found) < AT_ONCE:
                found.append(each)
                self.add(each, now)
            else:
                self._enter(each, now + 1)
        return found

    def adapt(self, num_watched: int) -> None:
        """Now and then: so many are watched. What is not any more is let go of."""
        self._longest = max(LEAST_LONGEST, num_watched // SHARE)
        if self._num <= 5 * num_watched // 4 + _GONE:
            return
        for waiting in self._due.values():
            waiting[:] = [
                each for each in waiting if each.edge is not None and each.visit is waiting
            ]
        self._num = sum(map(len, self._due.values()))

    def check_integrity(self, watched: Iterable[Checkpoint]) -> None:
        """Raises RuntimeError unless each of these has a visit to come, and nothing else has."""
        coming = {
            id(each)
            for waiting in self._due.values()
            for each in waiting
            if each.edge is not None and each.visit is waiting
        }
        if coming != set(map(id, watched)):
            raise RuntimeError("a checkpoint has no visit to come, or is not in the tree")
