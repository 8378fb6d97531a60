"""The simple policy: what its counts say, and that it decides alike each time."""

import pytest

from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.simple import (
    PRIOR_GAP,
    PRIOR_USED,
    Fates,
    HyperbolicReuse,
    SimplePolicy,
    whole_power,
)
from benchmarks.replay.workloads import WORKLOADS
from megatron_hybrid.cache.index.tree import NO_ORIGIN, Checkpoint, Kind
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.runner import replay


def test_a_class_without_counts_has_the_priors():
    fates = Fates(Fates())
    assert (fates.used, fates.gap) == (PRIOR_USED, PRIOR_GAP)


def test_a_class_learns_how_many_are_used_and_when():
    fates = Fates(Fates())
    for number in range(1000):
        fates.count(1, 0, 0, 10 * number + 1)
        if number % 4:
            fates.count(0, 1, 20, 10 * number + 1)
    assert fates.used == pytest.approx(0.75, abs=0.01)
    assert fates.gap == pytest.approx(20, abs=0.5)


def test_states_that_may_still_be_used_do_not_count_as_ended():
    """Little's law: 1 use per request, 50 requests each, so 50 to 100 wait."""
    fates = Fates(Fates())
    for now in range(1, 201):
        fates.count(1, 0, 0, now)
        if now > 50:
            fates.count(0, 1, 50, now)
    assert fates.used > 0.98


def reuse_at(now):
    reuse = HyperbolicReuse(needs_state=True)
    reuse.now = now
    return reuse


def checkpoint(uses, born, last_use):
    found = Checkpoint(None, 100, Kind.JUNCTION, born, NO_ORIGIN)
    found.uses, found.last_use = uses, last_use
    return found


def test_rates_rise_with_uses_and_fall_with_age():
    reuse = reuse_at(1000)
    rates = [reuse.rate(checkpoint(uses, 500, 900)) for uses in (1, 3, 9)]
    assert rates == sorted(rates)
    idle = [reuse.rate(checkpoint(5, 0, last_use)) for last_use in (999, 800, 400)]
    assert idle == sorted(idle, reverse=True)


def test_silence_says_more_of_a_state_that_was_used_often():
    reuse = reuse_at(1000)
    often, rarely = (
        reuse.rate(checkpoint(uses, 0, 300)) / reuse.rate(checkpoint(uses, 0, 1000))
        for uses in (30, 2)
    )
    assert often < rarely / 10


def test_powers_are_products():
    assert whole_power(1.5, 5) == 1.5 * 1.5**2 * 1.5**2
    assert whole_power(3.0, 0) == 1.0
    assert whole_power(10.0, 10**6) == float("inf")


@pytest.mark.parametrize("geometry", ["nemotron-h-8b", "gemma-3-27b", "llama-3-8b"])
def test_it_decides_alike_each_time_and_keeps_the_cache_whole(geometry):
    spec, requests = GEOMETRIES[geometry].spec("int8"), list(WORKLOADS["chat"].generate(150))
    engines = [Ours(spec, 4e9, SimplePolicy(spec)) for _ in range(2)]
    for engine in engines:
        replay(requests, engine, 4)
        engine.cache.check_integrity()
    assert engines[0].cache.digest() == engines[1].cache.digest()
    assert engines[0].cache.num_evicted > 0
