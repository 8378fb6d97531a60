"""DaemonThreads: threads for work that no exit waits for."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

R = TypeVar("R")


class DaemonThreads:
    """Runs jobs in the order in which they come. Unlike a `ThreadPoolExecutor`, and asyncio's own
    one, it holds up neither an event loop's end nor the interpreter's, whatever still runs.

    Args:
        name: of the threads.
        count: most of them; they start with the first jobs.
        niceness: added to that of the process, where a thread can have its own (Linux).
    """

    def __init__(self, name: str, count: int, niceness: int = 0):
        self._name, self._count, self._niceness = name, count, niceness
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = self._num_unfinished = 0

    def submit(self, job: Callable[[], R]) -> Future[R]:
        """Queue a job. Cancelling its future before it begins takes it out."""
        future: Future[R] = Future()
        with self._lock:
            self._num_unfinished += 1
            if self._num_threads < min(self._count, self._num_unfinished):
                self._num_threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        self._jobs.put(partial(_run, job, future))
        return future

    def _run(self) -> None:
        if self._niceness:
            with suppress(AttributeError, OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while True:
            self._jobs.get()()
            with self._lock:
                self._num_unfinished -= 1


def _run(job: Callable[[], R], future: Future[R]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
