"""exclusive: allows one thread at a time inside an engine; errors of calls at the wrong time."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

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
    In a fork of its `_home`, a `ForkGuard`, it raises RuntimeError.
    """

    @wraps(method)
    def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        self._home.require("this engine")
        if self._lock._is_owned():  # a call inside a call
            return method(self, *args, **kwargs)
        try:
            if not self._lock.acquire(blocking=False):
                name = method.__name__.lstrip("_")
                raise EngineBusyError(
                    f"{name}() was called while another thread is inside this engine, "
                    "and nothing has changed: let one thread make all calls, or hold a lock around "
                    "each"
                )
            return method(self, *args, **kwargs)
        finally:
            # Ctrl-C takes effect behind a call, and the result of `acquire` may be lost. So the
            # lock itself tells whether it is taken, and this is the first call from there on.
            try:  # noqa: SIM105
                self._lock.release()
            except RuntimeError:  # it is another thread's
                pass

    return guarded
