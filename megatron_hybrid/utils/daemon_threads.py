"""DaemonThreads: threads for work that no exit waits for."""

import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

R = TypeVar("R")


@dataclass(eq=False)
class _Job:
    """A job that waits or runs."""

    call: Callable[[], Any] | None
    future: Future
    key: str
    is_large: bool

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class DaemonThreads:
    """Runs jobs of several keys: the keys take turns, and the jobs of one run in their order. If
    there are enough threads, large jobs leave one to small jobs, and large jobs of one key leave
    one to those of others. Unlike a `ThreadPoolExecutor`, and asyncio's own, it holds up neither an
    event loop's end nor the interpreter's, whatever still runs.

    Args:
        name: of the threads.
        count: largest number of threads; they start with the first jobs.
        niceness: added to that of the process, where a thread can have its own (Linux).
    """

    def __init__(self, name: str, count: int, niceness: int = 0):
        self._name, self._count, self._niceness = name, count, niceness
        self._most_large = max(1, count - 1)
        self._changed = threading.Condition()
        self._num_threads = self._num_unfinished = 0
        self._running: Counter[str] = Counter()  # large ones, by key
        # The next key is the first one.
        self._small: dict[str, deque[_Job]] = {}
        self._large: dict[str, deque[_Job]] = {}

    def submit(self, call: Callable[[], R], key: str = "", is_large: bool = False) -> Future[R]:
        """Queue a job. Cancelling its future before it begins removes it.

        key: owner of the job. is_large: whether it may take long.
        """
        job = _Job(call, Future(), key, is_large)
        with self._changed:
            self._lane(job).setdefault(key, deque()).append(job)
            self._num_unfinished += 1
            if self._num_threads < min(self._count, self._num_unfinished):
                self._num_threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._changed.notify()
        job.future.add_done_callback(partial(self._drop, job))
        return job.future

    def _lane(self, job: _Job) -> dict[str, deque[_Job]]:
        return self._large if job.is_large else self._small

    def _drop(self, job: _Job, future: Future) -> None:
        """Remove a cancelled job, with the objects that it holds."""
        with self._changed:
            jobs = self._lane(job).get(job.key, ())
            if future.cancelled() and job in jobs:
                jobs.remove(job)
                job.call = None
                self._num_unfinished -= 1

    def _work(self) -> None:
        if self._niceness:
            with suppress(AttributeError, OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while True:
            with self._changed:
                while (job := self._take()) is None:
                    self._changed.wait()
                self._running[job.key] += job.is_large
            job.run()
            with self._changed:
                self._num_unfinished -= 1
                self._running[job.key] -= job.is_large
                self._running += Counter()  # without keys that have none
                self._changed.notify()
            del job  # frees its objects while this thread waits

    def _take(self) -> _Job | None:
        """Remove and return the next job, or None if none may run now."""
        num_large = self._running.total()
        lanes = [self._small, self._large]
        for lane in lanes if num_large else lanes[::-1]:
            if lane is self._large and num_large >= self._most_large:
                continue
            for key in list(lane):
                if lane is self._large and 0 < self._running[key] >= self._most_large - 1:
                    continue
                jobs = lane.pop(key)
                job = jobs.popleft() if jobs else None
                if jobs:
                    lane[key] = jobs  # after the others
                if job is not None:
                    return job
        return None
