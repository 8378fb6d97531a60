"""Hazards by age and the rates that follow, against known waiting times and every moment of giving
up."""

import numpy as np
import pytest

from megatron_hybrid.cache.policy.hazards import (
    AGES,
    BOUNDS,
    WIDTH_A,
    age_class,
    best_rates,
    count_by_age,
    exp_minus,
    exposure_beyond,
    hazards,
    ordered_sum,
)


def test_ages_are_two_classes_per_octave():
    for k, start in enumerate(BOUNDS[:-1]):
        assert age_class(start) == k
        assert age_class(start + 1e-6) == k
        if k:
            assert age_class(start - 1e-6) == k - 1
        if k > 4:
            assert start == pytest.approx(2 ** (k / 2), abs=0.5)
    assert [age_class(age) for age in (0, 1, 2, 3, 4, 5, 6, 8)] == [0, 1, 2, 3, 4, 4, 5, 6]
    assert age_class(1e12) == AGES - 1


def test_every_class_has_its_share_of_whole_ages():
    """Ages are whole numbers of requests: a class that has more of them than its width would show
    more uses per time at risk, and its neighbour less."""
    for age in range(2000):
        k = age_class(age + 0.5)
        assert BOUNDS[k] <= age < age + 1 <= BOUNDS[k + 1]


@pytest.mark.parametrize("scale", [1.0, 0.75])
def test_counts_and_spans_against_loops(scale):
    random = np.random.default_rng(3)
    start = random.integers(0, 9 * BOUNDS[AGES - 1], 500) * random.random(500) ** 8 // 1 * scale
    end = start + random.integers(1, 2000, 500) * scale
    cls = random.integers(0, 5, 500)
    uses, risk = np.zeros((6, AGES)), np.zeros((6, AGES))
    for c, a, b in zip(cls, start.tolist(), end.tolist()):
        uses[c, age_class(a)] += 1
        for k in range(AGES):
            last = np.inf if k == AGES - 1 else BOUNDS[k + 1]
            risk[c, k] += max(0.0, min(b, last) - max(a, BOUNDS[k]))
    assert set(BOUNDS) & set(start) and start.max() > BOUNDS[AGES - 1]  # both edges are met
    assert count_by_age(cls, start, 6).tolist() == uses.tolist()
    found = exposure_beyond(cls, start, 6) - exposure_beyond(cls, end, 6)
    assert found == pytest.approx(risk, rel=1e-9, abs=1e-6)
    assert not found[5].any()
    none = np.empty(0)
    for count in (count_by_age, exposure_beyond):
        assert not count(none.astype(int), none, 2).any()


def fates(rate_at, n, seed, until=3000):
    """Uses and time at risk by age class of n states, each followed to its first use, or to the
    end: an own loop over requests. rate_at(age): the true hazard at each age in requests."""
    random = np.random.default_rng(seed)
    uses, risk = np.zeros(AGES), np.zeros(AGES)
    rates = np.array([rate_at(age) for age in range(until)])
    alive = n
    for age in range(until):
        hit = random.binomial(alive, -np.expm1(-rates[age]))
        k = age_class(age + 0.5)
        risk[k] += alive - hit / 2
        uses[k] += hit
        alive -= hit
    return uses, risk


def test_hazards_recover_known_rates():
    truth = [
        lambda age: 0.2 if age < 8 else 0.001,
        lambda age: 0.002 if age < 32 else 0.02,
        lambda age: 0.01,
        lambda age: 0.05,
    ]
    uses, risk = (np.array(c) for c in zip(*(fates(r, 20_000, i) for i, r in enumerate(truth))))
    hazard = hazards(uses, risk, np.full(4, 1e-3), weight=3.0)
    for cls, rate_at in enumerate(truth):
        for k in range(AGES):
            if uses[cls, k] > 400:
                middle = (BOUNDS[k] + BOUNDS[k + 1]) / 2
                assert hazard[cls, k] == pytest.approx(rate_at(middle), rel=0.15), (cls, k)
    assert (uses > 400).sum() > 25


def test_the_weight_is_that_of_younger_ages():
    uses, risk = np.zeros((1, AGES)), np.full((1, AGES), 1.0)
    uses[0, 3], risk[0, 3] = 10, 100
    hazard = hazards(uses, risk, np.array([0.05]), weight=5.0)[0]
    before = 0.05
    for k in range(AGES):
        before = (uses[0, k] + 5) / (risk[0, k] + 5 / before)
        assert hazard[k] == pytest.approx(before)


def brute_force_rate(waits, age, horizon):
    """Among those that waited at least `age`: the largest uses per request over all moments of
    giving up, each tried on every waiting time."""
    left = np.sort(waits[waits > age]) - age
    total = np.cumsum(left)
    n = np.arange(1, len(left) + 1)
    stops = left[left <= horizon - age]
    index = np.searchsorted(left, stops, side="right") - 1
    time = total[index] + (len(left) - n[index]) * stops
    seen = n[index] >= 2000  # a handful tells nothing
    return (n[index] / time)[seen].max()


def sampled_waits(hazard, n, seed):
    """Waiting times with this hazard per age class: by the inverse of its integral."""
    start = np.array(BOUNDS)
    integral = np.concatenate([[0], np.cumsum(hazard * WIDTH_A)])
    level = np.random.default_rng(seed).exponential(size=n)
    waits = np.interp(level, integral, start)
    waits[level > integral[-1]] = np.inf
    return waits


SHAPES = {
    "constant": lambda k: 0.01,
    "falling": lambda k: 0.3 * 0.75**k,
    "periodic": lambda k: 0.05 if 8 <= k < 10 else 0.0005,  # comes back after 16 to 31 requests
    "young or old": lambda k: 0.1 if k < 3 else 0.02 if 12 <= k < 14 else 0.0002,
}


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_best_rates_against_every_moment_of_giving_up(shape):
    hazard = np.array([SHAPES[shape](k) for k in range(AGES)])
    best = best_rates(hazard[None])[0]
    waits = sampled_waits(hazard, 400_000, seed=5)
    waits = np.minimum(waits, 1e9)
    for k in (0, 2, 5, 8, 9, 12):
        if (waits > BOUNDS[k]).sum() < 100_000:
            continue
        expected = brute_force_rate(waits, BOUNDS[k], horizon=BOUNDS[k + 16])
        assert best[k] == pytest.approx(expected, rel=0.06), k


def test_best_rates_by_hand():
    """One age at which it is used, nearly for certain."""
    hazard = np.full((1, AGES), 1e-9)
    hazard[0, 4] = 1.0  # ages 4 and 5
    best = best_rates(hazard)[0]
    width = BOUNDS[5] - BOUNDS[4]
    used = 1 - np.exp(-width)
    assert best[4] == pytest.approx(1.0)
    for k in range(4):
        assert best[k] == pytest.approx(used / (BOUNDS[4] - BOUNDS[k] + used), rel=1e-3)
    assert best[5] == pytest.approx(1e-9)
    assert best_rates(np.full((2, AGES), 0.25)) == pytest.approx(0.25)


def test_exponentials_and_sums():
    x = np.concatenate([np.linspace(0, 20, 201), [1e3, 1e9]])
    assert exp_minus(x) == pytest.approx(np.exp(-x), rel=0.02, abs=1e-9)
    assert exp_minus(x)[0] == 1
    rows = np.random.default_rng(0).normal(size=(50, 3)) * 10.0 ** np.arange(50)[:, None]
    assert ordered_sum(rows).tolist() == [sum(column) for column in rows.T.tolist()]
    assert ordered_sum(rows[:, 0]) == sum(rows[:, 0].tolist())
