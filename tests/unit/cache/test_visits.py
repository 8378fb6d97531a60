"""Whose time at risk is counted when, against a plain list of moments."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest

from megatron_hybrid.cache.visits import _GONE, AT_ONCE, LEAST_LONGEST, LEAST_WAIT, SHARE, Visits


def watched(now=0):
    return SimpleNamespace(edge="here", last_use=now, visit=None)


def test_visits_come_when_the_age_has_doubled_or_after_the_longest_wait():
    visits, state = Visits(), watched()
    visits.add(state, 0)
    moments = [now for now in range(1, 700) if visits.due(now)]
    assert moments == [8, 16, 32, 64, 128, 256, 384, 512, 640]


def test_the_more_are_watched_the_longer_is_the_longest_wait():
    """One request makes no more visits, and moments are rounded by a little."""
    visits, state = Visits(), watched()
    visits.adapt(100_000)
    visits.add(state, 0)
    moments = [now for now in range(1, 8000) if visits.due(now)]
    assert moments[:6] == [8, 16, 32, 64, 128, 256]
    waits = [later - sooner for sooner, later in pairwise(moments)]
    for wait, age in zip(waits, moments):
        assert 0 <= wait - min(age, 100_000 // SHARE) <= wait / 64


def test_a_use_puts_them_off():
    visits, state = Visits(), watched()
    visits.add(state, 0)
    moments = []
    for now in range(1, 200):
        if now in (30, 33):
            state.last_use = now
            visits.add(state, now)
        moments += [now for _ in visits.due(now)]
    assert moments == [8, 16, 41, 49, 65, 97, 161]


def test_each_is_visited_once_however_often_it_was_used():
    """Against a dictionary of the next moments."""
    chance = random.Random(0)
    visits, states, expected = Visits(), [], {}
    for now in range(1, 3000):
        due = {id(state) for state in visits.due(now)}
        assert due == {key for key, moment in expected.items() if moment == now}
        for state in states:
            if id(state) in due:
                wait = min(LEAST_LONGEST, now - state.last_use)
                expected[id(state)] = now + wait + (now % 2 if wait == LEAST_LONGEST else 0)
        if chance.random() < 0.2:
            states.append(watched(now))
            visits.add(states[-1], now)
            expected[id(states[-1])] = now + LEAST_WAIT
        for state in chance.sample(states, min(3, len(states))):
            state.last_use = now
            visits.add(state, now)
            expected[id(state)] = now + LEAST_WAIT
        if len(states) > 40:
            gone = states.pop(chance.randrange(40))
            gone.edge = None
            del expected[id(gone)]
        visits.adapt(len(states))
        visits.check_integrity(states)
        assert visits._num == sum(map(len, visits._due.values())) <= 1.25 * len(states) + _GONE


def test_one_request_makes_some_visits_and_the_next_the_others():
    visits = Visits()
    states = [watched() for _ in range(2 * AT_ONCE + 5)]
    for state in states:
        visits.add(state, 0)
    assert not any(visits.due(now) for now in range(1, LEAST_WAIT))
    found = [visits.due(LEAST_WAIT + now) for now in range(3)]
    assert [len(part) for part in found] == [AT_ONCE, AT_ONCE, 5]
    assert [state for part in found for state in part] == states


def test_what_is_forgotten_is_let_go():
    visits = Visits()
    states = [watched() for _ in range(1000)]
    for state in states:
        visits.add(state, 0)
    for state in states[10:]:
        state.edge = None
    visits.adapt(10)
    assert visits._num == 10
    assert visits.due(LEAST_WAIT) == states[:10]


def test_a_checkpoint_without_a_visit_is_noticed():
    visits, states = Visits(), [watched() for _ in range(3)]
    for state in states[:2]:
        visits.add(state, 0)
    visits.check_integrity(states[:2])
    for wrong in (states, states[:1]):
        with pytest.raises(RuntimeError, match="has no visit to come, or is not in the tree"):
            visits.check_integrity(wrong)
