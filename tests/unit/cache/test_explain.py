"""What the cache says of a prompt, against what is known to have happened."""

import numpy as np
import pytest
from settled import settled
from simulator import Simulator

from megatron_hybrid.cache.index.tree import Kind
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.report import MissReason

SPEC = CacheSpec(16, (KVGroup(2, 64),), state_bytes=20_000, hidden_bytes=128)


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(0, 50_000, n).astype(np.int32)


@pytest.fixture
def sim():
    return Simulator(settled(PrefixCache(SPEC, 3000)))


def fates(explanation):
    return [(p.position, p.kind, p.is_stored, p.was_stored) for p in explanation.positions]


def test_nothing_known(sim):
    explanation = sim.cache.explain(tokens(50))
    assert (explanation.held_tokens, explanation.known_tokens, explanation.positions) == (0, 0, ())
    assert "nothing that starts like this prompt is known" in str(explanation)


def test_every_position_on_the_way(sim):
    prompt, answer = tokens(100), tokens(30, 1)
    sim.run(prompt, answer, declared=[40])
    follower = np.concatenate([prompt, answer, tokens(20, 2)])
    assert fates(sim.cache.explain(follower)) == [
        (40, Kind.JUNCTION, True, False),
        (100, Kind.PROMPT_END, True, False),
        (130, Kind.ANSWER_END, True, False),
    ]
    assert str(sim.cache.explain(follower)).splitlines() == [
        "130 of 150 prompt tokens are skipped (86.7%), KV of 130 is shared",
        "130 tokens are in the cache, 130 are known",
        "states on the way:",
        "       40  stored      junction or declared, not used yet",
        "      100  stored      end of a prompt, not used yet",
        "      130  stored      end of an answer, not used yet",
        "stops at 130: what follows is new",
    ]
    sim.run(follower)
    used = {p.position: p.uses for p in sim.cache.explain(follower).positions}
    assert used == {40: 0, 100: 0, 130: 1, 150: 0}


def test_what_was_evicted_is_told(sim):
    prompt = tokens(100)
    sim.run(prompt)
    sim.cache.evict(1)
    explanation = sim.cache.explain(prompt)
    assert fates(explanation) == [(100, Kind.PROMPT_END, False, True)]
    assert (explanation.held_tokens, explanation.known_tokens) == (100, 100)
    assert "100  evicted     end of a prompt" in str(explanation)
    assert str(explanation).endswith("(state_evicted): a state after it was evicted")
    sim.cache.evict(10_000)
    explanation = sim.cache.explain(prompt)
    assert (explanation.held_tokens, explanation.known_tokens) == (0, 100)
    assert explanation.match.miss_reason is MissReason.KV_EVICTED


def test_it_agrees_with_match_and_has_no_side_effect(sim):
    sim.run(tokens(100))
    before = sim.cache.digest(), sim.cache.stats()
    for length in (1, 60, 100):
        assert sim.cache.explain(tokens(100)[:length]).match == sim.cache.match(
            tokens(100)[:length]
        )
    assert (sim.cache.digest(), sim.cache.stats()) == before


def test_tokens_lost_are_counted_by_reason(sim):
    def lost():
        stats = sim.cache.stats()
        reasons = {reason: stats[f"lost_tokens_{reason.value}"] for reason in MissReason}
        return {reason: count for reason, count in reasons.items() if count}

    prompt = tokens(100)
    sim.run(prompt)
    assert lost() == {}
    sim.cache.evict(1)
    sim.run(np.concatenate([prompt[:60], tokens(9, 1)]))
    assert lost() == {MissReason.STATE_NEVER_SAVED: 60}
    sim.run(np.concatenate([prompt, tokens(9, 2)]))
    # from 60 on, where the one before saved its junction
    assert lost() == {MissReason.STATE_NEVER_SAVED: 60, MissReason.STATE_EVICTED: 40}
