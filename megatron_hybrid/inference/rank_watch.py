"""RankWatch: tells the ranks of an engine that one of them has failed.

A collective that a rank has left would never end. So whoever is inside one then gets an error, or,
where nothing wakes it, ends its process with a message.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait

import torch.distributed as dist

from megatron_hybrid.ranks import Ranks

GRACE_SECONDS = 5.0
"""Time to leave a collective by an error of its own, before the process is ended."""
_BROKEN = (ConnectionError, EOFError, dist.DistError)
_GLOO = ("gloo", "Connection")
"""Errors of a connection that another rank has left, and words of those of gloo."""


class RankFailedError(RuntimeError):
    """A rank of this engine has failed or ended; the engine cannot go on."""


class _Watch:
    """What the thread that watches shares with the engine."""

    def __init__(self, connections: dict[int, Connection]):
        self.connections = connections  # by rank
        self.failure: str | None = None
        self.num_inside = 0  # calls that need the other ranks
        self.lock = threading.Lock()
        self.closing, self.close = Pipe(duplex=False)  # the end of the second wakes the thread

    def fail(self, text: str, *, source: int | None) -> None:
        """Note the first failure, and tell it to the others. source: the rank that told it."""
        with self.lock:
            if self.failure is not None:
                return
            self.failure = text
            for rank, connection in self.connections.items():
                if rank != source:
                    with suppress(OSError):
                        connection.send(text)

    def _wait_for_failure(self) -> None:
        ranks = {connection: rank for rank, connection in self.connections.items()}
        while self.failure is None:
            ready = wait([self.closing, *ranks])
            if self.closing in ready:
                return
            for connection in ready:
                rank = ranks[connection]
                try:
                    text = connection.recv()
                except (OSError, EOFError):
                    text = f"rank {rank} has closed its engine, or its process has ended"
                self.fail(text, source=rank)

    def run(self) -> None:
        """Wait until a rank fails or `close` is closed."""
        try:
            self._wait_for_failure()
        finally:
            for connection in self.connections.values():
                connection.close()
        if self.failure is None:
            return
        end = time.monotonic() + GRACE_SECONDS
        while self.num_inside:
            time.sleep(0.05)
            if time.monotonic() < end:
                continue
            sys.stderr.write(f"megatron_hybrid: this process ends, as {self.failure}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


class RankWatch:
    """Ends the wait for ranks that have failed. Make and close it on all ranks of an engine.

    Args:
        ranks: at least two.
    """

    def __init__(self, ranks: Ranks):
        self._rank = ranks.rank
        self._watch = watch = _Watch(ranks.watched)
        threading.Thread(target=watch.run, name="rank-watch", daemon=True).start()
        self.close = weakref.finalize(self, _close, watch, ranks)
        """Leave the other ranks."""

    @property
    def failure(self) -> str | None:
        """The first failure of any rank."""
        return self._watch.failure

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Context of a call that needs the other ranks.

        Raises:
            RankFailedError: another rank has failed or ended, now or before.
        """
        self._check()
        self._watch.num_inside += 1
        try:
            yield
        except Exception as error:
            if _is_broken(error):
                self._await_failure()
                self._check(error)
            raise
        finally:
            self._watch.num_inside -= 1

    def report(self, error: BaseException) -> None:
        """This rank has failed where the others did not: they must not wait for it."""
        if _is_broken(error):
            self._await_failure()
        text = f"rank {self._rank} has failed with {type(error).__name__}: {error}"
        self._watch.fail(text, source=None)

    def _await_failure(self) -> None:
        """A rank that ends breaks the collectives of the others before they are told why."""
        end = time.monotonic() + GRACE_SECONDS
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.01)

    def _check(self, cause: Exception | None = None) -> None:
        if self.failure is not None:
            raise RankFailedError(
                f"{self.failure}: this engine cannot go on; end the job, or make a new engine on "
                "all ranks"
            ) from cause


def _is_broken(error: BaseException) -> bool:
    """Whether another rank has left a connection of this one."""
    is_gloo = type(error) is RuntimeError and any(word in str(error) for word in _GLOO)
    return is_gloo or isinstance(error, _BROKEN)


def _close(watch: _Watch, ranks: Ranks) -> None:
    watch.close.close()
    ranks.close()
