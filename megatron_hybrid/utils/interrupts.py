"""defer_sigint: defers Ctrl-C to the end of a change of the engine. poll_until and result_of:
wait for a thread so that Ctrl-C may end the wait.

Python's `Condition`, `Event`, `Future` and `Thread.join` are themselves written in Python: an
interrupt inside of them may leave a lock taken that other threads then wait for. So the main thread
uses them inside `defer_sigint` only. A `with` of a `Lock`, a `deque` and a `SimpleQueue` are safe
anywhere, as they are written in C.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from typing import TypeVar

R = TypeVar("R")
_POLL_SECONDS = 0.001
_signal = import_module("_signal")
"""The module that `signal` wraps with enumerations, which would take a hundredth of a small model's
step."""


class _Waiting:
    """A signal handler that defers the first interrupt and passes on the others."""

    def __init__(self, handler: Callable):
        self.handler = handler
        self.first: tuple | None = None

    def __call__(self, *arguments) -> None:
        if self.first is not None:
            self.handler(*arguments)
        self.first = self.first or arguments

    def let_in(self) -> None:
        """Raise the deferred interrupt, if there is one."""
        first, self.first = self.first, None
        if first is not None:
            self.handler(*first)


def _nothing() -> None:
    pass


@contextmanager
def defer_sigint() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C to the end of the block: inside, it could leave pages counted twice or never
    released. A second one takes effect at once, to leave a block that hangs.

    Yield a function to call where nothing is half done, at which a deferred Ctrl-C takes effect.
    Of nested blocks the outermost counts; in the inner ones the function does nothing.

    Only the main thread gets signals; a handler that is not Python's stays as it is.
    """
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = _signal.getsignal(signal.SIGINT)
    if not callable(handler) or isinstance(handler, _Waiting):  # SIG_IGN, SIG_DFL: not callable
        yield _nothing
        return
    waiting = _Waiting(handler)
    _signal.signal(signal.SIGINT, waiting)
    try:
        yield waiting.let_in
    finally:
        if _signal.getsignal(signal.SIGINT) is waiting:  # no other handler was set meanwhile
            _signal.signal(signal.SIGINT, handler)
        waiting.let_in()


def poll_until(is_over: Callable[[], bool], let_in: Callable[[], None] = _nothing) -> None:
    """Wait for another thread without a lock. let_in: from `defer_sigint`."""
    while not is_over():
        let_in()
        time.sleep(_POLL_SECONDS)


def result_of(future: Future[R]) -> R:
    """Wait for a future, and return its result or raise its error. Ctrl-C ends the wait."""
    with defer_sigint() as let_in:
        poll_until(future.done, let_in)
        return future.result()
