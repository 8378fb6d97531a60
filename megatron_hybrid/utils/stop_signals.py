"""SIGINT and SIGTERM as a request to end after the running step."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SAME_REQUEST_SECONDS = 2.0
"""Time for repeats: a terminal sends Ctrl-C to all ranks, and torchrun passes it on once more."""


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Make a context with an event that is set when the process is asked to end, so that it can end
    after its step. A SIGINT some time after the first signal ends it at once."""
    stop = threading.Event()
    first = math.inf
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, _: Any) -> None:
        nonlocal first
        now = time.monotonic()
        if number == signal.SIGINT and now - first > _SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt
        first = min(first, now)
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
