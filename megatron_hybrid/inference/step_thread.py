"""StepThread: the thread that an engine has for itself.

Its queue holds jobs. A step is a job, too, and queues the next step while there is work. So jobs
run between two steps, in order, and an idle engine takes no CPU.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.utils.fork_guard import ForkGuard
from megatron_hybrid.utils.interrupts import defer_sigint

R = TypeVar("R")


class StepThread:
    """Runs jobs one after the other, until the last one. In a fork of its process it refuses all.

    Args:
        name: of the thread.
        ended: text of the error for a job that comes after the last one.
    """

    def __init__(self, name: str, ended: str):
        self._ended = ended
        self._executor = ThreadPoolExecutor(1, name)
        self._home = ForkGuard()
        self._lock = threading.Lock()  # so that no job is queued after the last one
        self._last: Future | None = None
        self._has_next_step = False

    def submit(self, job: Callable[[], R]) -> Future[R]:
        """Queue a job.

        Raises:
            RuntimeError: the last job is queued, or the interpreter exits, or it is a fork.
        """
        self.require_home()
        with defer_sigint(), self._lock:
            if self._last is not None:
                raise RuntimeError(self._ended)
            return self._executor.submit(job)

    def require_home(self) -> None:
        """Raise RuntimeError in a fork, where jobs would wait for ever."""
        self._home.require("this engine")

    def submit_step(self, step: Callable[[], None]) -> None:
        """Queue a step, unless one is queued. Call it in the thread.

        Raises:
            RuntimeError: as `submit`.
        """
        if not self._has_next_step:
            self.submit(partial(self._run_step, step))
            self._has_next_step = True

    def _run_step(self, step: Callable[[], None]) -> None:
        self._has_next_step = False
        step()

    def end(self, job: Callable[[], None]) -> Future[None]:
        """Queue the last job; of a second call, the job is not used. Returns the last one's
        future; in a fork, where nothing is to be ended, one that is done."""
        if not self._home.is_here:
            nothing: Future[None] = Future()
            nothing.set_result(None)
            return nothing
        with defer_sigint(), self._lock:
            if self._last is None:
                self._last = self._executor.submit(job)
                self._executor.shutdown(wait=False)
            return self._last


def use_device_of(engine: DynamicInferenceEngine) -> None:
    """Make the engine's CUDA device the current one of this thread: kernels are launched there."""
    device = engine.memory.pool.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
