"""exclusive: allows one thread at a time inside an engine."""

from collections.abc import Callable
from functools import wraps


class EngineBusyError(RuntimeError):
    """Another call is running in the engine; the refused one has changed nothing."""


def exclusive(method: Callable) -> Callable:
    """Decorate a method of an object with `_lock`, a `threading.RLock`, to raise `EngineBusyError`
    at once while another thread is inside such a method. Calls of the same thread may nest."""

    @wraps(method)
    def guarded(self, *args, **kwargs):
        if not self._lock.acquire(blocking=False):
            raise EngineBusyError(
                f"{method.__name__}() was called while another thread is inside this engine, and "
                "nothing has changed: let one thread make all calls, or hold a lock around each"
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self._lock.release()

    return guarded
