"""Values of states and tails: work, pages and uses, counted by hand."""

from dataclasses import replace

import numpy as np
import pytest
from valued_edges import FREE, HYBRID, PURE, Rates, edge, tail_key

from megatron_hybrid.cache.index.tree import Checkpoint, Kind
from megatron_hybrid.cache.policy.values import (
    checkpoint_value,
    equal_start,
    exclusive_tokens,
    kv_is_held,
)


def test_no_kv_goes_with_a_state_above_another():
    """(0, 50] with a state at 20, beneath it (50, 100] with two."""
    upper = edge(0, 50, (20,))
    left = edge(50, 100, (60, 90), parent=upper)
    states = [upper.checkpoints[20], left.checkpoints[60], left.checkpoints[90]]
    values = [checkpoint_value(state, HYBRID, Rates(), FREE) for state in states]
    assert values == [20 / 2, 40 / 2, 30 / (2 + 1)]  # 30 tokens: a page, rounded down


def test_exclusive_tokens_reach_over_a_fork_without_another_state():
    upper = edge(0, 50)
    edge(50, 100, parent=upper)  # known, or KV that goes first
    right = edge(50, 200, (150,), parent=upper)
    assert exclusive_tokens(right.checkpoints[150], None) == 150
    middle = edge(0, 30)
    lower = edge(30, 60, (), parent=middle)
    tip = edge(60, 90, (80,), parent=lower)
    assert exclusive_tokens(tip.checkpoints[80], None) == 80


def test_unreachable_kv_goes_before_any_state():
    kv, state = edge(0, 100), edge(0, 100, (1,))
    kv.last_access = 10**9
    value = checkpoint_value(state.checkpoints[1], HYBRID, Rates(), FREE)
    assert tail_key(kv, HYBRID, Rates()) < (1, value, 0)


def test_the_least_recent_tail_goes_first():
    old, new = edge(0, 100), edge(0, 100)
    old.last_access, new.last_access = 3, 4
    for spec in (HYBRID, PURE):
        assert tail_key(old, spec, Rates()) < tail_key(new, spec, Rates())
        assert tail_key(old, spec, Rates()) == (0, 0.0, 3)


@pytest.mark.parametrize(
    ("held_end", "watched", "rate"),
    [
        (100, {96: 0.5, 100: 0.25}, 0.25),  # its last block has the tokens from 96 on
        (100, {97: 0.5, 100: 0.25}, 0.5),
        (100, {20: 0.75, 100: 0.25}, 0.25),
        (60, {20: 0.75, 100: 0.25}, 0.25),  # it is on the way there
        (60, {60: 0.5, 100: 0.25}, 0.5),
    ],
)
def test_where_kv_alone_resumes_a_tail_serves_those_who_go_on_from_beyond_it(
    held_end, watched, rate
):
    kv, rates = edge(0, 100, held_end=held_end), Rates()
    for position, uses in watched.items():
        point = kv.checkpoints[position] = Checkpoint(kv, position, Kind.ANSWER_END, now=0)
        rates.rates[point] = uses
    assert tail_key(kv, PURE, rates) == (1, 16 * rate, 0)
    assert tail_key(kv, HYBRID, rates) == (0, 0.0, 0)
    far = replace(PURE, attention_parity=24)
    mean = 16 * far.work(0, held_end) / held_end
    assert tail_key(kv, far, rates) == pytest.approx((1, rate * mean, 0))


def test_the_end_of_a_long_prompt_is_worth_no_more_than_all_of_it():
    """At a parity of 24 tokens the last of six blocks took 16 x (1 + 88 / 24) = 75, all six on
    average 48, those of a prompt of two blocks 27."""
    far, rates = replace(PURE, attention_parity=24), Rates()
    long, short = edge(0, 96), edge(0, 32)
    for kv, uses in ((long, 0.5), (short, 1.0)):
        point = kv.checkpoints[kv.end] = Checkpoint(kv, kv.end, Kind.ANSWER_END, now=0)
        rates.rates[point] = uses
    per_block = [16 * np.mean([1 + (t + 0.5) / 24 for t in range(n)]) for n in (96, 32)]
    assert tail_key(long, far, rates)[1] == pytest.approx(0.5 * per_block[0])
    assert tail_key(short, far, rates)[1] == pytest.approx(1.0 * per_block[1])
    assert tail_key(long, far, rates) < tail_key(short, far, rates)
    long.held_end = 48  # a part has gone
    assert tail_key(long, far, rates)[1] == pytest.approx(0.5 * 16 * (1 + 24 / 24))


def test_a_state_is_worth_the_tokens_that_it_saves_per_page_and_request():
    rates = Rates()
    upper = edge(0, 64, (32,))
    left, right = edge(64, 320, (320,), upper), edge(64, 96, (96,), upper)
    tip, short, low = left.checkpoints[320], right.checkpoints[96], upper.checkpoints[32]
    rates.rates = {tip: 0.5, short: 0.25, low: 2.0}
    assert checkpoint_value(tip, HYBRID, rates, FREE) == 0.5 * 288 / (2 + 16)
    assert checkpoint_value(short, HYBRID, rates, FREE) == 0.25 * 64 / (2 + 2)
    assert checkpoint_value(low, HYBRID, rates, FREE) == 2.0 * 32 / 2
    # where KV alone resumes it only spares the last token, and no KV goes with it
    assert checkpoint_value(tip, PURE, rates, FREE) == 0.5 / 2
    tip.local_pages = [np.zeros((3, 2), np.int32), np.zeros((1, 1), np.int32)]
    assert checkpoint_value(tip, HYBRID, rates, FREE) == 0.5 * 288 / (2 + 7 + 16)


def test_local_blocks_that_a_request_holds_are_not_charged_to_a_state():
    tip = edge(0, 320, (320,)).checkpoints[320]
    tip.local_pages = [np.array([[40, 41], [42, 43]], np.int32), np.array([[50]], np.int32)]
    for held, pages in (((), 2 + 5), ((40, 41), 2 + 3), ((40, 41, 42, 43, 50, 60), 2)):
        ref_counts = FREE.copy()
        ref_counts[list(held)] = 1
        assert checkpoint_value(tip, HYBRID, Rates(), ref_counts) == 320 / (pages + 20)


@pytest.mark.parametrize(
    ("held", "pages"),
    [([], 2 + 16), ([23], 2), ([0, 23], 2), ([22], 2 + 16), ([24], 2 + 16)],
)
@pytest.mark.parametrize("position", [320, 325])  # who resumes inside a block copies that one
def test_kv_that_a_request_holds_is_not_charged_to_a_state(position, held, pages):
    """A state on (64, 340], whose blocks 4 to 21 are the pages 8 to 25."""
    lower = edge(64, 340, (position,), edge(0, 64, (64,)), first_page=8)
    ref_counts = FREE.copy()
    ref_counts[held] = 1
    value = checkpoint_value(lower.checkpoints[position], HYBRID, Rates(), ref_counts)
    assert value == (position - 64) / pages
    assert checkpoint_value(lower.parent.checkpoints[64], HYBRID, Rates(), ref_counts) == 64 / 2


def test_of_a_state_on_a_short_edge_the_block_that_is_held_lies_above():
    """(0, 50] and (50, 60] with a state: who resumes there holds the three full blocks."""
    lower = edge(50, 60, (60,), edge(0, 50, first_page=8), first_page=12)
    for held, expected in ((10, True), (9, False), (12, False)):
        ref_counts = FREE.copy()
        ref_counts[held] = 1
        assert kv_is_held(lower.checkpoints[60], HYBRID, ref_counts) == expected


@pytest.mark.parametrize(
    ("start", "watched", "expected"),
    [
        (0, {100: 0.25}, 0),
        (0, {40: 0.25, 80: 0.125, 100: 0.25}, 0),  # worth no more
        (0, {40: 0.5, 80: 0.125, 100: 0.25}, 48),  # the block that 40 lies in stays
        (0, {40: 0.5, 80: 0.75, 100: 0.25}, 80),
        (64, {40: 0.5, 100: 0.25}, 64),  # no more is to go
        (0, {96: 0.5, 100: 0.25}, 96),
        (0, {97: 0.5, 100: 0.25}, 0),  # in the last block: that is worth as much
        (0, {40: 0.5}, 48),  # beyond, nothing is known
        (0, {}, 0),
    ],
)
def test_no_block_dropped_at_once_is_worth_more_than_the_last(start, watched, expected):
    kv, rates = edge(0, 100), Rates()
    for position, uses in watched.items():
        point = kv.checkpoints[position] = Checkpoint(kv, position, Kind.ANSWER_END, now=0)
        rates.rates[point] = uses
    assert equal_start(kv, start, PURE, rates) == expected
    # each block before is worth more than the last one, each after it is not
    if known := [uses for position, uses in watched.items() if position > 96]:
        worth = {
            block: max(uses for position, uses in watched.items() if position > block)
            for block in range(start, 100, 16)
        }
        assert all((worth[block] > max(known)) == (block < expected) for block in worth)
