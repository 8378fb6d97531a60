"""Calls of an engine over several ranks: all of them make the same ones, or the first one leads and
the others follow."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from megatron_hybrid.inference.engine_parts import EngineParts
from megatron_hybrid.inference.exclusive import exclusive
from megatron_hybrid.inference.live_requests import LiveRequests
from megatron_hybrid.inference.scheduling.scheduler import RestoreFailedError
from megatron_hybrid.utils.interrupts import defer_sigint

logger = logging.getLogger(__name__)
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def on_all_ranks(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method that all ranks run, of an object with the `_guard`, `_ranks`, `_control`
    and `_live` of the engine. A leading rank sends the call to the others, and if it raises on one
    rank, it raises on all. Only one thread at a time is inside of it, as with `exclusive`."""

    @exclusive
    @wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._ranks.size == 1:
            self._guard.settle()
            return method(self, *args, **kwargs)
        # Ctrl-C on one rank must not leave an exchange that the others are in.
        name = f"{method.__name__}()"
        with defer_sigint(), self._control.inside(name):
            self._control.note(name)
            if self._control.leads:
                self._live.call_followers(method, *args, **kwargs)
            with self._ranks.raise_on_all(name):
                self._guard.settle()
                return method(self, *args, **kwargs)

    call.is_on_all_ranks = True
    return call


class RankCalls:
    """Leads the other ranks of an engine, or follows the first one, as the engine's methods do.

    Args:
        parts, live: of the engine.
        others: further objects whose methods the first rank calls on all ranks.
    """

    def __init__(self, parts: EngineParts, live: LiveRequests, *others: object):
        self._parts, self._live = parts, live
        self._guard, self._control, self._ranks = parts.guard, parts.control, parts.ranks
        self._objects = {type(each).__name__: each for each in (live, *others)}

    @contextmanager
    def lead(self) -> Iterator[None]:
        self._guard.home.require("this engine")
        if not self._ranks.is_first:
            raise RuntimeError(
                f"lead() was called on rank {self._ranks.rank} of the model: call follow() there"
            )
        with self._control.lead(self._state(), self._live.has_unanswered):
            try:
                yield
            finally:
                if self._live.abandoned and self._control.leads and not self._control.has_failed:
                    self._live.call_followers()

    @exclusive
    def follow(self) -> None:
        if self._ranks.is_first:
            raise RuntimeError("follow() was called on the first rank of the model: call lead()")
        for name, args, kwargs in self._control.calls(self._state(), self._live.has_unanswered):
            owner, _, method = name.partition(".")
            call = getattr(self._objects[owner], method)
            try:
                call(*args, **kwargs)
            except Exception as error:
                is_everywhere = isinstance(error, RestoreFailedError) or getattr(
                    call, "is_on_all_ranks", False
                )
                if self._control.has_failed or not is_everywhere:
                    self._control.report(error)
                    raise
                logger.info("%s() raised on all ranks: %s", method, error)

    def _state(self) -> tuple:
        """Return what ranks must have in common to go on together."""
        scheduler = self._parts.scheduler
        waiting, running = (
            [request.request_id for request in requests]
            for requests in (scheduler.waiting, scheduler.running)
        )
        next_id = self._parts.request_builder.next_id
        return waiting, running, next_id, self._parts.cache.digest(), self._guard.is_suspended
