"""Meetings of ranks, here threads with one store."""

import logging
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch.distributed as dist
from forks import forked
from waiting import LIMIT_S, wait_until

from megatron_hybrid.distributed import rendezvous
from megatron_hybrid.distributed.rendezvous import (
    Member,
    RankError,
    announce_failure,
    ends_with,
    exchange,
    join,
    own_member,
)
from megatron_hybrid.models.sharding.parallel_setup import job_store

SIZE = 3
RANKS = range(SIZE)
NAMESPACE = own_member().namespace


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture(autouse=True)
def job(store, monkeypatch):
    own = threading.local()
    monkeypatch.setattr(rendezvous, "_store", lambda: store)
    monkeypatch.setattr(rendezvous, "_is_job", lambda: True)
    monkeypatch.setattr(rendezvous, "own_member", lambda: Member(own.rank, f"host{own.rank}", 0))
    return own


def on_ranks(job, work, ranks=RANKS):
    """What `work(rank)` returns or raises on each."""

    def run(rank):
        job.rank = rank
        rendezvous.announce()
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, ranks, timeout=LIMIT_S))


def test_all_values_reach_all_ranks_in_order_again_and_again(job):
    def work(rank):
        return [[v for _, v in exchange("a call", (rank, i), RANKS)] for i in range(4)]

    assert on_ranks(job, work) == [[[(rank, i) for rank in RANKS] for i in range(4)]] * SIZE


@pytest.mark.parametrize("missing", RANKS)
def test_a_rank_that_does_not_come_is_named_on_all_others(job, missing, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "LINE_SECONDS", 0.05)

    def work(rank):
        return None if rank == missing else exchange("a call", rank, RANKS, 1.5)

    with caplog.at_level(logging.WARNING):
        given = on_ranks(job, work)
    for rank in set(RANKS) - {missing}:
        assert isinstance(given[rank], RankError)
        assert f"rank {missing} on host{missing} did not come" in str(given[rank])
    # Its host is in the line if it has been looked up by then.
    assert re.search(rf"has waited for rank {missing}( on host\d)? for \d+ s: a call", caplog.text)


@pytest.fixture
def beside(job, monkeypatch):
    """Runs `work(rank)` on ranks 0 and 1, beside a process that is rank 2."""

    def on_two(other, work):
        pids = {0: os.getpid(), 1: os.getpid(), 2: other}

        def own_member():
            return Member(job.rank, "here", pids[job.rank], NAMESPACE)

        monkeypatch.setattr(rendezvous, "own_member", own_member)
        on_ranks(job, lambda rank: None, [2])  # which announces it
        try:
            return [str(error) for error in on_ranks(job, work, [0, 1])]
        finally:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)  # a zombie until now

    return on_two


def wait_for_both(store):
    """Until ranks 0 and 1 are at the first meeting: who comes later waits for the next call."""
    here = [f"megatron_hybrid/0.1.2/1/{other}" for other in (0, 1)]
    wait_until(lambda: store.check(here))


def test_a_rank_whose_process_has_ended_is_not_waited_for(beside, store):
    gone = forked(signal.pause)
    threading.Thread(target=lambda: (wait_for_both(store), os.kill(gone, signal.SIGKILL))).start()
    said = f"rank 2 on here (process {gone}) has ended, for which rank 0 on here waits: a call"
    assert beside(gone, lambda rank: exchange("a call", rank, RANKS, 60.0)) == [said] * 2


def test_a_rank_whose_process_is_stopped_is_not_waited_for(beside, monkeypatch):
    monkeypatch.setattr(rendezvous, "STOPPED_SECONDS", 0.1)
    pid = forked(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    (one, other) = beside(pid, lambda rank: exchange("a call", rank, RANKS, 60.0))
    assert one == other and one.startswith(f"rank 2 on here (process {pid}) is stopped for 0 s, ")


def test_a_rank_that_has_ended_on_another_machine_has_told_it(job, store, monkeypatch):
    ends = []
    monkeypatch.setattr("atexit.register", lambda *call: ends.append(partial(*call)))

    def work(rank):
        if rank < 2:
            return exchange("a call", rank, RANKS, 60.0)
        wait_for_both(store)
        return ends[0]()

    given = on_ranks(job, work)
    assert {str(error) for error in given[:2]} == {
        "rank 2 on host2 (process 0) has ended, for which rank 0 on host0 waits: a call"
    }


def test_the_first_rank_may_end_when_it_has_answered(job, monkeypatch):
    """Whoever looks at its process between its answer and its end finds the answer."""
    looked = rendezvous._Exchange._gone

    def gone(meeting, ranks):
        if ranks == [0] and not meeting._store.check([meeting._key("answer")]):
            while not meeting._store.check([meeting._key("answer")]):
                time.sleep(0.001)
            return "rank 0 has ended"
        return looked(meeting, ranks)

    monkeypatch.setattr(rendezvous._Exchange, "_gone", gone)
    given = on_ranks(job, lambda rank: len(exchange("a call", rank, RANKS, 60.0)))
    assert given == [SIZE] * SIZE


def test_a_call_of_torch_ends_with_the_ranks_that_it_waits_for(job, monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "LEAVE_SECONDS", 0.1)
    job.rank = 0
    gone = forked(lambda: None)
    members = [Member(1, "host0", gone, NAMESPACE)]
    monkeypatch.setattr(rendezvous, "own_member", lambda: Member(0, "host0", 0, NAMESPACE))

    def wait():
        with ends_with(members, "a collective"):
            time.sleep(600)

    assert os.waitstatus_to_exitcode(os.waitpid(forked(wait), 0)[1]) == 1
    os.waitpid(gone, 0)
    said = f"rank 1 on host0 (process {gone}) has ended, for which rank 0 on host0 waits"
    assert f"this process ends, as {said}: a collective" in capfd.readouterr().err
    with ends_with([], "a call that ends"):
        pass


def test_ranks_that_come_for_different_calls_are_told_both(job):
    given = on_ranks(job, lambda rank: exchange(("a load", "an engine")[rank == 2], rank, RANKS))
    assert len({str(error) for error in given}) == 1
    assert "rank 0 on host0 is a load, rank 2 on host2 is an engine" in str(given[0])


@pytest.mark.parametrize("failing", RANKS)
def test_the_error_of_a_rank_that_cannot_come_is_told_once(job, failing):
    """It keeps its own; the next attempt of all is a new one."""

    def work(rank, fails):
        with announce_failure("a call"):
            if rank == failing and fails:
                raise TypeError("no config")
            return len(exchange("a call", rank, RANKS, 30.0))

    given = on_ranks(job, lambda rank: work(rank, True))
    assert on_ranks(job, lambda rank: work(rank, False)) == [SIZE] * SIZE
    assert [type(error) is TypeError for error in given] == [rank == failing for rank in RANKS]
    for rank in set(RANKS) - {failing}:
        said = f"a call failed on rank {failing} on host{failing}: TypeError: no config"
        assert str(given[rank]) == said


def test_an_error_on_all_ranks_leaves_nothing_behind(job):
    def work(rank):
        with pytest.raises(TypeError), announce_failure("a call"):
            raise TypeError("no config")
        with announce_failure("a call"):
            return len(exchange("a call", rank, RANKS, 30.0))

    assert on_ranks(job, work) == [SIZE] * SIZE


def test_a_rank_that_comes_late_is_told_at_once_who_cannot_come(job):
    def work(rank):
        with announce_failure("a call"):
            if rank == 1:
                raise TypeError("no config")
            exchange("a call", None, RANKS, 5)

    said = [str(*on_ranks(job, work, [rank])) for rank in (1, 0, 2)]
    assert said[1:] == ["a call failed on rank 1 on host1: TypeError: no config"] * 2


def test_the_first_rank_of_a_job_without_a_launcher_gets_its_store_at_once(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": SIZE}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("RANK", "0")
    store, *first = job_store()
    store.set("said", "by rank 0")
    monkeypatch.setenv("RANK", "1")
    other, *second = job_store()
    assert (first, second) == ([0, SIZE], [1, SIZE]) and other.get("said") == b"by rank 0"


def test_ranks_join_the_job_or_are_told_who_has_not(job, monkeypatch, caplog):
    """Before there are process groups, which wait without a word."""
    store = dist.HashStore()

    def work(rank):
        return [member.rank for member in join(store, rank, SIZE)]

    assert on_ranks(job, work) == [[0, 1, 2]] * SIZE
    monkeypatch.setattr(rendezvous, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.2)
    store = dist.HashStore()
    with caplog.at_level(logging.WARNING):
        given = on_ranks(job, work, [0, 1])
    for error in given:
        assert "is joining the job, and " in str(error) and "rank 2 did not come" in str(error)
    assert "rank 2 for 0 s: joining the job" in caplog.text
