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

    cache._evictor.refresh(10)
    found = [row_of(policy, state, cache) for state in cache.stored_checkpoints()]
    readme = Path(megatron_hybrid.__file__).parent / "cache" / "policy" / "README.md"
    rows = re.findall(r"^\| (?:chat|other|both), .*$", readme.read_text("utf-8"), re.MULTILINE)
    assert sorted(found) == sorted(row.split(" | ", 1)[1].rstrip(" |") for row in rows)

    evicted = []
    for _ in range(3):
        before = {(s.position, s.kind) for s in cache.stored_checkpoints()}
        while len(cache.stored_checkpoints()) > 6 - len(evicted):
            cache.evict(1)
        evicted.append(before - {(s.position, s.kind) for s in cache.stored_checkpoints()})


def run_turn(sim, prompt, answer_seed, origins):
    lease = sim.run(prompt, tokens(80, answer_seed)).lease
    origins.append(lease.origin)
    return lease.skipped_tokens, lease.shared_tokens


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
