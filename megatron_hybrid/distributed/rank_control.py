"""RankControl: decides whose calls count on the ranks of an engine.

Either all ranks make the same calls in the same order, and nothing is sent for them. Or the first
rank leads: it alone makes calls, and sends them to the others, which follow.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch.distributed as dist

from megatron_hybrid.distributed.rank_status import Position
from megatron_hybrid.distributed.ranks import RankError, Ranks
from megatron_hybrid.distributed.watchdog import GRACE_SECONDS, RankFailedError, RankWatch
from megatron_hybrid.utils.interrupts import defer_sigint

LONG_CALLS = 10
"""Factor on the limit of a step for calls that load, save or move much memory."""
_BROKEN = (ConnectionError, EOFError, dist.DistError)
_GLOO = ("gloo", "Connection")
"""Errors of a connection that another rank has left, and words in such errors of gloo."""
_END = "end"


class RankControl:
    """Sends calls of the first rank to the others, and ends the wait for ranks that have failed.

    Args:
        ranks: of the engine; make and close the control on all of them.
        seconds: longest time without progress of a rank in a step.
        on_cpu: whether a thread that computes, and does not wait, takes time of a CPU.
    """

    def __init__(self, ranks: Ranks, seconds: float, on_cpu: bool = True):
        self._ranks, self._seconds, self._on_cpu = ranks, seconds, on_cpu
        self.watch = watch = RankWatch(ranks)
        self._is_alone = ranks.size == 1
        self._queued: list[tuple] | None = None  # calls that the others do not know yet
        self.follows = False
        self.told_change = False
        """Whether the first rank says that its weights have changed."""
        self.close = weakref.finalize(self, watch.close)
        """Leave the other ranks."""

    @property
    def leads(self) -> bool:
        return self._queued is not None

    @property
    def failure(self) -> str | None:
        """The first failure of any rank, or None."""
        return self.watch.failure

    @property
    def has_failed(self) -> bool:
        return self.failure is not None

    @contextmanager
    def inside(self, call: str | None = None) -> Iterator[None]:
        """Make a context for a call that needs the other ranks.

        Args:
            call: its name, or None if it waits for calls, without a time limit.

        Raises:
            RankFailedError: another rank has failed or ended, now or before.
        """
        if self._is_alone:
            yield
            return
        self._check()
        watch, ranks = self.watch, self._ranks
        before = watch.position, ranks.call
        if call is not None and watch.position is None:
            limit = self._seconds * (1 if call == "step()" else LONG_CALLS)
            watch.position, ranks.call = Position(call, limit, self._on_cpu), call
        watch.num_inside += 1
        try:
            yield
        except Exception as error:
            if _is_broken(error):
                self._await_failure()
                self._check(error)
            raise
        finally:
            watch.num_inside -= 1
            watch.position, ranks.call = before
            if not watch.num_inside:
                watch.wake_stopped()

    def _await_failure(self) -> None:
        """Wait for the report of a rank that has ended: its collectives break before it comes."""
        end = time.monotonic() + GRACE_SECONDS
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.01)

    def _check(self, cause: Exception | None = None) -> None:
        if self.failure is not None:
            raise RankFailedError(
                f"{self.failure}: this engine cannot go on; end the job, or make a new engine on "
                "all ranks"
            ) from cause

    def report(self, error: BaseException) -> None:
        """Report to the other ranks that only this one has failed, so that they do not wait for
        it."""
        if self._is_alone:
            return
        if _is_broken(error):
            self._await_failure()
        own = self._ranks.members[self._ranks.rank]
        self.watch.fail(f"{own} has failed with {type(error).__name__}: {error}")

    @property
    def _all_call(self) -> bool:
        """Whether all ranks make the calls of this engine."""
        return not (self._is_alone or self.leads or self.follows)

    def note(self, name: str, values: Mapping[str, object] | None = None) -> None:
        """Note a call that all ranks make, unless one leads. values: those that must be equal, by
        name; see `CallLog.note`."""
        if self._all_call:
            self._ranks.calls.note(name, values or {})

    @contextmanager
    def checked(self, call: str) -> Iterator[None]:
        """Make a context for the check of a call's arguments, which all ranks make, unless one
        leads. If it raises on this rank alone, the others get the error. call: its name."""
        try:
            yield
        except Exception as error:
            if self._all_call and not self.has_failed:
                # Ctrl-C must not leave an exchange that the others are in.
                with (
                    suppress(RankFailedError, OSError, EOFError),
                    defer_sigint(),
                    self.inside(call),
                ):
                    self._ranks.broadcast_error(call, error)
            raise

    def queue(self, method: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Queue a call for the next `send`, by the qualified name of a class's method."""
        self._queued.append((method.__qualname__, args, kwargs))

    def send(self) -> None:
        calls, self._queued = self._queued, []
        self._ranks.send(calls)

    @contextmanager
    def lead(self, state: object, has_work: bool) -> Iterator[None]:
        """Make a context in which the first rank's calls are sent. state: equal on all ranks.
        has_work: whether there are unanswered requests, which is refused."""
        if self._is_alone:
            yield
            return
        with self.inside():
            with self.inside("lead()"):
                self._start("lead", state, has_work)
            self._queued = []
            try:
                yield
            finally:
                if not self.has_failed:  # else another rank may wait for an answer of this one
                    self._queued.append((_END, (), {}))
                    with suppress(OSError, EOFError):  # they are gone
                        self.send()
                        self._ranks.gather(None)  # no rank leaves before all have read it
                self._queued = None

    def calls(self, state: object, has_work: bool) -> Iterator[tuple[str, tuple, dict]]:
        """Yield the first rank's calls, until it ends `lead`. Arguments are those of `lead`."""
        with self.inside():
            with self.inside("follow()"):
                self._start("follow", state, has_work)
            self.follows = True
            try:
                while True:
                    for call in self._ranks.receive():
                        if call[0] == _END:
                            self._ranks.gather(None)
                            return
                        yield call
            finally:
                self.follows = False

    def _start(self, role: str, state: object, has_work: bool) -> None:
        said = self._ranks.gather((role, state))
        roles = [role for role, _ in said]
        if roles != ["lead"] + ["follow"] * (self._ranks.size - 1):
            raise RankError(
                f"the ranks call {roles}: the first one calls lead(), all others call follow()"
            )
        if any(state != said[0][1] for _, state in said):
            raise RankError(
                "the ranks have cached or queued different things, so that they cannot follow the "
                "first one: all of them must have made the same calls before"
            )
        if has_work:
            raise RankError(
                "requests are waiting or running, of which the first rank cannot tell the others: "
                "lead() and follow() begin when all are answered or cancelled"
            )


def _is_broken(error: BaseException) -> bool:
    """Return whether another rank has left a connection of this one."""
    is_gloo = type(error) is RuntimeError and any(word in str(error) for word in _GLOO)
    return is_gloo or isinstance(error, _BROKEN)
