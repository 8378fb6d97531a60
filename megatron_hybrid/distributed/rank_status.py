"""Reports where a rank is in a call, and which ranks keep the others waiting."""

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import torch.distributed as dist

from megatron_hybrid.distributed import ranks, rendezvous
from megatron_hybrid.distributed.rendezvous import LINE_SECONDS, REPEAT_SECONDS, Member
from megatron_hybrid.utils import interrupts

_EXCHANGES = (os.path.dirname(dist.__file__), ranks.__file__, rendezvous.__file__)
"""Code in which a thread waits for other ranks."""
_WITHIN = (*_EXCHANGES, interrupts.__file__, sysconfig.get_path("stdlib"))
"""Code that a call is not reported to be in, as it only runs what the call does."""

_COMPUTING = 0.1
"""Least part of a CPU that a thread takes which does not wait."""


@dataclass(frozen=True)
class Status:
    """What a rank does, as it reports it to the others."""

    call: str | None = None
    """The call of the engine that it is in, or None."""
    place: str = ""
    """File, line and function."""
    waits: bool = False
    """Whether it is in an exchange or a collective, which other ranks are to enter."""
    still: float = 0.0
    """Seconds for which it has not moved from there."""
    limit: float = float("inf")
    """Seconds after which this is a failure."""
    is_silent: bool = False
    """Whether it has reported nothing lately."""

    def __str__(self) -> str:
        if self.is_silent:
            return "which tells nothing"
        if self.call is None:
            return "in its own code, in no call of the engine"
        return f"{self.call} at {self.place}"


class Position:
    """Follows this thread through a call, from another one.

    Args:
        call: its name.
        limit: see `Status`.
        on_cpu: whether a thread that computes does not wait. With a GPU, a waiting thread spins, so
            its time of the CPU shows nothing.
    """

    def __init__(self, call: str, limit: float, on_cpu: bool):
        self._call, self._limit, self._on_cpu = call, limit, on_cpu
        self._thread = threading.get_ident()
        self._mark: tuple[int, int] | None = None
        self._still = self._computed = 0.0

    def status(self, passed: float) -> Status:
        """Return where the thread is. passed: seconds since the last call of this."""
        place, mark, waits = _look(sys._current_frames().get(self._thread))
        moves = mark is None or mark != self._mark
        if self._on_cpu:
            computed = time.clock_gettime(time.pthread_getcpuclockid(self._thread))
            moves = moves or computed - self._computed > _COMPUTING * passed
            self._computed = computed
        self._still = 0.0 if moves else self._still + passed
        self._mark = mark
        return Status(self._call, place, waits, self._still, self._limit)


def _look(frame: FrameType | None) -> tuple[str, tuple[int, int] | None, bool]:
    """Return where a thread is, a mark that changes when it moves, and whether it waits."""
    waits = False
    while frame is not None and frame.f_code.co_filename.startswith(_WITHIN):
        waits = waits or frame.f_code.co_filename.startswith(_EXCHANGES)
        frame = frame.f_back
    if frame is None:
        return "its end", None, waits
    code = frame.f_code
    name = "/".join(code.co_filename.split("/")[-2:])
    return f"{name}:{frame.f_lineno} in {code.co_name}", (id(frame), frame.f_lasti), waits


class StallDetector:
    """Finds stalls in the statuses of all ranks, on the first rank."""

    def __init__(self, members: Sequence[Member]):
        self._members = members
        self._line = LINE_SECONDS

    def look(self, statuses: Mapping[int, Status]) -> tuple[str | None, str | None]:
        """Return a line for the log, and a failure, each or None.

        Args:
            statuses: of all ranks, by rank.
        """
        waiting = {rank: s for rank, s in statuses.items() if s.call is not None and s.waits}
        others = {rank: s for rank, s in statuses.items() if rank not in waiting}
        longest = max((s.still for s in waiting.values()), default=0.0)
        line = None
        if longest < LINE_SECONDS:
            self._line = LINE_SECONDS
        elif longest >= self._line:
            self._line = longest + REPEAT_SECONDS
            rank, status = max(waiting.items(), key=lambda item: item[1].still)
            whom = self._listed(others) or f"other ranks, which all wait: {self._listed(waiting)}"
            line = f"{self._members[rank]} has waited {longest:.0f} s in {status} for {whom}"
        stuck = {rank: s for rank, s in others.items() if s.still >= s.limit}
        if not others and all(s.still >= s.limit for s in waiting.values()):
            stuck = waiting
        if not stuck:
            return line, None
        seconds = min(s.still for s in stuck.values())
        return line, (
            f"no answer for {seconds:.0f} s from {self._listed(stuck)} "
            "(InferenceConfig.rank_timeout is the limit)"
        )

    def _listed(self, statuses: Mapping[int, Status]) -> str:
        return ", ".join(f"{self._members[r]} ({s})" for r, s in sorted(statuses.items()))
