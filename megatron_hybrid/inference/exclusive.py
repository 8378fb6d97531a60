"""exclusive: allows one thread at a time inside an engine; errors of calls at the wrong time."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from megatron_hybrid.interrupts import interrupts_wait

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


class EngineBusyError(RuntimeError):
    """Another call is running in the engine; the refused one has changed nothing."""


class EngineSuspendedError(RuntimeError):
    """The engine is suspended, and the refused call has changed nothing."""


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method: it raises `EngineBusyError` at once while another thread is inside such a
    method of the same object, whose `_lock` is a `threading.RLock`. Calls of one thread may nest.
    In a fork of its `_home`, a `HomeProcess`, it raises RuntimeError.
    """

    @wraps(method)
    def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        self._home.require("this engine")
        is_inside = False
        try:
            with interrupts_wait():  # else one might come between the lock and the note of it
                is_inside = self._lock.acquire(blocking=False)
            if not is_inside:
                name = method.__name__.lstrip("_")
                raise EngineBusyError(
                    f"{name}() was called while another thread is inside this engine, "
                    "and nothing has changed: let one thread make all calls, or hold a lock around "
                    "each"
                )
            return method(self, *args, **kwargs)
        finally:
            if is_inside:
                self._lock.release()

    return guarded
