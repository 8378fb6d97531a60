"""Admission: how many run side by side, and at the cost of what."""

import numpy as np
import pytest
from simulator import Simulator

from megatron_hybrid.cache.admission import STEP_TOKENS, AnswerLengths, saved_by_one_more
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.spec import CacheSpec, KVGroup

SPEC = CacheSpec(16, (KVGroup(2, 64),), state_bytes=20_000, hidden_bytes=128)
STATE = SPEC.checkpoint_pages


def tokens(n, seed):
    return np.random.default_rng(seed).integers(0, 50_000, n).astype(np.int32)


@pytest.mark.parametrize(
    ("running", "answer", "expected"),
    [(1, 99, 10_000), (2, 99, 10_000 / 3), (9, 99, 20_000 / 90), (9, 0, 200 / 90)],
)
def test_what_one_more_saves(running, answer, expected):
    assert saved_by_one_more(running, answer) == pytest.approx(expected, rel=1e-3)


def test_what_each_one_more_saves_adds_up_to_what_all_save():
    """A request alone pays for all of its steps, one of 50 for a fiftieth."""
    saved = sum(saved_by_one_more(running, 299) for running in range(1, 50))
    assert saved == pytest.approx(300 * STEP_TOKENS * (1 - 1 / 50))


def test_answer_lengths_are_learnt():
    lengths = AnswerLengths()
    for _ in range(1000):
        lengths.observe(700)
    assert lengths.mean == pytest.approx(700, rel=1e-3)
    for _ in range(45):
        lengths.observe(0)
    assert 300 < lengths.mean < 400


def served(num_pages, documents=8, visits=30, mode="restore"):
    """A cache in which each of so many documents of 480 tokens was asked about in turn."""
    sim = Simulator(PrefixCache(SPEC, num_pages, mode))
    for visit in range(visits):
        for document in range(documents):
            question = tokens(20, 1000 + 100 * visit + document)
            sim.run(np.concatenate([tokens(480, document), question]), tokens(5, visit))
    return sim


def pages_of(documents):
    return documents * (2 * STATE + 40)


def start_strangers(sim, most=40):
    """Requests that share nothing start, until one is refused; how many did."""
    for n in range(most):
        if sim.start(tokens(480, 50_000 + n)) is None:
            return n
    return most


def test_beyond_some_number_requests_wait_rather_than_push_out_what_others_use():
    sim = served(pages_of(8))
    cache = sim.cache
    started = start_strangers(sim)
    assert started >= 2
    assert cache.stats()["held_back"] == 1 == cache.stats()["refused"]
    prompts = [np.concatenate([tokens(480, document), tokens(20, 9)]) for document in range(8)]
    skips = [cache.match(prompt).skipped_tokens for prompt in prompts]
    assert sum(skip == 480 for skip in skips) >= 4, skips
    # it starts when others have ended, at the latest when it is alone
    for lease in list(cache._leases)[1:]:
        cache.release(lease)
    assert sim.start(tokens(480, 50_000 + started)) is not None


def test_without_room_nothing_is_held_back_but_refused():
    sim = served(pages_of(8))
    cache = sim.cache
    lease = cache.acquire(tokens(480, 1), capacity_tokens=(pages_of(8) - 60) * 16)
    assert lease is not None
    assert cache.acquire(tokens(1600, 2), capacity_tokens=1600) is None
    assert cache.stats()["held_back"] == 0
    assert cache.stats()["refused"] == 1


@pytest.mark.parametrize("mode", ["memory_only", "off"])
def test_where_nothing_is_restored_nothing_is_held_back(mode):
    sim = served(pages_of(8), mode=mode)
    assert start_strangers(sim) == (pages_of(8) - 1) // 30
    assert sim.cache.stats()["held_back"] == 0


def test_what_is_worth_nothing_holds_nobody_back():
    sim = Simulator(PrefixCache(SPEC, pages_of(8)))
    for n in range(40):  # nobody comes again
        sim.run(tokens(480, n), tokens(200, n))
    assert start_strangers(sim) > 10


def test_those_who_were_preempted_are_not_held_back():
    sim = served(pages_of(8))
    running = sim.start(tokens(480, 77_777))
    sim.forward(running, 300)
    parked = sim.preempt(running)
    start_strangers(sim)
    assert sim.cache.stats()["held_back"] == 1
    assert sim.resume(parked) is not None
