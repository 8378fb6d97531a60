"""Other policies drive the cache through the protocol: against an LRU of whole prompts, and by what
goes first."""

from collections import OrderedDict
from functools import partial

import numpy as np
import pytest

from benchmarks.replay.engines import ENGINES
from benchmarks.replay.engines.marconi import normalised
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.policies import LRUPolicy, MarconiPolicy
from benchmarks.replay.workloads import WORKLOADS
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.runner import replay

HYBRID = CacheSpec(16, (KVGroup(2, 64),), state_bytes=4000, hidden_bytes=64)  # states of 2 pages
LENGTH = 64
PAGES = LENGTH // 16 + HYBRID.checkpoint_pages
"""Of a prompt with the state at its end."""


def prompt(number, length=LENGTH):
    return np.random.default_rng(number).integers(0, 50_000, length).astype(np.int32)


def flops(tokens):
    return float(tokens) * tokens


def engine_of(policy, prompts):
    """With room for so many prompts of `LENGTH`."""
    return Ours(HYBRID, prompts * PAGES * HYBRID.page_bytes, policy)


def serve(engine, tokens):
    """Skipped tokens of a request whose answer is empty."""
    running = engine.begin(tokens)
    engine.finish(running, tokens)
    return running.skipped_tokens


@pytest.mark.parametrize("policy", [LRUPolicy, partial(MarconiPolicy, flops=flops, alpha=0.0)])
@pytest.mark.parametrize("room", [1, 5, 12])
def test_by_recency_whole_prompts_go_as_from_an_lru_list(policy, room):
    engine, cached = engine_of(policy(HYBRID), room), OrderedDict()
    for number in np.random.default_rng(room).zipf(1.3, 400) % 20:
        skipped = serve(engine, prompt(number))
        assert skipped == (LENGTH if number in cached else 0)
        cached[number] = None
        cached.move_to_end(number)
        if len(cached) > room:
            cached.popitem(last=False)
    engine.cache.check_integrity()
    assert engine.cache.stats()["checkpoints_evicted"] > 0


@pytest.mark.parametrize(("alpha", "kept"), [(0.0, [1, 2]), (100.0, [0, 2])])
def test_marconi_weighs_flops_against_recency(alpha, kept):
    """Of a long old prompt and a short new one."""
    engine = engine_of(MarconiPolicy(HYBRID, flops, alpha), 4)
    prompts = [prompt(0, 160), prompt(1, 32), prompt(2, 96)]
    for tokens in prompts:  # 12 + 4 + 8 pages: room for all
        assert serve(engine, tokens) == 0
    serve(engine, prompts[2])
    serve(engine, prompt(3, 32))  # needs 4
    found = [n for n in range(3) if engine.cache.match(prompts[n]).skipped_tokens]
    assert found == kept


def test_marconi_keeps_what_prompts_part_at():
    """Until nothing else is left: it was used longest ago, and saves least."""
    policy = MarconiPolicy(HYBRID, flops, alpha=1.0)
    engine, system = engine_of(policy, 8), prompt(0)
    for number in range(1, 5):
        serve(engine, np.concatenate([system, prompt(number, 32)]))
    for number in range(5, 30):
        serve(engine, prompt(number))
        new = np.concatenate([system, prompt(100 + number, 16)])
        assert engine.cache.match(new).skipped_tokens == LENGTH
    assert engine.cache.stats()["checkpoints_evicted"] > 10


def test_flops_per_byte():
    policy = MarconiPolicy(HYBRID, flops, alpha=1.0)
    engine = engine_of(policy, 20)
    serve(engine, prompt(0, 32))
    serve(engine, prompt(0, 96))
    upper, lower = sorted(
        engine.cache.contents.stored_checkpoints(), key=lambda state: state.position
    )
    state = 2 * HYBRID.page_bytes
    assert policy.flops_per_byte(upper) == 32 * 32 / state  # its KV leads on
    assert policy.flops_per_byte(lower) == (96 * 96 - 32 * 32) / (state + 64 * 128)
    assert policy.flops_per_byte(lower.edge) == 0.0
    pure = MarconiPolicy(CacheSpec(16, (KVGroup(2, 64),), 0, 64), flops, alpha=1.0)
    assert pure.flops_per_byte(lower.edge) == pytest.approx(96 * 96 / (96 * 128))


def test_the_shipped_policy_skips_more_than_both():
    geometry, requests = GEOMETRIES["nemotron-h-8b"], list(WORKLOADS["chat"].generate(60))
    skipped = {}
    for name in ("ours", "lru-policy", "marconi-policy"):
        *_, build = ENGINES[name].build(geometry, 1e9, 1).values()
        skipped[name] = replay(requests, build()).skipped_share
    assert skipped["ours"] > max(skipped["lru-policy"], skipped["marconi-policy"]) > 0


def test_normalised():
    assert normalised(np.array([2.0, 4.0, 3.0])).tolist() == [0.0, 1.0, 0.5]
    assert normalised(np.array([2.0, 2.0])).tolist() == [0.0, 0.0]
