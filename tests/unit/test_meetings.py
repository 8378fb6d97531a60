"""Meetings of ranks, here threads with one store."""

import logging
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from waiting import LIMIT_S

from megatron_hybrid import meetings
from megatron_hybrid.meetings import Member, RankError, await_ranks, coming, meet
from megatron_hybrid.models.sharding.parallel_setup import job_store

SIZE = 3
RANKS = range(SIZE)


@pytest.fixture(autouse=True)
def job(monkeypatch):
    store, own = dist.HashStore(), threading.local()
    monkeypatch.setattr(meetings, "_store", lambda: store)
    monkeypatch.setattr(meetings, "_is_job", lambda: True)
    monkeypatch.setattr(meetings, "own_member", lambda: Member(own.rank, f"host{own.rank}", 0))
    return own


def on_ranks(job, work, ranks=RANKS):
    """What `work(rank)` returns or raises on each."""

    def run(rank):
        job.rank = rank
        meetings.announce()
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, ranks, timeout=LIMIT_S))


def test_all_values_reach_all_ranks_in_order_again_and_again(job):
    def work(rank):
        return [[v for _, v in meet("a call", (rank, i), RANKS)] for i in range(4)]

    assert on_ranks(job, work) == [[[(rank, i) for rank in RANKS] for i in range(4)]] * SIZE


@pytest.mark.parametrize("missing", RANKS)
def test_a_rank_that_does_not_come_is_named_on_all_others(job, missing, monkeypatch, caplog):
    monkeypatch.setattr(meetings, "LINE_SECONDS", 0.05)
    monkeypatch.setattr(meetings, "_ANSWER_SECONDS", 0.2)

    def work(rank):
        return None if rank == missing else meet("a call", rank, RANKS, 0.15)

    with caplog.at_level(logging.WARNING):
        given = on_ranks(job, work)
    for rank in set(RANKS) - {missing}:
        assert isinstance(given[rank], RankError)
        assert f"rank {missing} on host{missing} did not come" in str(given[rank])
    assert f"has waited for rank {missing} on host{missing} for 0 s: a call" in caplog.text


def test_a_rank_whose_process_has_ended_is_not_waited_for(job, monkeypatch):
    gone = os.fork()
    if not gone:
        os._exit(0)
    namespace, pids = meetings._namespace(), {0: os.getpid(), 1: os.getpid(), 2: gone}
    monkeypatch.setattr(
        meetings, "own_member", lambda: Member(job.rank, "here", pids[job.rank], namespace)
    )
    given = on_ranks(job, lambda rank: rank == 2 or meet("a call", rank, RANKS, 60.0))
    os.waitpid(gone, 0)  # a zombie until now
    said = f"rank 2 on here (process {gone}) has ended, for which rank 0 on here waits: a call"
    assert [str(error) for error in given[:2]] == [said] * 2


def test_ranks_that_come_for_different_calls_are_told_both(job):
    given = on_ranks(job, lambda rank: meet(("a load", "an engine")[rank == 2], rank, RANKS))
    assert len({str(error) for error in given}) == 1
    assert "rank 0 on host0 is a load, rank 2 on host2 is an engine" in str(given[0])


@pytest.mark.parametrize("failing", RANKS)
def test_the_error_of_a_rank_that_cannot_come_is_told_once(job, failing):
    """It keeps its own; the next attempt of all is a new one."""

    def work(rank, fails):
        with coming("a call"):
            if rank == failing and fails:
                raise TypeError("no config")
            return len(meet("a call", rank, RANKS, 30.0))

    given = on_ranks(job, lambda rank: work(rank, True))
    assert on_ranks(job, lambda rank: work(rank, False)) == [SIZE] * SIZE
    assert [type(error) is TypeError for error in given] == [rank == failing for rank in RANKS]
    for rank in set(RANKS) - {failing}:
        said = f"a call failed on rank {failing} on host{failing}: TypeError: no config"
        assert str(given[rank]) == said


def test_an_error_on_all_ranks_leaves_nothing_behind(job):
    def work(rank):
        with pytest.raises(TypeError), coming("a call"):
            raise TypeError("no config")
        with coming("a call"):
            return len(meet("a call", rank, RANKS, 30.0))

    assert on_ranks(job, work) == [SIZE] * SIZE


def test_a_rank_that_comes_late_is_told_at_once_who_cannot_come(job):
    def work(rank):
        with coming("a call"):
            if rank == 1:
                raise TypeError("no config")
            meet("a call", None, RANKS, 5)

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


def test_the_first_rank_says_who_has_not_joined_the_job(monkeypatch, caplog):
    """Before there are process groups, which wait without a word."""
    monkeypatch.setattr(meetings, "LINE_SECONDS", 0.0)
    store = dist.HashStore()
    await_ranks(store, 2, SIZE)  # does not wait
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        first = pool.submit(await_ranks, store, 0, SIZE)
        for _ in range(6000):
            if caplog.messages:
                break
            time.sleep(0.01)
        await_ranks(store, 1, SIZE)
        first.result(60)
    (line,) = caplog.messages
    assert line.startswith("rank 0 on ") and line.endswith("s for rank 1 to join")
    monkeypatch.setattr(meetings, "COLLECTIVE_SECONDS", 0.0)
    with pytest.raises(RankError, match="for rank 3 to join: start all 4 ranks"):
        await_ranks(store, 0, SIZE + 1)
