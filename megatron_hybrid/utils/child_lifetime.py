"""Processes that end with the one that needs them: forks of a save, and ranks of the launcher. And
the orderly end of a server by a signal, from its first line on."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LAUNCHER = "MEGATRON_HYBRID_LAUNCHER"
"""Environment variable with the id of the process that started the ranks; torchrun sets none."""
GRACE_SECONDS = 30.0
"""Time for a rank without its launcher to finish its step and save, as torchrun gives it."""
_POLL_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_ends_with_us = False
_forker = 0


def never_free(kept: object) -> None:
    """Keep an object until the process is gone. Neither Python's exit nor a garbage collector frees
    it, in this process or a fork."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


@contextmanager
def forks_end_with_us() -> Iterator[None]:
    """Make a context in which forked processes, and their own forks, are killed when the thread
    that forked them ends in any way (on Linux). They ignore a terminal's Ctrl-C."""
    global _ends_with_us
    before, _ends_with_us = _ends_with_us, True
    try:
        yield
    finally:
        _ends_with_us = before


def _before_fork() -> None:
    global _forker
    _forker = os.getpid()


def _in_fork() -> None:
    if not _ends_with_us:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != _forker:  # the parent has ended in between
            os._exit(1)


os.register_at_fork(before=_before_fork, after_in_child=_in_fork)


@contextmanager
def ends_with_launcher() -> Iterator[None]:
    """Make a context in which a rank of torchrun ends when its launcher has gone, since a killed
    launcher sends no signal. It gets a SIGTERM, and ends at the latest `GRACE_SECONDS` later."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    over, launcher = threading.Event(), int(os.environ.pop(LAUNCHER, os.getppid()))

    def watch() -> None:
        while os.getppid() == launcher:
            if over.wait(_POLL_SECONDS):
                return
        os.kill(os.getpid(), signal.SIGTERM)
        if not over.wait(GRACE_SECONDS):
            os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def end_with_parent() -> None:
    """Let this process of `multiprocessing` end when its parent has ended in any way. Forks of the
    parent may keep the pipe open that shows its end, so the parent's id counts, too."""
    parent, number = multiprocessing.parent_process(), os.getppid()

    def watch() -> None:
        while parent.is_alive() and os.getppid() == number:
            parent.join(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def end_signals() -> list[signal.Signals]:
    """Return SIGTERM, and SIGHUP of a terminal that is closed, unless `nohup` ignores that."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


class EndSignal:
    """A context, of the main thread, in which `end_signals` end a server with status 0.

    Until `hold` nothing is lost and nobody waits, so the process ends at once. From then on the
    signal is noted in `was_sent`, and the server ends by itself.
    """

    def __init__(self) -> None:
        self.was_sent = False
        self.serves = False
        """Whether the end of another rank would cost answers."""
        self._ends_at_once = True
        self._pid = os.getpid()

    def __enter__(self) -> EndSignal:
        self._before = {each: signal.signal(each, self._take) for each in end_signals()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        faulthandler.cancel_dump_traceback_later()

    def hold(self) -> None:
        """Note the signal from now on, without ending this process, as others need it."""
        self._ends_at_once = False

    def end_within(self, seconds: float) -> None:
        """End the process with status 1 after this time, unless the context ends before, and write
        the stacks of its threads to stderr."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)

    def _take(self, number: int, frame: object) -> None:
        if os.getpid() != self._pid:  # a fork, which serves nobody
            os._exit(128 + number)
        self.was_sent = True
        if self._ends_at_once:
            os.write(2, b"megatron-hybrid: ended by a signal while the model was loading\n")
            os._exit(0)
