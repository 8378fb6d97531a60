"""Commands in processes of their own: forked from a process that has imported everything, or of a
new Python. They take signals, and end with a status."""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from rank_processes import start_ranks, told_by_torchrun

from megatron_hybrid import cli

LIMIT_S = 300
"""Seconds after which a command hangs."""


def run_python(code: str, **options) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python; what it prints comes back as text."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)


def run_torchrun(arguments: Sequence[str], **options) -> subprocess.CompletedProcess[str]:
    """Run torchrun, which has to succeed; what it prints comes back as text."""
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    options["env"] = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "0"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)
    assert result.returncode == 0, result.stderr
    return result


class Command:
    """A command that runs.

    Args:
        arguments: behind `megatron-hybrid`, or of `main`.
        folder: for what it prints; made here.
        num_ranks: processes, as torchrun would start them.
        main: what runs them, at the top of a module; returns the status, None: 0.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        num_ranks: int = 1,
        main: Callable[[list[str]], int | None] = cli.main,
    ):
        folder.mkdir()
        self.folder, self.num_ranks = folder, num_ranks
        given = (main, arguments, folder, num_ranks, free_port())
        self._processes = start_ranks(_run, num_ranks, *given)

    def send(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to ranks; None: to all."""
        for rank in range(self.num_ranks) if ranks is None else ranks:
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, number)

    def runs(self) -> bool:
        """Whether all ranks run."""
        return all(process.is_alive() for process in self._processes)

    def wait_until(self, is_met: Callable[[], bool]) -> None:
        """Wait for a condition while it runs."""
        end = time.monotonic() + LIMIT_S
        while not is_met():
            if not self.runs() or time.monotonic() > end:
                self.send(signal.SIGKILL)
                raise AssertionError(f"it is over before the condition is met:\n{self.printed()}")
            time.sleep(0.005)

    def is_alive(self) -> bool:
        """Whether a rank runs."""
        return any(process.is_alive() for process in self._processes)

    def wait(self) -> list[int]:
        """Wait for the end. Returns the status of each rank; that of a signal is negative."""
        for process in self._processes:
            process.join(LIMIT_S)
            if process.is_alive():
                self.send(signal.SIGKILL)
                raise TimeoutError(f"it hangs:\n{self.printed()}")
        return [process.exitcode for process in self._processes]

    def out(self, rank: int = 0) -> str:
        """What a rank has printed."""
        return (self.folder / f"{rank}.out").read_text()

    def err(self, rank: int = 0) -> str:
        """Of stderr."""
        return (self.folder / f"{rank}.err").read_text()

    def printed(self) -> str:
        """By all ranks."""
        return "\n".join(path.read_text() for path in sorted(self.folder.iterdir()))


def run_script(arguments: list[str]) -> None:
    """A `main` for `python SCRIPT ...`."""
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")


class Launched(Command):
    """As `Command`, of any program and in a new Python, which takes seconds to import all.

    Args:
        arguments: behind `python`.
        folder: for what it prints; made here.
    """

    def __init__(self, arguments: Sequence[str], folder: Path):
        folder.mkdir()
        self.folder = folder
        with open(folder / "0.out", "w") as out, open(folder / "0.err", "w") as err:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=out,
                stderr=err,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The status, if it has ended."""
        return self._process.poll()

    def send(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to the process itself."""
        self._process.send_signal(number)

    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.poll() is None

    def wait(self) -> list[int]:
        """Wait for the end. Returns the status."""
        try:
            return [self._process.wait(LIMIT_S)]
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise TimeoutError(f"it hangs:\n{self.printed()}") from None


def _run(
    rank: int, main: Callable, arguments: Sequence[str], folder: Path, num_ranks: int, port: int
) -> None:
    for name, descriptor in (("out", 1), ("err", 2)):
        file = os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    if num_ranks > 1:
        told_by_torchrun(rank, num_ranks, port)
    multiprocessing.set_start_method(None, force=True)  # as in a process from a shell
    torch.set_num_threads(1)
    sys.exit(main(list(arguments)))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
