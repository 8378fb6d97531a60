"""LimitedProcess: a process without other work, for what may take any time and memory.

It answers questions one at a time. One that takes too much ends it, and the next one has another.
The process starts with the first question, and ends with its owner, who closes the pipe.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

MAX_SECONDS = 3
"""Seconds of a CPU for one question."""
MAX_BYTES = 512 << 20
"""Bytes of memory for one question."""
_STACK = 1 << 20
"""Bytes of stack: fewer than any thread that does the same work later has."""
_FATAL = {signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGKILL}
"""Signals by which a question ends the process; others come from outside."""


class TooMuchWorkError(RuntimeError):
    """A question has ended its process."""


class LimitedProcess:
    """Asks another process, which any thread may do.

    module: that calls `answer_all` as a program.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._owner = 0

    def ask(self, question: Any) -> Any:
        """Return the answer to a question. Both are JSON values.

        Raises:
            TooMuchWorkError: it takes more than `MAX_SECONDS`, `MAX_BYTES`, or stack.
        """
        with self._lock:
            for _ in range(3):  # a signal to the group of processes may have ended this one
                process = self._running()
                try:
                    process.stdin.write(json.dumps(question) + "\n")
                    process.stdin.flush()
                    answer = process.stdout.readline()
                except BrokenPipeError:
                    answer = ""
                if answer:
                    return json.loads(answer)
                self._process = None
                if -process.wait() in _FATAL:
                    break
        raise TooMuchWorkError(
            f"it takes more than {MAX_SECONDS} s of a CPU or {MAX_BYTES >> 20} MiB"
        )

    def _running(self) -> subprocess.Popen:
        """Return the process, which a fork has not: the pipe is that of its parent."""
        if self._process is None or self._owner != os.getpid():
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._owner = os.getpid()
        return self._process


def answer_all(answer: Callable[[Any], Any]) -> None:
    """Answer the questions of this process's owner, within the limits, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the owner's
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_answer_all, args=(answer,))
    thread.start()
    thread.join()


def _answer_all(answer: Callable[[Any], Any]) -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        end = int(used.ru_utime + used.ru_stime) + MAX_SECONDS + 1
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        print(json.dumps(answer(json.loads(line))), flush=True)
