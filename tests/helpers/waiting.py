"""Waiting for another thread or process: a limit ends what hangs, and measures nothing."""

import time
from collections.abc import Callable

import psutil

LIMIT_S = 300.0
"""Far more than a busy machine takes."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Raise AssertionError unless a condition comes true."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process is there, and has not ended yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
