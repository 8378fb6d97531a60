"""Placement: which positions deserve a checkpoint, as tables."""

import pytest

from megatron_hybrid.cache.placement import prefill_positions, saves_work, worth_waiting


@pytest.mark.parametrize(
    ("prompt", "skipped", "shared", "declared", "needs_state", "expected"),
    [
        # a new prompt: its end
        (100, 0, 0, (), True, (100,)),
        # the junction where it leaves a cached prompt
        (100, 0, 60, (), True, (60, 100)),
        # a checkpoint is at the junction already
        (100, 60, 60, (), True, (100,)),
        (100, 40, 60, (), True, (60, 100)),
        # all of it is cached: with and without the state at its end
        (100, 100, 100, (), True, ()),
        (100, 60, 100, (), True, (100,)),
        # declared positions: in order, once, and only those that the prefill passes
        (100, 0, 0, (70, 30, 70), True, (30, 70, 100)),
        (100, 30, 60, (20, 30, 31, 100, 101, -5), True, (31, 60, 100)),
        # KV alone resumes: only the last hidden state is worth keeping
        (100, 60, 60, (80,), False, (100,)),
        (100, 99, 100, (), False, (100,)),
        (100, 100, 100, (), False, ()),
    ],
)
def test_prefill_positions(prompt, skipped, shared, declared, needs_state, expected):
    assert prefill_positions(prompt, skipped, shared, declared, needs_state) == expected


@pytest.mark.parametrize(
    ("position", "needs_state", "expected"),
    [
        (50, True, True),
        (100, True, True),
        (150, True, True),
        (50, False, False),
        (100, False, True),
        (150, False, False),
    ],
)
def test_saves_work(position, needs_state, expected):
    assert saves_work(position, prompt_tokens=100, needs_state=needs_state) is expected


@pytest.mark.parametrize(
    ("own_resume", "other_done", "other_position", "expected"),
    [
        (0, 0, 100, True),  # the same prompt added twice at once
        (0, 64, 100, True),  # the other is well ahead
        (80, 64, 100, False),  # this one can start further than the other has come
        (64, 64, 100, True),
        (100, 100, 100, False),  # nothing to gain
        (0, 0, 0, False),
    ],
)
def test_worth_waiting(own_resume, other_done, other_position, expected):
    assert worth_waiting(own_resume, other_done, other_position) is expected
