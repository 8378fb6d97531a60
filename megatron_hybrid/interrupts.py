"""Ctrl-C between two changes of the engine, not inside of one."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Waiting:
    """A handler that notes the first interrupt for later and passes on the others."""

    def __init__(self, handler: Callable):
        self.handler = handler
        self.first: tuple | None = None

    def __call__(self, *arguments) -> None:
        if self.first is not None:
            self.handler(*arguments)
        self.first = self.first or arguments


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block: between any two lines of bookkeeping it would
    leave pages that are counted twice or never given back. A second one does not wait, so that what
    hangs can be left.

    Only the main thread gets signals; a handler that is not Python's is left alone. Blocks may be
    nested; the outermost one counts.
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
        if signal.getsignal(signal.SIGINT) is waiting:  # nobody has set another one meanwhile
            signal.signal(signal.SIGINT, handler)
        if waiting.first is not None:
            handler(*waiting.first)
