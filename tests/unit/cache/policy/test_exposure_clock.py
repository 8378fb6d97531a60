"""When the exposure of each checkpoint is counted, against a plain list of ages."""

import random
from types import SimpleNamespace

import pytest

from megatron_hybrid.cache.policy import exposure_clock as clock_module
from megatron_hybrid.cache.policy.exposure_clock import _MAX_STALE, FIRST_AGE, ExposureClock


def watched(now=0):
    return SimpleNamespace(edge="here", last_use=now)


def test_a_checkpoint_is_due_when_its_age_has_doubled():
    clock, state = ExposureClock(), watched(now=5)
    clock.add(state)
    due = {now: clock.due(now) for now in range(6, 700)}
    assert {now: found for now, found in due.items() if found} == {
        5 + age: [(age, [state])] for age in (8, 16, 32, 64, 128, 256, 512)
    }


def test_a_use_restarts_the_ages():
    clock, state = ExposureClock(), watched()
    clock.add(state)
    moments = []
    for now in range(1, 200):
        if now in (30, 33):
            state.last_use = now
            clock.add(state)
        moments += [now for _, found in clock.due(now) for _ in found]
    assert moments == [8, 16, 41, 49, 65, 97, 161]


def test_each_is_visited_whenever_its_age_is_one_of_those_however_often_it_was_used():
    chance = random.Random(0)
    clock, states = ExposureClock(), []
    ages = {FIRST_AGE << k for k in range(20)}
    for now in range(1, 3000):
        found = [(age, id(state)) for age, group in clock.due(now) for state in group]
        expected = [(now - s.last_use, id(s)) for s in states if now - s.last_use in ages]
        assert sorted(found) == sorted(expected)
        if chance.random() < 0.2:
            states.append(watched(now))
            clock.add(states[-1])
        for state in chance.sample(states, min(3, len(states))):
            if state.last_use < now:
                state.last_use = now
                clock.add(state)
        if len(states) > 40:
            states.pop(chance.randrange(40)).edge = None
        clock.compact(len(states))
        clock.check_integrity(states)
        assert clock._num == sum(map(len, clock._used_at.values()))
        assert clock._num <= 1.25 * len(states) + _MAX_STALE


def test_forgotten_checkpoints_are_compacted():
    clock = ExposureClock()
    states = [watched(now) for now in range(1000)]
    for state in states:
        clock.add(state)
    for state in states[10:]:
        state.edge = None
    clock.compact(10)
    assert clock._num == 10
    assert len(clock._used_at) == 10
    for now, state in enumerate(states[:10]):
        assert clock.due(now + FIRST_AGE)[0] == (FIRST_AGE, [state])


def test_one_compaction_is_bounded(monkeypatch):
    monkeypatch.setattr(clock_module, "_COMPACTED_GROUPS", 100)
    clock = ExposureClock()
    states = [watched(now) for now in range(1000)]
    for state in states:
        clock.add(state)
    for state in states[::2]:
        state.edge = None
    left = []
    for _ in range(11):
        clock.compact(0)
        left.append(clock._num)
    assert left == [*range(950, 499, -50), 500]
    clock.check_integrity(states[1::2])


def test_a_checkpoint_without_a_visit_is_noticed():
    clock, states = ExposureClock(), [watched() for _ in range(3)]
    for state in states[:2]:
        clock.add(state)
    clock.check_integrity(states[:2])
    for wrong in (states, states[:1]):
        with pytest.raises(RuntimeError, match="has no visit to come, or is not in the tree"):
            clock.check_integrity(wrong)
