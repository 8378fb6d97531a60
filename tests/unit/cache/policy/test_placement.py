"""Placement: which positions deserve a checkpoint, as tables."""

import pytest

from megatron_hybrid.cache.index.tree import Kind
from megatron_hybrid.cache.policy.placement import (
    NO_INTERVAL,
    choose_interval,
    most_wanted,
    prefill_positions,
    tail_position,
    worth_waiting,
)

END, JUNCTION, MESSAGE = Kind.PROMPT_END, Kind.JUNCTION, Kind.MESSAGE
TAIL, INTERVAL = Kind.TAIL, Kind.INTERVAL


@pytest.mark.parametrize(
    ("skipped", "known", "declared", "tail", "distance", "expected"),
    [
        # a new prompt: its end, and where its successors will probably leave it
        (0, 0, (), 100, NO_INTERVAL, {100: END}),
        (0, 0, (), 68, NO_INTERVAL, {68: TAIL, 100: END}),
        # the junction where it leaves a known prompt
        (0, 60, (), 100, NO_INTERVAL, {60: JUNCTION, 100: END}),
        (40, 60, (), 68, NO_INTERVAL, {60: JUNCTION, 68: TAIL, 100: END}),
        # a state is at the junction already, or all is known: with and without the state at its end
        (60, 60, (), 100, NO_INTERVAL, {100: END}),
        (60, 100, (), 100, NO_INTERVAL, {100: END}),
        (100, 100, (), 100, NO_INTERVAL, {}),
        # declared positions, and only those that the prefill passes
        (0, 0, (70, 30, 70), 100, NO_INTERVAL, {30: JUNCTION, 70: JUNCTION, 100: END}),
        (
            30,
            60,
            (20, 30, 31, 100, 101, -5),
            100,
            NO_INTERVAL,
            {31: JUNCTION, 60: JUNCTION, 100: END},
        ),
        # a place that is two things is the first of: end, junction, tail, interval
        (0, 60, (), 60, 30, {30: INTERVAL, 60: JUNCTION, 90: INTERVAL, 100: END}),
        (0, 0, (), 60, 30, {30: INTERVAL, 60: TAIL, 90: INTERVAL, 100: END}),
        # a tail that is skipped
        (60, 60, (), 50, NO_INTERVAL, {100: END}),
        # intervals: multiples of the distance beyond what is skipped, before the end
        (0, 0, (), 100, 32, {32: INTERVAL, 64: INTERVAL, 96: INTERVAL, 100: END}),
        (31, 0, (), 100, 32, {32: INTERVAL, 64: INTERVAL, 96: INTERVAL, 100: END}),
        (32, 0, (), 100, 32, {64: INTERVAL, 96: INTERVAL, 100: END}),
        (100, 100, (), 100, 32, {}),
    ],
)
def test_prefill_positions(skipped, known, declared, tail, distance, expected):
    assert (
        prefill_positions(100, skipped, known, declared, (), tail, distance, 16, NO_INTERVAL)
        == expected
    )


@pytest.mark.parametrize(
    ("skipped", "known", "messages", "expected"),
    [
        (0, 0, (30, 70), {30: MESSAGE, 64: INTERVAL, 70: MESSAGE, 90: TAIL, 100: END}),
        # what else a start is comes before or after
        (0, 30, (30, 64, 90, 100), {30: JUNCTION, 64: MESSAGE, 90: MESSAGE, 100: END}),
        # right behind the state that a turn goes on from there is nothing to gain
        (50, 50, (30, 51, 65), {64: INTERVAL, 90: TAIL, 100: END}),
        (50, 50, (66,), {64: INTERVAL, 66: MESSAGE, 90: TAIL, 100: END}),
        (0, 0, (15,), {64: INTERVAL, 90: TAIL, 100: END}),
        # nor right behind another start
        (0, 0, (55, 30, 45), {30: MESSAGE, 55: MESSAGE, 64: INTERVAL, 90: TAIL, 100: END}),
        (0, 0, (1, 30, 46), {30: MESSAGE, 46: MESSAGE, 64: INTERVAL, 90: TAIL, 100: END}),
        (100, 100, (100,), {}),
    ],
)
def test_starts_of_messages(skipped, known, messages, expected):
    assert prefill_positions(100, skipped, known, (), messages, 90, 64, 16, NO_INTERVAL) == expected


@pytest.mark.parametrize(
    ("prompt", "skipped", "weights", "expected"),
    [
        (100, 0, [(0, 1.0)], 100),  # chats go on from the end
        (100, 0, [(0, 0.1), (30, 1.0)], 70),  # questions of 30 tokens behind a document
        (100, 0, [(0, 0.8), (30, 1.0)], 100),  # 0.8 * 100 against 1.0 * 70
        (100, 0, [(0, 0.6), (30, 1.0)], 70),
        (100, 60, [(0, 0.6), (30, 1.0)], 100),  # 0.6 * 40 against 1.0 * 10
        (100, 0, [(0, 0.1), (10, 0.5), (40, 0.7), (80, 1.0)], 90),  # 10, 45, 42, 20
        (20, 0, [(0, 0.1), (30, 1.0)], 20),  # it is not as long as that
        (100, 100, [(0, 0.5), (30, 1.0)], 100),  # nothing to compute
        (100, 0, [], 100),
        (100, 0, [(0, 0.5), (50, 1.0)], 100),  # of equals the one nearest to the end
    ],
)
def test_tail_position(prompt, skipped, weights, expected):
    assert tail_position(prompt, skipped, weights) == expected


@pytest.mark.parametrize(
    ("checkpoint_bytes", "kv_bytes_per_token", "reach", "block", "expected"),
    [
        (4096, 128, 0, 16, 32),  # exactly as many bytes
        (4097, 128, 0, 16, 48),  # whole blocks, rounded up
        (4097, 128, 0, 256, 256),
        (100, 128, 0, 16, 16),
        (0, 128, 0, 16, 16),
        (50_000_000, 4096, 0, 256, 12_288),  # of 12,208
        (4096, 0, 0, 16, NO_INTERVAL),
        (0, 128, 1024, 16, 1024),  # a window apart
        (0, 128, 1025, 16, 1040),
        (4096, 128, 20, 16, 32),
        (4096, 0, 1024, 16, NO_INTERVAL),
    ],
)
def test_interval_distance(checkpoint_bytes, kv_bytes_per_token, reach, block, expected):
    assert choose_interval(checkpoint_bytes, kv_bytes_per_token, reach, block) == expected


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


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (9, [10, 20, 30, 40, 50]),
        (5, [10, 20, 30, 40, 50]),
        (4, [10, 30, 40, 50]),  # intervals, messages and tails are left out, shallow ones first
        (3, [10, 40, 50]),
        (2, [10, 40]),
        (1, [40]),  # then junctions
        (0, []),
    ],
)
def test_the_most_wanted(limit, expected):
    wanted = {10: JUNCTION, 30: MESSAGE, 40: END, 50: TAIL}
    assert most_wanted([10, 20, 30, 40, 50], wanted, limit) == expected
