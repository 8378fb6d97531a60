"""The shipped policy: the example of policy/README.md, number by number, and its parts."""

from dataclasses import fields

import numpy as np
import pytest
from settled import settled
from simulator import Simulator

from megatron_hybrid.cache.index.tree import NO_ORIGIN, Kind, Origin
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.policy.hybrid import HybridPolicy
from megatron_hybrid.cache.policy.parts import Parts
from megatron_hybrid.cache.policy.placement import NO_RUNG
from megatron_hybrid.cache.policy.protocol import MIN_KNOWN_TOKENS, NewState, Prompt
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.report import MissReason

SPEC = CacheSpec(16, (KVGroup(2, 64),), state_bytes=40_000, hidden_bytes=64)  # states of 20 pages


def tokens(n, seed):
    return np.random.default_rng(seed).integers(0, 50_000, n).tolist()


def test_the_example_of_the_readme():
    sim = Simulator(settled(PrefixCache(SPEC, 1001)))
    cache, system = sim.cache, tokens(160, 0)
    prompts = [system + tokens(80, seed) for seed in (1, 2, 3)]
    offered, of_policy = [], cache.policy.new_value
    cache.policy.new_value = lambda new: offered.append((new.position, of_policy(new))) or 1e9

    def values():
        refs = cache.allocator.ref_counts
        found = [cache.policy.state_value(state, refs) for state in cache.stored_checkpoints()]
        return pytest.approx(found, rel=1e-6)

    assert sim.run(prompts[0]).lease.skipped_tokens == 0
    assert offered == [(240, pytest.approx(0.001 * 240 / 35))]
    assert values() == [0.001 * 240 / 35]
    second = sim.run(prompts[1]).lease
    assert (second.skipped_tokens, second.shared_tokens) == (0, 160)
    assert second.report.miss_reason is MissReason.STATE_NEVER_SAVED
    assert second.wanted == {160: Kind.JUNCTION, 240: Kind.PROMPT_END}
    assert offered[1:] == [(160, pytest.approx(0.008)), (240, pytest.approx(0.0032))]
    assert values() == [0.008, 0.0032, 0.0008 * 80 / 25]
    third = sim.run(prompts[2]).lease
    assert (third.skipped_tokens, third.origin) == (160, Origin(mostly_known=True))
    assert values() == [0.008, 0.0032, 0.00256, 0.00064 * 80 / 25]
    cache._evictor.refresh(10)  # the sweep that follows within a few requests
    free = cache.allocator.num_free
    cache.evict(1)
    assert cache.allocator.num_free == free + 20
    assert [cache.match(np.array(p, np.int32)).skipped_tokens for p in prompts] == [160, 240, 240]
    cache.evict(5)
    assert cache.match(np.array(prompts[0], np.int32)).shared_tokens == 160


PROMPT = Prompt(1000, 0, 400, [500], [300], 100)


@pytest.mark.parametrize(
    ("parts", "lost"),
    [
        ({}, set()),
        ({"junctions": False}, {100, 400, 500}),
        ({"prompt_ends": False}, {1000}),
        ({"rungs": False}, {320, 640, 960}),
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


NEW = NewState(480, Kind.PROMPT_END, NO_ORIGIN, 20, 160, None, None, [(320, Kind.JUNCTION)])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, 0.001 * 160 / (20 + 10)),
        ({"same_forward": False}, 0.001 * 480 / (20 + 20)),
        ({"exclusive_kv": False}, 0.001 * 160 / 20),
        ({"work": False}, 0.001 / (20 + 10)),
        ({"price": False}, np.inf),
    ],
)
def test_the_value_of_a_new_state_without_a_part(parts, expected):
    assert HybridPolicy(SPEC, **parts).new_value(NEW) == pytest.approx(expected)


def test_what_is_remembered_and_where_rungs_are():
    assert HybridPolicy(SPEC).rung_tokens == 320
    assert HybridPolicy(SPEC, rungs=False).rung_tokens == NO_RUNG
    assert HybridPolicy(SPEC).known_limit(1000) == MIN_KNOWN_TOKENS
    assert HybridPolicy(SPEC).known_limit(1 << 20) == int(1.4 * 16 * (1 << 20))
    assert HybridPolicy(SPEC, known_tokens=False).known_limit(1 << 20) == 0


def test_every_part_is_in_by_default():
    assert all(getattr(HybridPolicy(SPEC).parts, field.name) for field in fields(Parts))
    with pytest.raises(TypeError, match="rumgs"):
        HybridPolicy(SPEC, rumgs=False)
