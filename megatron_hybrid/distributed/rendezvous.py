"""Exchanges between processes of a job that may fail to come.

A collective waits silently for a rank that never calls it. A meeting is held over the store of
torch.distributed: it says whom it waits for, ends in time, and reports the error of a rank that
cannot come.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")
logger = logging.getLogger(__name__)
LINE_SECONDS = 10.0
"""Longest wait for another rank without a line in the log."""
REPEAT_SECONDS = 60.0
"""Time between further lines about the same wait."""
BEGIN_SECONDS = 30.0
"""Time for other ranks to begin to make an engine."""
COLLECTIVE_SECONDS = 1800.0
"""Time for other ranks that may have to load something before; it is gloo's own limit."""
JOIN_SECONDS = 300.0
"""Time for all ranks to join the job; it is that of torch's store, too."""
STOPPED_SECONDS = 20.0
"""Time for which another rank's process may be stopped (SIGSTOP)."""
LEAVE_SECONDS = 5.0
"""Time to leave a call of torch by its own error after another rank has ended."""
_ANSWER_SECONDS = 5.0
_READ_SECONDS = 0.2
"""Time for waiting ranks to read why another one does not come."""
_PREFIX = "megatron_hybrid"


class RankError(RuntimeError):
    """A rank failed, or made another call than the others; the error is raised on all ranks.
    The message names this rank, its host, and its error or the difference of the calls."""


@dataclass(frozen=True)
class Member:
    """A process of a job."""

    rank: int
    """Rank in the whole job."""
    host: str
    pid: int
    namespace: str = ""
    """Namespace of the process id; processes in the same namespace see each other."""

    def is_beside(self, other: Member) -> bool:
        """Return whether both processes see each other by their ids."""
        return bool(self.namespace) and (self.host, self.namespace) == (other.host, other.namespace)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def own_member() -> Member:
    rank = dist.get_rank() if _is_job() else 0
    return Member(rank, socket.gethostname(), os.getpid(), _namespace())


@cache
def _namespace() -> str:
    """Return the namespace of this process and its forks, or "" without /proc."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def has_ended(member: Member) -> bool:
    """Return whether a process is known to have ended. On other machines nothing is known."""
    return _state_of(member) in ("Z", "X")


def _state_of(member: Member) -> str:
    """Return the state of a process, by its letter in /proc, or "" if nothing is known."""
    if not own_member().is_beside(member):
        return ""
    try:
        return Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"
    except OSError:
        return ""


def exchange(
    what: str, value: T, ranks: Sequence[int], seconds: float = COLLECTIVE_SECONDS
) -> list[tuple[Member, T]]:
    """Exchange picklable values between some ranks of the job, and return them in rank order. All
    of these ranks call it, in the same order of meetings. The first one collects, and logs whom it
    waits for.

    Args:
        what: the call, for messages; the same on all ranks.
        ranks: of the job, in rising order, this one among them.
        seconds: time for all to come.

    Raises:
        RankError: a rank does not come, comes for something else, or has reported that it cannot
            come (`announce_failure`). All ranks that have come raise it."""
    if len(ranks) == 1:
        return [(own_member(), value)]
    announce()
    return _Exchange(what, ranks, _store(), own_member()).hold(value, seconds)


def join(store: dist.Store, rank: int, size: int) -> list[Member]:
    """Meet all ranks of the job before torch connects them, which waits silently, and return their
    processes. From here on the others notice if this process ends.

    Args:
        store: of the job, before it has process groups.
        rank, size: of this process, and of the job.

    Raises:
        RankError: some ranks do not come in `JOIN_SECONDS`, or have ended.
    """
    own = replace(own_member(), rank=rank)
    _announce(store, own)
    met = _Exchange("joining the job", range(size), store, own).hold(None, JOIN_SECONDS)
    return [member for member, _ in met]


def announce() -> None:
    """Announce to the job where this process runs, and at its end that it has ended."""
    if _is_job():
        _announce(_store(), own_member())
        atexit.unregister(_tell_end)
        atexit.register(_tell_end, os.getpid())


def _announce(store: dist.Store, own: Member) -> None:
    store.set(_key("hosts", own.rank), pickle.dumps(own))


def _tell_end(pid: int) -> None:
    """Announce the end to ranks on other machines, which do not see the process."""
    if _is_job() and os.getpid() == pid:
        with suppress(RuntimeError):  # the store has ended before
            _store().set(_key("ended", own_member().rank), "")


@contextmanager
def ends_with(members: Sequence[Member], what: str) -> Iterator[None]:
    """Make a context for a call of torch that waits silently for other ranks. If one of them ends,
    and the call does not, this process ends with status 1. what: the call, for the message."""
    over, own = threading.Event(), own_member()

    def watch() -> None:
        while not over.wait(1.0):
            gone = next((each for each in members if has_ended(each)), None)
            if gone is not None and not over.wait(LEAVE_SECONDS):
                text = f"{gone} (process {gone.pid}) has ended, for which {own} waits: {what}"
                sys.stderr.write(f"megatron_hybrid: this process ends, as {text}\n")
                sys.stderr.flush()
                os._exit(1)

    thread = threading.Thread(target=watch, name="ends-with", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def announce_failure(what: str) -> Iterator[None]:
    """Make a context for a call that has meetings. If this rank raises before or between them, the
    others raise RankError there."""
    if not _is_job():
        yield
        return
    store, own = _store(), own_member()
    announce()
    key, number = _key("failures", own.rank), store.add(_key("attempts", own.rank), 1)
    before = _attempt.set(number)
    # It is not deleted: others may read it now, and a store waits for a key that is gone.
    store.set(key, pickle.dumps((number, None)))
    try:
        yield
    except Exception as error:
        if not isinstance(error, RankError):
            text = f"{what} failed on {own}: {type(error).__name__}: {error}"
            store.set(key, pickle.dumps((number, text)))
            time.sleep(_READ_SECONDS)  # this process may have the store, and end with the error
        raise
    finally:
        _attempt.reset(before)


_attempt: ContextVar[int] = ContextVar("attempt", default=0)
"""Number of the `announce_failure` that this process is in, or 0. All ranks count alike."""


class _Exchange:
    def __init__(self, what: str, ranks: Sequence[int], store: dist.Store, own: Member):
        self._what, self._ranks = what, list(ranks)
        self._store, self._own = store, own
        self._members: dict[int, Member] = {}  # by rank, those that are known
        self._stopped: dict[int, float] = {}  # time of the first look, by rank
        where = f"{_PREFIX}/{'.'.join(map(str, self._ranks))}"
        self._where = ""
        # Skip meetings that the others have ended without this rank.
        while not self._where or self._store.check([self._key("ended")]):
            number = self._store.add(f"{where}/count/{self._own.rank}", 1)
            self._where = f"{where}/{number}"
        # A rank that came to the last meeting had left the one before.
        for name in (self._own.rank, "answer"):
            with suppress(RuntimeError):
                self._store.delete_key(f"{where}/{number - 2}/{name}")

    def _key(self, name: int | str) -> str:
        return f"{self._where}/{name}"

    def hold(self, value: T, seconds: float) -> list[tuple[Member, T]]:
        own = pickle.dumps((self._own, self._what, value))
        self._store.set(self._key(self._own.rank), own)
        first = self._ranks[0]
        try:
            if self._own.rank == first:
                answer = self._collect(seconds)
                self._store.set(self._key("answer"), pickle.dumps(answer))
            else:
                self._await([first], seconds)
                self._await(["answer"], seconds + _ANSWER_SECONDS)
                answer = pickle.loads(self._store.get(self._key("answer")))
        except RankError as error:
            self._store.set(self._key("ended"), pickle.dumps(error))
            raise
        except dist.DistError as error:
            raise RankError(
                f"{self._own} is {self._what}, and the job's store, which rank 0 or the launcher "
                f"has, is gone: {error}"
            ) from error
        return answer

    def _collect(self, seconds: float) -> list:
        self._await(self._ranks, seconds)
        came = [pickle.loads(self._store.get(self._key(rank))) for rank in self._ranks]
        for member, what, _ in came:
            if what != self._what:
                raise RankError(
                    f"the ranks have made different calls: {self._own} is {self._what}, {member} "
                    f"is {what}; call the same on all ranks of a model"
                )
        return [(member, value) for member, _, value in came]

    def _await(self, keys: Sequence[int | str], seconds: float) -> None:
        """Wait for entries of the meeting. Errors and log lines name the missing ranks."""
        began = time.monotonic()
        line, pause = LINE_SECONDS, 0.001
        missing = list(keys)
        while True:
            if self._store.check([self._key("ended")]):
                raise pickle.loads(self._store.get(self._key("ended")))
            # Look at all ranks: the first one, which a late one waits for, may have left. And look
            # before the keys: a rank that fails after the meeting does not change it.
            failure = next(filter(None, map(self._failure_of, self._ranks)), None)
            missing = [key for key in missing if not self._store.check([self._key(key)])]
            if not missing:
                return
            if failure is not None:
                raise RankError(failure)
            # Ranks that wait for the answer wait for the first one, which collects.
            ranks = [key for key in missing if isinstance(key, int)] or self._ranks[:1]
            gone = self._gone(ranks)
            # It may have come before it ended.
            if gone is not None and not self._store.check([self._key(key) for key in missing]):
                raise RankError(f"{gone}, for which {self._own} waits: {self._what}")
            waited = time.monotonic() - began
            names = ", ".join(str(self._member(rank) or f"rank {rank}") for rank in ranks)
            if waited >= seconds:
                raise RankError(
                    f"{self._own} is {self._what}, and {names} did not come to it within "
                    f"{seconds:.0f} s: make this call on all ranks of the model, at about the same "
                    "time, for example after torch.distributed.barrier()"
                )
            if waited >= line:
                line += REPEAT_SECONDS
                if keys != ["answer"]:  # the rank that collects logs it
                    logger.warning(
                        "%s has waited for %s for %.0f s: %s", self._own, names, waited, self._what
                    )
            time.sleep(pause)
            pause = min(0.05, 2 * pause)

    def _gone(self, ranks: Sequence[int]) -> str | None:
        """Return which of these ranks has ended, or is stopped for long, if any is known to."""
        for rank in ranks:
            if (member := self._member(rank)) is None:
                continue
            state = _state_of(member)
            if state != "T":
                self._stopped.pop(rank, None)
            elif time.monotonic() - self._stopped.setdefault(rank, time.monotonic()) < (
                STOPPED_SECONDS
            ):
                continue
            if state in ("Z", "X", "T") or self._store.check([_key("ended", rank)]):
                how = f"is stopped for {STOPPED_SECONDS:.0f} s" if state == "T" else "has ended"
                return f"{member} (process {member.pid}) {how}"
        return None

    def _failure_of(self, rank: int) -> str | None:
        """Return why a rank does not come, or None if nothing is known."""
        key = _key("failures", rank)
        if not _attempt.get() or not self._store.check([key]):
            return None
        attempt, text = pickle.loads(self._store.get(key))
        return text if attempt == _attempt.get() else None

    def _member(self, rank: int) -> Member | None:
        """Return the process of a rank of the job, if it has announced itself."""
        key = _key("hosts", rank)
        if rank not in self._members and self._store.check([key]):
            self._members[rank] = pickle.loads(self._store.get(key))
        return self._members.get(rank)


def first_difference(named: Sequence[tuple[Member, Mapping[str, object]]]) -> str | None:
    """Return a message with the first name under which two processes have different values, and the
    values, or None. A process may lack some names."""
    for name in dict.fromkeys(name for _, each in named for name in each):
        values = [(member, each[name]) for member, each in named if name in each]
        if any(value != values[0][1] for _, value in values):
            listed = ", ".join(f"{member} has {value!r}" for member, value in values)
            return f"{name} differs between ranks: {listed}; make it equal"
    return None


def _is_job() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _key(kind: str, rank: int) -> str:
    """Return the key of the store for a fact about a rank."""
    return f"{_PREFIX}/{kind}/{rank}"
