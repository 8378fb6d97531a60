"""RankControl: whose calls count on the ranks of an engine.

Either all ranks make the same calls in the same order, and nothing is sent for it. Or the first
rank leads: it alone makes calls, and tells them to the others, which follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from megatron_hybrid.distributed.ranks import RankError, Ranks
from megatron_hybrid.distributed.watchdog import RankFailedError, RankWatch
from megatron_hybrid.utils.interrupts import defer_sigint

_END = "end"


class RankControl:
    """Tells calls of the first rank to the others.

    Args:
        ranks: of the engine; make and close it on all of them.
        seconds, on_cpu: as for `RankWatch`.
    """

    def __init__(self, ranks: Ranks, seconds: float, on_cpu: bool):
        self._ranks = ranks
        self._watch = RankWatch(ranks, seconds, on_cpu) if ranks.size > 1 else None
        self._queued: list[tuple] | None = None  # calls that the others do not know yet
        self.follows = False
        self.told_change = False
        """Whether the first rank says that its weights have changed."""
        self._ends_waits = False

    @property
    def leads(self) -> bool:
        """Whether other ranks follow this one."""
        return self._queued is not None

    @property
    def failure(self) -> str | None:
        """The first failure of any rank; None: there is none."""
        return None if self._watch is None else self._watch.failure

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed or ended."""
        return self.failure is not None

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other ranks, the model's own collectives left out."""
        return self._ranks.sent_bytes

    def inside(self, call: str | None = None) -> AbstractContextManager[None]:
        """Context of a call that needs the other ranks; see `RankWatch.inside`."""
        return self._watch.inside(call) if self._watch else nullcontext()

    @property
    def _all_call(self) -> bool:
        """Whether all ranks make the calls of this engine."""
        return self._watch is not None and not (self.leads or self.follows)

    def note(self, name: str, values: Mapping[str, object] | None = None) -> None:
        """Note a call that all ranks make, unless one leads. values: that must be equal, by name;
        see `CallLog.note`."""
        if self._all_call:
            self._ranks.calls.note(name, values or {})

    @contextmanager
    def checked(self, call: str) -> Iterator[None]:
        """Context of the check of a call's arguments, which all ranks make, unless one leads: if it
        raises on this rank alone, the others learn why. call: its name."""
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

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed, and they have not."""
        if self._watch:
            self._watch.report(error)

    @property
    def ends_waits(self) -> bool:
        """Whether no rank is to wait for processes outside of the job any more."""
        return self._ends_waits if self._watch is None else self._watch.ends_waits

    def end_waits(self) -> None:
        """Say so to all ranks. Any thread may call it."""
        self._ends_waits = True
        if self._watch:
            self._watch.end_waits()

    def queue(self, method: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Tell a call with the next `send`. method: of a class, whose name and its own go along."""
        self._queued.append((method.__qualname__, args, kwargs))

    def send(self) -> None:
        """Send the queued calls in one message."""
        calls, self._queued = self._queued, []
        self._ranks.send(calls)

    @contextmanager
    def lead(self, state: object, has_work: bool) -> Iterator[None]:
        """Context in which the first rank's calls are told. state: equal on all ranks. has_work:
        whether there are unanswered requests, which is refused."""
        if self._watch is None:
            yield
            return
        with self._watch.inside():
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
        """The first rank's calls, until it ends `lead`. Arguments as for `lead`."""
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

    def close(self) -> None:
        """Leave the other ranks."""
        if self._watch:
            self._watch.close()
