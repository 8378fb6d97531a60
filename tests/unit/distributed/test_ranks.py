"""Messages between ranks, here threads that are connected by sockets."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import numpy as np
import pytest
from waiting import LIMIT_S

from megatron_hybrid.distributed import ranks as module
from megatron_hybrid.distributed.ranks import ONE_RANK, RankError, Ranks

SIZE = 3
HOST = socket.gethostname()


@pytest.fixture
def ranks():
    pairs = [socket.socketpair() for _ in range(SIZE - 1)]
    ends = [[Connection(end.detach()) for end in pair] for pair in pairs]
    first = Ranks(0, SIZE, [near for near, _ in ends])
    others = [Ranks(rank, SIZE, [far]) for rank, (_, far) in enumerate(ends, start=1)]
    yield [first, *others]
    for each in (first, *others):
        each.close()


def on_all(ranks, work):
    """What `work(ranks of a rank)` returns or raises on each."""

    def run(own):
        try:
            return work(own)
        except Exception as error:
            return error

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, ranks, timeout=LIMIT_S))


def test_the_largest_value_counts_at_each_place(ranks):
    given = on_all(ranks, lambda own: own.maximum([own.rank, -own.rank, 1 << 62]))
    assert given == [[2, 0, 1 << 62]] * SIZE
    assert on_all(ranks, lambda own: own.minimum(10 - own.rank)) == [8] * SIZE


def test_values_are_gathered_in_order_and_broadcast_from_any_rank(ranks):
    assert on_all(ranks, lambda own: own.gather({own.rank})) == [[{0}, {1}, {2}]] * SIZE
    for source in range(SIZE):
        given = on_all(ranks, lambda own, source=source: own.broadcast(own.name, source))
        assert given == [f"rank-{source}-of-3"] * SIZE


def test_nothing_is_sent_to_nobody_or_of_nothing(ranks):
    assert ONE_RANK.maximum([3]) == [3] and ONE_RANK.gather("a") == ["a"]
    assert on_all(ranks, lambda own: own.maximum([])) == [[]] * SIZE
    assert not any(own.sent_bytes for own in ranks)


@pytest.mark.parametrize("failing", range(SIZE))
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_error_of_one_rank_is_raised_by_all_wherever_they_are(ranks, failing, depth):
    """Before, between and inside of the exchanges of the others; they stay usable."""

    def work(own):
        with own.raise_on_all("the whole"):
            if own.rank == failing and depth == 0:
                raise OSError("the disk is gone")
            own.maximum([1])
            with own.raise_on_all("a part"):
                if own.rank == failing and depth == 1:
                    raise OSError("the disk is gone")
                own.gather(own.rank)
            if own.rank == failing and depth == 2:
                raise OSError("the disk is gone")
        return own.rank

    for _ in range(2):
        given = on_all(ranks, work)
        for rank, error in enumerate(given):
            assert isinstance(error, OSError if rank == failing else RankError)
            assert "the disk is gone" in str(error)
            assert rank == failing or f"failed on rank {failing}" in str(error)
    assert on_all(ranks, lambda own: own.gather(own.rank)) == [[0, 1, 2]] * SIZE


def test_an_error_that_was_told_may_be_raised_again_later(ranks):
    error = MemoryError("there is no more")

    def work(own):
        with own.raise_on_all("a call"):
            if own.rank == 1:
                raise error

    for _ in range(2):
        given = on_all(ranks, work)
        assert [type(each) for each in given] == [RankError, MemoryError, RankError]


def test_different_calls_are_named(ranks):
    given = on_all(ranks, lambda own: own.gather(1) if own.rank == 2 else own.maximum([1]))
    for error in given:
        assert "exchange 'maximum', rank 2 on" in str(error) and "exchange 'gather'" in str(error)


def test_the_first_difference_is_named_on_all(ranks):
    def work(own):
        own.require_equal({"a size": 4, "a name": own.rank == 1})

    for error in on_all(ranks, work):
        assert isinstance(error, ValueError)
        said = f"a name differs between ranks: rank 0 on {HOST} has False, rank 1 on {HOST} has Tru"
        assert str(error).startswith(said)
    alone = on_all(ranks, lambda own: own.require_equal({f"of {own.rank}": own.rank}))
    assert alone == [None] * SIZE


DIFFERENCES = {
    # What rank 1 notes where all others note ("add", 3 tokens, seed 5), ("step"); what is said.
    "another token": (
        [("add", {"tokens": np.array([1, 9, 3]), "seed": 5}), ("step", {})],
        "add with 2 at position 1 of tokens, {} has called add with 9 at position 1 of tokens",
    ),
    "another length": (
        [("add", {"tokens": np.array([1]), "seed": 5}), ("step", {})],
        "add with 3 tokens, {} has called add with 1 tokens",
    ),
    "another seed": (
        [("add", {"tokens": np.array([1, 2, 3]), "seed": 6}), ("step", {})],
        "add with seed 5, {} has called add with seed 6",
    ),
    "a call left out": ([("step", {})], "add of 3 tokens, {} has called step"),
    "a call too many": (
        [("add", {"tokens": np.array([1, 2, 3]), "seed": 5}), ("cancel", {}), ("step", {})],
        "step, {} has called cancel",
    ),
    "nothing": ([], "add of 3 tokens, {} has called nothing"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_have_made_different_calls_are_told_both(ranks, name):
    noted, said = DIFFERENCES[name]
    told = []

    def work(own):
        own.on_difference = told.append
        usual = [("add", {"tokens": np.array([1, 2, 3]), "seed": 5}), ("step", {})]
        for _ in range(2):
            for call in usual:
                own.calls.note(*call)
            own.maximum([1])
        for call in noted if own.rank == 1 else usual:
            own.calls.note(*call)
        return own.maximum([1])

    texts = {str(error) for error in on_all(ranks, work)}
    (text,) = texts
    assert f"rank 0 on {HOST} has called {said.format(f'rank 1 on {HOST}')}" in text
    assert told == [text] * SIZE


def test_an_error_that_all_ranks_give_is_no_failure(ranks):
    """Of one rank alone it is, for all, also before their next call."""

    def refuse(own):
        own.broadcast_error("add", ValueError("too long"))
        return own.rank

    assert on_all(ranks, refuse) == [0, 1, 2]

    def refuse_on_one(own):
        if own.rank == 1:
            own.broadcast_error("add", OSError("no vocabulary"))
            raise OSError("no vocabulary")
        own.calls.note("add", {})
        own.maximum([1])

    given = on_all(ranks, refuse_on_one)
    assert [type(error) for error in given] == [RankError, OSError, RankError]
    assert str(given[2]) == f"add failed on rank 1 on {HOST}: OSError: no vocabulary"


def test_a_rank_that_leaves_ends_the_wait_of_the_others(ranks):
    ranks[1].close()
    given = on_all([ranks[0]], lambda own: own.gather(1))
    assert isinstance(given[0], (EOFError, OSError))


def test_a_fork_does_not_hide_that_its_parent_has_ended(ranks):
    """The child's copies of the sockets are closed."""
    child = os.fork()
    if not child:
        os._exit(int(not all(c.closed for own in ranks for c in own.connections)))
    assert os.waitpid(child, 0)[1] == 0
    assert not any(c.closed for own in ranks for c in own.connections)


def test_strangers_on_the_port_are_sent_away(monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.2)
    secret = b"s" * 32
    server = socket.create_server(("127.0.0.1", 0), backlog=8)
    server.settimeout(120)
    address = server.getsockname()
    silent = socket.create_connection(address)
    loud = socket.create_connection(address)
    loud.sendall(b"GET / HTTP/1.1\r\nHost: somebody's browser\r\n\r\n")
    gone = socket.create_connection(address)
    gone.close()

    def connect(kind):
        return module._connect(address, secret, 1, kind)

    with ThreadPoolExecutor(1) as thread:
        connections = thread.map(connect, ("control", "watch"))
        control, watched = module._accept(server, secret, 1)
        found = list(connections)
    control[1].send("hello")
    assert found[0].recv() == "hello" and set(watched) == {1}
    for each in (silent, loud, *found, *control.values(), *watched.values()):
        each.close()
