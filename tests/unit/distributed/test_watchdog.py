"""RankControl: the failure that all ranks name is the first one, and whom it names."""

import socket
import threading
import time
from multiprocessing.connection import Pipe
from queue import Queue

import pytest
from waiting import LIMIT_S, wait_until

from megatron_hybrid.distributed import rank_status, watchdog
from megatron_hybrid.distributed.rank_control import RankControl
from megatron_hybrid.distributed.rank_status import Position, StallDetector, Status
from megatron_hybrid.distributed.ranks import Ranks
from megatron_hybrid.distributed.rendezvous import Member
from megatron_hybrid.distributed.watchdog import RankFailedError

HOST = socket.gethostname()

BROKEN = [
    RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:19264"),
    ConnectionResetError("Connection reset by peer"),
    EOFError(),
]


@pytest.fixture
def other(monkeypatch):
    """A watch of rank 0, and rank 1's end of its connection."""
    monkeypatch.setattr(watchdog, "BEAT_SECONDS", 0.02)
    own, other = Pipe()
    watch = RankControl(Ranks(0, 2, [], {1: own}), 120.0)
    yield watch, other
    watch.close()
    other.close()


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: type(error).__name__)
def test_a_broken_collective_is_the_failure_of_the_rank_that_left(other, error):
    watch, end = other
    threading.Timer(0.2, end.close).start()  # told after the collective has broken
    with pytest.raises(RankFailedError, match=r"rank 1 on .* has closed"), watch.inside():
        try:
            raise error
        except Exception as broken:
            watch.report(broken)
            raise
    assert f"rank 1 on {HOST} has closed" in watch.failure


def test_an_error_of_this_rank_is_told_at_once(other):
    watch, end = other
    watch.report(OSError("no space left on device"))
    said = [Status()]
    while isinstance(said[-1], Status):
        assert end.poll(LIMIT_S)
        said.append(end.recv())
    assert said[-1] == f"rank 0 on {HOST} has failed with OSError: no space left on device"


def test_a_process_that_sends_nothing_is_named(other, monkeypatch):
    """One that sends is not, however long it is in its own code."""
    watch, end = other
    monkeypatch.setattr(watchdog, "SILENCE_SECONDS", 1.0)
    for _ in range(20):
        end.send(Status())
        time.sleep(0.02)
    assert watch.failure is None
    wait_until(lambda: watch.failure is not None)
    assert watch.failure.startswith(f"rank 1 on {HOST} (process 0) has sent nothing for 1 s")


def waits(still, call="step()"):
    return Status(call, "layer.py:7 in forward", True, still, 120.0)


def works(still, call="step()", limit=120.0):
    return Status(call, "disk.py:9 in write", False, still, limit)


VERDICTS = {
    # Statuses of ranks 0 and 1, a part of the line, a part of the failure.
    "both work": ((works(100.0), works(100.0)), None, None),
    "a short wait": ((waits(9.0), works(9.0)), None, None),
    "a wait": ((waits(11.0), works(0.0)), "rank 0 on a has waited 11 s in step() at layer", None),
    "for the first": ((Status(), waits(11.0)), "for rank 0 on a (in its own code, in no", None),
    "own code": ((waits(1e6), Status()), "for rank 1 on b (in its own code, in no call", None),
    "stuck": ((waits(121.0), works(121.0)), "for rank 1 on b (step() at disk.py", "rank 1 on b"),
    "stuck alone": ((Status(), works(121.0)), None, "from rank 1 on b (step() at disk.py:9 in wr"),
    "a save": ((waits(121.0), works(121.0, "save", 1200.0)), "for rank 1 on b (save at", None),
    "all wait": ((waits(121.0), waits(120.0)), "which all wait", "from rank 0 on a (step() at"),
    "one wakes": ((waits(121.0), waits(3.0)), "which all wait", None),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_whom_a_wait_is_for_and_who_is_stuck(name):
    statuses, line, failure = VERDICTS[name]
    said = StallDetector([Member(0, "a", 1), Member(1, "b", 2)]).look(dict(enumerate(statuses)))
    for text, part in zip(said, (line, failure), strict=True):
        assert (text is None) if part is None else (part in text), text


def test_a_wait_is_told_once_and_then_every_minute():
    judge = StallDetector([Member(0, "a", 1), Member(1, "b", 2)])
    lines = [judge.look({0: waits(float(still)), 1: Status()})[0] for still in range(140)]
    assert [still for still, line in enumerate(lines) if line is not None] == [10, 70, 130]


def test_a_thread_that_computes_is_not_still(monkeypatch):
    """One that waits is, and its place is the caller of what waits."""
    seconds = iter([1.0, 2.0, 3.0, 3.0, 3.0])  # of a CPU
    monkeypatch.setattr(rank_status.time, "clock_gettime", lambda clock: next(seconds))
    positions, end = Queue(), threading.Event()

    def work():
        positions.put(Position("step()", 120.0, True))
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    position = positions.get()
    while not (status := position.status(1.0)).place.endswith("in work"):
        seconds = iter([1.0, *seconds])
    assert [position.status(1.0).still for _ in range(4)] == [0.0, 0.0, 1.0, 2.0]
    end.set()
    thread.join()
    assert "distributed/test_watchdog.py" in status.place and not status.waits
