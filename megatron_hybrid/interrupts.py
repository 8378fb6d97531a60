"""interrupts_wait: defers Ctrl-C to the end of a change of the engine."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Waiting:
    """A signal handler that defers the first interrupt and passes on the others."""

    def __init__(self, handler: Callable):
        self.handler = handler
        self.first: tuple | None = None

    def __call__(self, *arguments) -> None:
        if self.first is not None:
            self.handler(*arguments)
        self.first = self.first or arguments


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block: inside, it could leave pages counted twice or never
    released. A second one takes effect at once, to leave a block that hangs.

    Only the main thread gets signals; a handler that is not Python's stays as it is. Of nested
    blocks the outermost counts.
    """
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or isinstance(handler, _Waiting):  # SIG_IGN, SIG_DFL: not callable
        yield
        return
    waiting = _Waiting(handler)
    signal.signal(signal.SIGINT, waiting)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is waiting:  # no other handler was set meanwhile
            signal.signal(signal.SIGINT, handler)
        if waiting.first is not None:
            handler(*waiting.first)
