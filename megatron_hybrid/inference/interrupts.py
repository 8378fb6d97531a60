"""Ctrl-C between two steps, not inside of one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block: between any two lines of bookkeeping it would
    leave pages that are counted twice or never given back. A second one does not wait, so that what
    hangs can be left.

    Only the main thread gets signals; a handler that is not Python's is left alone.
    """
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # also SIG_IGN, SIG_DFL
        yield
        return
    waiting = []

    def wait(*arguments) -> None:
        if waiting:
            handler(*arguments)
        waiting.append(arguments)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(*waiting[0])
