"""What the cache says of a prompt, against what is known to have happened."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from cache_prompts import tokens
from settled import settled
from simulator import LARGE_STATES, SPECS, Simulator

from megatron_hybrid.cache.index.tree import Kind
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.report import MissReason


@pytest.fixture
def sim():
    return Simulator(settled(PrefixCache(LARGE_STATES, 3000)))


def test_nothing_known(sim):
    explanation = sim.cache.explain(tokens(50))
    assert (explanation.held_tokens, explanation.known_tokens, explanation.positions) == (0, 0, ())
    assert "nothing that starts like this prompt is known" in str(explanation)


def test_every_position_on_the_way(sim):
    prompt, answer = tokens(100), tokens(30, 1)
    sim.run(prompt, answer, declared=[40])
    follower = np.concatenate([prompt, answer, tokens(20, 2)])
    found = sim.cache.explain(follower).positions
    assert [(p.position, p.kind, p.is_stored, p.was_stored) for p in found] == [
        (40, Kind.JUNCTION, True, False),
        (100, Kind.PROMPT_END, True, False),
        (130, Kind.ANSWER_END, True, False),
    ]
    assert str(sim.cache.explain(follower)).splitlines() == [
        "130 of 150 prompt tokens are skipped (86.7%), KV of 130 is shared",
        "130 tokens are in the cache, 130 are known",
        "states on the way:",
        "       40  stored      junction or declared, not used yet",
        "      100  stored      end of a prompt, not used yet",
        "      130  stored      end of an answer, not used yet",
        "stops at 130: what follows is new",
    ]
    sim.run(follower)
    used = {p.position: p.uses for p in sim.cache.explain(follower).positions}
    assert used == {40: 0, 100: 0, 130: 1, 150: 0}


# Against what the request then gets ---------------------------------------------------------------


def predictions(seed: int, count: int):
    """Explanations on a small pool, each with the lease of the request that follows at once (None:
    there is no room yet), and whether other requests run."""
    choose = random.Random(seed)
    spec = choose.choice(list(SPECS.values()))
    longest, chunk = choose.randrange(30, 120), 32
    pages = 2
    while not PrefixCache(spec, pages).fits(longest, chunk):
        pages += 1
    sim = Simulator(PrefixCache(spec, pages + choose.choice((0, 0, 1, 2, 5, 20))))
    prompts, running = [[1]], []
    for _ in range(count):
        known = choose.choice(prompts)
        known = known[: choose.choice((len(known), choose.randrange(len(known))))]
        new = [choose.randrange(50) for _ in range(choose.choice((0, choose.randrange(60))))]
        prompt = (known + new or [2])[:longest]
        explanation = sim.cache.explain(np.array(prompt, np.int32), chunk_tokens=chunk)
        request = sim.start(prompt, chunk=chunk)
        yield explanation, request and request.lease, bool(running)
        if request is None:
            sim.cancel(running.pop(0))
            continue
        while request.done < len(prompt) and sim.forward(
            request, min(chunk, len(prompt) - request.done)
        ):
            pass
        prompts.append(prompt)
        if choose.random() < 0.3:
            running.append(request)
        else:
            sim.cancel(request)
        sim.check()


def check_predictions(seed: int, count: int) -> Counter:
    """Compare them, and count their kinds."""
    kinds: Counter = Counter()
    for explanation, lease, is_beside_others in predictions(seed, count):
        told = explanation.match
        if lease is None:
            assert is_beside_others
            kinds["waits, told" if explanation.lacks_room else "held back"] += 1
            continue
        report = lease.report
        got = replace(report, checkpoints_saved=0, checkpoints_skipped=0)
        assert told == got and not explanation.lacks_room, (seed, told, got)
        kinds["no room" if told.miss_reason is MissReason.NO_ROOM else "exact"] += 1
    return kinds


def test_what_it_promises_is_what_the_request_gets():
    kinds = sum((check_predictions(seed, 25) for seed in range(24)), Counter())
    assert min(kinds[kind] for kind in ("exact", "no room", "waits, told")) > 3, kinds


def test_the_state_that_finds_no_room_beside_the_request_is_told():
    cache = PrefixCache(SPECS["hybrid"], 2)
    pages = 2
    while not cache.fits(50, 50):
        pages += 1
        cache = PrefixCache(SPECS["hybrid"], pages)
    Simulator(cache).run(tokens(20))  # with its state, in a pool for 50 tokens and no state
    longer = np.concatenate([tokens(20), tokens(30, 1)])
    assert cache.match(longer).skipped_tokens == 20
    explanation = cache.explain(longer)
    assert (explanation.match.skipped_tokens, explanation.reason) == (0, MissReason.NO_ROOM)
    assert "stops at 0 (no_room): the pool has no room for the state" in str(explanation)
    assert cache.acquire(longer, capacity_tokens=50).report.miss_reason is MissReason.NO_ROOM
    beside = cache.explain(tokens(50, 2))
    assert beside.lacks_room
    assert str(beside).endswith("the pool has no room for that now: a request may skip less")
