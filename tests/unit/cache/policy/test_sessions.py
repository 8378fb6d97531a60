"""Hazards by turn, against sessions that were drawn with known shares and waits."""

import numpy as np
import pytest

from megatron_hybrid.cache.policy.hazards import AGES, BOUNDS, WIDTH_A, age_class
from megatron_hybrid.cache.policy.sessions import TURN_CLASSES, session_hazards, turn_class


def test_turns_up_to_seven_are_classes_and_then_four_per_octave():
    first = {turn_class(turns): turns for turns in range(200, 0, -1)}
    assert sorted(first) == list(range(TURN_CLASSES))
    expected = [*range(1, 8), 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert [first[k] for k in range(TURN_CLASSES)] == expected
    assert turn_class(10**6) == TURN_CLASSES - 1


def drawn(share_at, wait_rate, n, seed, until=500):
    """Uses and time at risk [K, A] of n sessions at each turn k, the part share_at(k) of which is
    back after a wait of this rate; each is watched up to an age of `until` requests."""
    random = np.random.default_rng(seed)
    uses, risk = np.zeros((TURN_CLASSES, AGES)), np.zeros((TURN_CLASSES, AGES))
    for k in range(TURN_CLASSES):
        back = random.random(n) < share_at(k)
        waits = np.where(back, random.geometric(-np.expm1(-wait_rate), n), until + 1)
        for age in range(until):
            risk[k, age_class(age)] += (waits > age).sum()
            uses[k, age_class(age)] += (waits == age + 1).sum()
    return uses, risk


def learnt(uses, risk, times):
    back = np.ones_like(uses)
    for _ in range(times):
        hazard, back = session_hazards(uses, risk, back, mean=1e-3)
    return hazard, back


SHARES = {
    "agents": lambda k: 1.0 if k < 12 else 0.9 if k < 15 else 0.5,
    "chats": lambda k: 0.95 - 0.04 * k,
    "regulars": lambda k: 0.3 + 0.03 * k,
}


@pytest.mark.parametrize("law", sorted(SHARES))
@pytest.mark.parametrize("wait_rate", [0.2, 0.03])
def test_hazards_recover_those_that_sessions_were_drawn_with(law, wait_rate):
    """Shares too, if there are turns after which all go on: if not, a session that has ended and
    one that waits longer than any other look alike."""
    hazard, back = learnt(*drawn(SHARES[law], wait_rate, 12_000, seed=1), times=30)
    for k in range(TURN_CLASSES):
        s = SHARES[law](k)
        for age in range(AGES):
            start, end = BOUNDS[age], BOUNDS[age + 1]
            if end * wait_rate > 2:  # few are left to tell
                break
            longer = np.exp(-wait_rate * np.linspace(start, end, 50)).mean()
            will_be_back = s * longer / (1 - s + s * longer)
            if law == "agents":
                assert back[k, age] == pytest.approx(will_be_back, abs=0.06), (k, age)
            assert hazard[k, age] == pytest.approx(wait_rate * will_be_back, rel=0.25), (k, age)


def test_who_has_been_away_for_long_has_ended_where_sessions_end():
    """The same waits in the same table: at 100 requests an agent that never ends at this turn is
    still expected, one that may have ended hardly is."""
    uses, risk = drawn(lambda k: 1.0 if k < 10 else 0.6, 0.03, 2000, seed=2)
    hazard, _ = learnt(uses, risk, times=30)
    old = age_class(100)
    assert hazard[:10, old].min() > 0.02
    assert hazard[10:, old].max() < 0.005


def test_one_turn_learns_waits_from_the_others():
    """Two uses at a turn, both early: how long waits are is known from the other turns."""
    uses, risk = drawn(lambda k: 0.8, 0.03, 1000, seed=3)
    uses[5] = risk[5] = 0
    uses[5, age_class(1)], risk[5, :3] = 2, 2 * WIDTH_A[:3]
    hazard, _ = learnt(uses, risk, times=10)
    others = np.delete(hazard, 5, axis=0).mean(0)
    assert hazard[5, :20] == pytest.approx(others[:20], rel=0.35)


def test_a_turn_without_observations_has_the_mean_share():
    uses, risk = drawn(lambda k: 0.7, 0.05, 2000, seed=4)
    uses[9] = risk[9] = 0
    hazard, _ = learnt(uses, risk, times=10)
    assert hazard[9, :18] == pytest.approx(np.delete(hazard, 9, axis=0).mean(0)[:18], rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_no_pending_session_means_all_continue(seed):
    """At one turn all 40 sessions return, half as late again as at others; at most other turns a
    tenth does not."""
    uses, risk = drawn(lambda k: 0.9 if k < 10 else 1.0, 0.03, 2000, seed=7)
    slow_uses, slow_risk = drawn(lambda k: 1.0, 0.02, 40, seed)
    uses[5], risk[5] = slow_uses[5], slow_risk[5]
    _, back = learnt(uses, risk, times=20)
    late = age_class(100)
    assert back[5, late] > 0.6
    assert np.delete(back[:10], 5, axis=0)[:, late].max() < 0.5


def test_few_uses_tell_no_turns_apart():
    uses, risk = np.zeros((TURN_CLASSES, AGES)), np.zeros((TURN_CLASSES, AGES))
    uses[3, 2], risk[3, :4], risk[4, :12] = 2, 5, 10 * WIDTH_A[:12]
    before = np.full_like(uses, 0.5)
    hazard, back = session_hazards(uses, risk, before, mean=0.01)
    assert (hazard == hazard[0]).all()
    assert (back == 1).all()
    uses[3, 2] = 3
    hazard, back = session_hazards(uses, risk, before, mean=0.01)
    assert hazard[3, 12] > 1.2 * hazard[4, 12]
    assert back.min() < 1


def test_groups_share_nothing():
    """Several groups at once are each as if they were alone, whether they are known or not."""
    groups = [drawn(SHARES[law], 0.05, n, seed=n) for law, n in (("agents", 900), ("chats", 300))]
    groups.append((np.zeros((TURN_CLASSES, AGES)), groups[0][1]))
    together = learnt(*map(np.stack, zip(*groups)), times=3)
    for g, group in enumerate(groups):
        for all_of_it, alone in zip(together, learnt(*group, times=3)):
            assert np.array_equal(all_of_it[g], alone)


def test_without_a_use_the_mean_of_all_states_stands_in():
    none = np.zeros((TURN_CLASSES, AGES))
    hazard, _ = session_hazards(none, none, np.ones_like(none), mean=0.07)
    assert hazard[:, 0] == pytest.approx(0.07)


def test_long_waits_and_short_ones_by_turn():
    """Chats beside agents: early turns wait long, late ones are quick. One law of waits fits
    neither, so what each turn shows itself moves its hazards."""
    (short, short_risk), (long, long_risk) = (
        drawn(lambda k: 0.95, r, 16_000, 6) for r in (0.3, 0.01)
    )
    late = np.arange(TURN_CLASSES)[:, None] >= 10
    uses, risk = np.where(late, short, long), np.where(late, short_risk, long_risk)
    hazard, _ = learnt(uses, risk, times=20)
    for k, age, expected in ((5, 0, 0.01), (5, 8, 0.01), (15, 0, 0.26), (15, 3, 0.25)):
        assert hazard[k, age] == pytest.approx(expected, rel=0.25), (k, age)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("wait_rate", [5.0, 1e-4])
def test_hazards_are_positive_and_finite_whatever_was_seen(share, wait_rate):
    uses, risk = drawn(lambda k: share, wait_rate, 50, seed=5)
    uses[0, 0] += 3
    hazard, back = learnt(uses * 1e3, risk * 1e3, times=50)
    assert np.isfinite(hazard).all() and (hazard > 0).all()
    assert (back >= 0).all() and (back <= 1).all()
