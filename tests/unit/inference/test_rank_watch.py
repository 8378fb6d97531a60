"""RankWatch: the failure that all ranks name is the first one."""

import threading
from multiprocessing.connection import Pipe

import pytest

from megatron_hybrid.inference.rank_watch import RankFailedError, RankWatch
from megatron_hybrid.ranks import Ranks

BROKEN = [
    RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:19264"),
    ConnectionResetError("Connection reset by peer"),
    EOFError(),
]


@pytest.fixture
def other():
    """A watch of rank 0, and rank 1's end of its connection."""
    own, other = Pipe()
    watch = RankWatch(Ranks(0, 2, [], {1: own}))
    yield watch, other
    watch.close()
    other.close()


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: type(error).__name__)
def test_a_broken_collective_is_the_failure_of_the_rank_that_left(other, error):
    watch, end = other
    threading.Timer(0.2, end.close).start()  # told after the collective has broken
    with pytest.raises(RankFailedError, match="rank 1 has closed"), watch.inside():
        try:
            raise error
        except Exception as broken:
            watch.report(broken)
            raise
    assert "rank 1 has closed" in watch.failure


def test_an_error_of_this_rank_is_told_at_once(other):
    watch, end = other
    watch.report(OSError("no space left on device"))
    assert end.poll(1.0)
    assert end.recv() == "rank 0 has failed with OSError: no space left on device"
