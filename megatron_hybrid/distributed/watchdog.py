"""RankWatch: reports to the ranks of an engine that one of them has failed, stopped or is stuck.

A collective that a rank has left would never end. So a rank that is inside one gets an error, or if
nothing wakes it, its process ends with a message.
"""

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait

from megatron_hybrid.distributed.rank_status import Position, StallDetector, Status
from megatron_hybrid.distributed.ranks import Ranks
from megatron_hybrid.distributed.rendezvous import Member

logger = logging.getLogger(__name__)
BEAT_SECONDS = 1.0
"""Time between two messages of each rank's thread, which say that its process runs."""
SILENCE_SECONDS = 20.0
"""Time without such a message, after which a process counts as stopped."""
WAKE_SECONDS = 0.5
"""Time to read what a rank has sent before it ended."""
GRACE_SECONDS = 5.0
"""Time to leave a collective by an error of its own, before the process is ended."""
STEP_SECONDS = 120.0
"""Default of `InferenceConfig.rank_timeout`, for steps."""
_END_WAITS = None
"""Message that no rank is to wait for processes outside of the job any more."""


class RankFailedError(RuntimeError):
    """A rank of this engine has failed or ended; the engine cannot go on."""


class RankWatch:
    """The state that the thread which watches the other ranks shares with the engine."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self.connections = ranks.watched  # by rank
        self.failure: str | None = None
        self.ends_waits = False
        """Whether no rank is to wait for processes outside of the job any more."""
        self.num_inside = 0  # calls that need the other ranks
        self.position: Position | None = None  # in the innermost of them
        self.lock = threading.Lock()
        self._silent = dict.fromkeys(self.connections, 0.0)
        self._statuses = {rank: Status() for rank in range(ranks.size)}
        self._stalls = StallDetector(ranks.members)
        self._stopped: Member | None = None
        if self.connections:
            ranks.on_difference = self.fail
            self.woken, self.wake_pipe = Pipe(duplex=False)  # the end of the second wakes it
            threading.Thread(target=self._run, name="rank-watch", daemon=True).start()

    def close(self) -> None:
        if self.connections:
            self.wake_pipe.close()
        self._ranks.close()

    def fail(self, text: str, source: int | None = None) -> None:
        """Note the first failure, and send it to the others. source: the rank that sent it."""
        with self.lock:
            if self.failure is not None:
                return
            self.failure = text
            for rank, connection in self.connections.items():
                if rank != source:
                    with suppress(OSError):
                        connection.send(text)

    def end_waits(self) -> None:
        """Let no rank wait for processes outside of the job any more. Any thread may call it."""
        self.ends_waits = True
        with self.lock:
            for connection in self.connections.values():
                with suppress(OSError):
                    connection.send(_END_WAITS)

    def _wait_for_failure(self) -> None:
        ranks = {connection: rank for rank, connection in self.connections.items()}
        before = time.monotonic()
        beat_at = before
        while self.failure is None:
            ready = wait([self.woken, *ranks], max(0.0, beat_at - time.monotonic()))
            if self.woken in ready:
                return
            for connection in ready:
                self._receive(ranks[connection], connection)
            now = time.monotonic()
            if now >= beat_at and self.failure is None:
                # If this process itself was stopped, no other one is to blame.
                self._beat(min(now - before, 2 * BEAT_SECONDS))
                before, beat_at = now, now + BEAT_SECONDS

    def _receive(self, rank: int, connection: Connection) -> None:
        try:
            said = connection.recv()
        except (OSError, EOFError):
            said = f"{self._ranks.members[rank]} has closed its engine, or its process has ended"
        if isinstance(said, Status):
            self._silent[rank], self._statuses[rank] = 0.0, said
        elif said is _END_WAITS:
            self.ends_waits = True
        else:
            self.fail(said, rank)

    def _beat(self, passed: float) -> None:
        """Report that this process runs, and look for silent ones. passed: since the last time."""
        position = self.position
        own = Status() if position is None else position.status(passed)
        self._statuses[self._ranks.rank] = own
        with self.lock:
            for connection in self.connections.values():
                with suppress(OSError):
                    connection.send(own)
        for rank in self._silent:
            self._silent[rank] += passed
            if self._silent[rank] > 4 * BEAT_SECONDS:
                self._statuses[rank] = Status(is_silent=True)
            if self._silent[rank] > SILENCE_SECONDS:
                self._end_silent(rank)
                return
        if self._ranks.is_first:
            line, failure = self._stalls.look(self._statuses)
            if line is not None:
                logger.warning("%s", line)
            if failure is not None:
                self.fail(failure)

    def _end_silent(self, rank: int) -> None:
        member = self._stopped = self._ranks.members[rank]
        self.fail(
            f"{member} (process {member.pid}) has sent nothing for {SILENCE_SECONDS:.0f} s: its "
            "process is stopped, or its machine is gone"
        )

    def wake_stopped(self) -> None:
        """Let a stopped process on this machine go on, so that it finds that the others have ended,
        and ends. It must not answer them before."""
        own, other = self._ranks.members[self._ranks.rank], self._stopped
        if other is not None and own.is_beside(other):
            with suppress(OSError):
                os.kill(other.pid, signal.SIGCONT)

    def _run(self) -> None:
        """Wait until a rank fails, which ends calls or the process, or `wake_pipe` is closed."""
        try:
            self._wait_for_failure()
        finally:
            for connection in self.connections.values():
                connection.close()
        if self.failure is None:
            return
        failed_at = time.monotonic()
        while self.num_inside:
            time.sleep(0.05)
            passed = time.monotonic() - failed_at
            if passed > WAKE_SECONDS:
                self._ranks.wake()
            if passed < GRACE_SECONDS:
                continue
            sys.stderr.write(f"megatron_hybrid: this process ends, as {self.failure}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            self.wake_stopped()
            os._exit(1)
        self.wake_stopped()
