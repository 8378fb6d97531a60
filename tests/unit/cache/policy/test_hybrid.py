"""The shipped policy: the example of docs/how/policy.md, number by number, and its parts."""

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from settled import settled
from simulator import Simulator, least_of
from valued_edges import edge

from megatron_hybrid.cache.index.tree import NO_ORIGIN, Kind, Origin
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.policy import hybrid
from megatron_hybrid.cache.policy.hybrid import HybridPolicy
from megatron_hybrid.cache.policy.placement import NO_INTERVAL
from megatron_hybrid.cache.policy.protocol import NewState, Prompt
from megatron_hybrid.cache.policy.reuse import PRIOR_GAP, PRIOR_PROBABILITY, PolicyFlags
from megatron_hybrid.cache.prefix_cache import PrefixCache

SPEC = CacheSpec(16, (KVGroup(2, 64),), state_bytes=40_000, hidden_bytes=64)  # states of 20 pages


def tokens(n, seed):
    return np.random.default_rng(seed).integers(0, 50_000, n).tolist()


def test_the_example_of_the_docs():
    """A chat of three turns and the first turn of another one, behind one system prompt."""
    sim = Simulator(settled(PrefixCache(SPEC, 1001)))
    cache, policy = sim.cache, sim.cache.policy
    offered, of_policy = [], policy.new_value
    policy.new_value = lambda new: offered.append(of_policy(new)) or offered[-1]
    chat, origins = tokens(160, 0) + tokens(80, 1), []
    other = tokens(160, 0) + tokens(80, 2)
    skipped = []
    for turn in range(3):
        skipped.append(run_turn(sim, chat, 10 + turn, origins))
        chat += tokens(80, 10 + turn) + tokens(80, 20 + turn)
        if turn == 0:
            assert offered[0] == pytest.approx(0.3 / 100 * 240 / (20 + 15))
            skipped.append(run_turn(sim, other, 30, origins))
    assert skipped == [(0, 0), (0, 160), (320, 320), (480, 480)]
    assert origins == [NO_ORIGIN, NO_ORIGIN, *2 * [Origin(Kind.ANSWER_END)]]

    least_of(cache)
    found = {row_of(policy, cache, state) for state in cache.contents.stored_checkpoints()}
    page = Path(hybrid.__file__).parents[3] / "docs" / "how" / "policy.md"
    text = page.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:chat|other|both) \| (\d.*) \|$", text, re.MULTILINE)
    assert len(rows) == 9 and set(rows) == found

    states = cache.contents.stored_checkpoints()
    while sum(state.pages is not None for state in states) > 6:
        assert cache.evict(1)
    evicted = [(s.position, s.kind) for s in states if s.pages is None]
    assert sorted(evicted) == [(240, 0), (240, 0), (400, 0)]


def row_of(policy, cache, state):
    counts = policy.reuse.counts[state.kind, state.origin, state.uses > 0]
    probability, gap = counts.expected(policy.now)
    previous, refs = state.previous(), cache.allocator.ref_counts
    tokens = state.position - (previous.position if previous else 0)
    rate, value = policy.reuse.rate(state), policy.state_value(state, refs)
    kind = {Kind.PROMPT_END: "prompt", Kind.ANSWER_END: "answer", Kind.JUNCTION: "junction"}
    return (
        f"{state.position} {kind[state.kind]} | {state.uses} | {probability:.3f} | {gap:.1f} | "
        f"{rate:.5f} | {tokens} | {rate * tokens / value:.0f} | {value:.4f}"
    )


def run_turn(sim, prompt, answer_seed, origins):
    lease = sim.run(prompt, tokens(80, answer_seed)).lease
    origins.append(lease.origin)
    return lease.skipped_tokens, lease.shared_tokens


PROMPT = Prompt(1000, 0, 400, [500], [300], 100, has_room=False)


@pytest.mark.parametrize(
    ("parts", "lost"),
    [
        ({}, set()),
        ({"junctions": False}, {100, 400, 500}),
        ({"prompt_ends": False}, {1000}),
        ({"intervals": False}, {320, 640, 960}),
    ],
)
def test_positions_without_a_part(parts, lost):
    whole, _ = settled_policy().positions(PROMPT)
    assert set(whole) == {100, 300, 320, 400, 500, 640, 960, 1000}
    found, watched = settled_policy(**parts).positions(PROMPT)
    assert set(found) == set(whole) - lost and not watched


def settled_policy(**parts):
    policy = HybridPolicy(SPEC, **parts)
    for _ in range(256):
        policy.reuse.distances.observe(0)
    return policy


NEW = NewState(480, Kind.PROMPT_END, NO_ORIGIN, 20, 160, None, None)
RATE = PRIOR_PROBABILITY / PRIOR_GAP


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, RATE * 480 / (20 + 20)),
        ({"exclusive_kv": False}, RATE * 480 / 20),
        ({"work": False}, RATE / (20 + 20)),
        ({"price": False}, np.inf),
    ],
)
def test_the_value_of_a_new_state_without_a_part(parts, expected):
    assert HybridPolicy(SPEC, **parts).new_value(NEW) == pytest.approx(expected)


def test_a_new_state_replaces_one_that_is_worth_less_than_the_tokens_in_between():
    policy = HybridPolicy(SPEC)
    for uses, position, replaces in ((0, 320, False), (0, 200, True), (3, 200, False)):
        previous = edge(0, 480, (position,), spec=SPEC).checkpoints[position]
        previous.uses = uses
        new = NEW._replace(previous=previous)
        assert policy.replaces(new) == replaces
    assert not policy.replaces(NEW)


def test_where_intervals_are():
    assert HybridPolicy(SPEC).interval_tokens == 320
    assert HybridPolicy(SPEC, intervals=False).interval_tokens == NO_INTERVAL


def test_every_part_is_in_by_default():
    assert all(getattr(HybridPolicy(SPEC).parts, field.name) for field in fields(PolicyFlags))
    with pytest.raises(TypeError, match="rumgs"):
        HybridPolicy(SPEC, rumgs=False)
