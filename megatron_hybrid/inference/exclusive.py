"""Who may call an engine now: one thread at a time, and only what its state allows."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from megatron_hybrid.utils.fork_guard import ForkGuard

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


class EngineBusyError(RuntimeError):
    """Another call is running in the engine; the refused one has changed nothing."""


class EngineSuspendedError(RuntimeError):
    """The engine is suspended, and the refused call has changed nothing."""


class CallGuard:
    """The lock of an engine and its state. It refuses calls that come at the wrong time."""

    def __init__(self):
        self.lock, self.home = threading.RLock(), ForkGuard()
        self.is_stepping = self.is_suspended = self.is_closed = False
        self.reads_pairs = False
        """Whether `load_weights` runs code of the caller: the iterator of its pairs."""
        self.settle: Callable[[], None] = lambda: None
        """Waits for a step that was launched ahead. Calls that change what it reads call this."""

    def refuse_inside_step(self, name: str) -> None:
        """Raise EngineBusyError inside of a step or of `load_weights`."""
        if self.is_stepping:
            raise EngineBusyError(
                f"{name}() was called inside a step of this engine, by a tokenizer or a hook, and "
                "nothing has changed: call it when step() has returned"
            )
        self.refuse_inside_load(name)

    def refuse_inside_load(self, name: str) -> None:
        """Raise EngineBusyError inside of `load_weights`: the other ranks wait for a pair, and an
        update must stay the one that is under way."""
        if self.reads_pairs:
            raise EngineBusyError(
                f"{name}() was called inside load_weights() of this engine, by what it reads pairs "
                "from, and nothing has changed: call it when load_weights() has returned"
            )

    def refuse_closed(self, name: str) -> None:
        if self.is_closed:
            raise RuntimeError(
                f"{name}() was called on a closed engine, which has given its memory back: make "
                "another one"
            )

    def refuse_suspended(self, name: str) -> None:
        """Raise EngineSuspendedError on a suspended engine, and RuntimeError on a closed one."""
        self.refuse_closed(name)
        if self.is_suspended:
            raise EngineSuspendedError(
                f"{name}() was called while this engine is suspended, and nothing has changed: "
                "call resume() first"
            )


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method of an object with a `_guard`, a `CallGuard`: it raises `EngineBusyError` at
    once while another thread is inside such a method. Calls of one thread may nest. In a fork of
    the engine's process it raises RuntimeError.
    """

    @wraps(method)
    def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        self._guard.home.require("this engine")
        if self._guard.lock._is_owned():  # a call inside a call
            return method(self, *args, **kwargs)
        try:
            if not self._guard.lock.acquire(blocking=False):
                name = method.__name__.lstrip("_")
                raise EngineBusyError(
                    f"{name}() was called while another thread is inside this engine, "
                    "and nothing has changed: let one thread make all calls, or hold a lock around "
                    "each"
                )
            return method(self, *args, **kwargs)
        finally:
            # Ctrl-C takes effect after a call, and the result of `acquire` may be lost. So only the
            # lock itself knows whether it is taken, and this is the first call from there on.
            try:  # noqa: SIM105
                self._guard.lock.release()
            except RuntimeError:  # it is another thread's
                pass

    return guarded
