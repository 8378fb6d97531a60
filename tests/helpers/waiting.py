"""Waiting for another thread or process: a limit ends what hangs, and measures nothing."""

import time
from collections.abc import Callable

LIMIT_S = 300.0
"""Far more than a busy machine takes."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Raise AssertionError unless a condition comes true."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
