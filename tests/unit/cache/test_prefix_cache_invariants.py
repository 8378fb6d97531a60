"""The invariants of docs/how/code.md that the cache keeps, each under its number.

Numbers 1 and 6 are the engine's. Under random operations: test_prefix_cache_machine.py.
"""

from dataclasses import replace

import numpy as np
import pytest
from simulator import SPECS, Simulator, cached_paths, known_tokens

from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.report import MissReason

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def tokens(n, seed=0, alphabet=1000):
    return np.random.default_rng(seed).integers(0, alphabet, n).astype(np.int32)


@every_spec
def test_invariant_2_a_hit_is_token_exact(spec):
    """Whatever is matched is what was inserted, token by token; nothing is compared by hash."""
    sim = Simulator(PrefixCache(spec, 2000))
    seen = []
    for seed in range(40):
        prompt = tokens(1 + seed * 7 % 50, seed, alphabet=2)
        best = max(
            (int((np.cumprod(prompt[: len(s)] == s[: len(prompt)])).sum()) for s in seen),
            default=0,
        )
        assert known_tokens(sim.cache, prompt) == best
        sim.run(prompt)
        seen.append(prompt)


@every_spec
def test_invariant_2_salts_never_share(spec):
    sim = Simulator(PrefixCache(spec, 200))
    prompt = tokens(50)
    sim.run(prompt, salt="tenant a")
    for salt in ("", "tenant b", "tenant a "):
        match = sim.cache.match(prompt, salt)
        assert (match.shared_tokens, match.skipped_tokens) == (0, 0)
        assert match.miss_reason is MissReason.NO_SHARED_PREFIX
    sim.run(prompt, salt="tenant b")
    pages = [set(edge.pages(16).ravel().tolist()) for _, _, edge in cached_paths(sim.cache)]
    assert not pages[0] & pages[1]
    assert sim.cache.match(prompt, "tenant a").skipped_tokens == 50


@every_spec
def test_invariant_3_pages_add_up(spec):
    sim = Simulator(PrefixCache(spec, 30))
    pool = sim.cache.allocator
    running = []
    for seed in range(40):
        new = sim.start(tokens(10 + seed % 60, seed % 5), chunk=20)
        if new is not None:
            sim.forward(new, min(20, len(new.tokens) - new.done))
            running.append(new)
        if len(running) > 2:
            sim.cancel(running.pop(seed % 3))
        sim.check()
        held = np.count_nonzero((pool.ref_counts > 0) | (pool.cached_counts > 0))
        assert pool.num_free + held == 29
    for lease in running:
        sim.cancel(lease)
    sim.cache.clear()
    assert pool.num_free == 29


@every_spec
def test_invariant_4_nothing_visible_is_written(spec):
    """The simulator refuses such a write; here all ways to continue from one prefix meet it."""
    sim = Simulator(PrefixCache(spec, 400))
    base = tokens(70)
    owner = sim.start(base[:50])
    sim.forward(owner, 50)
    running = [owner]
    for cut in (1, 15, 16, 17, 40, 49, 50):
        new = sim.start(np.append(base[:cut], tokens(20, cut)))
        sim.forward(new, len(new.tokens) - new.done)
        running.append(new)
    running += [sim.fork(owner), sim.fork(running[3])]
    before = sim.memory.copy(), sim.visible()
    for i, each in enumerate(running):
        for step in range(40):
            each.tokens.append((i + step) % 5)
            assert sim.forward(each, 1)
    assert np.array_equal(sim.memory[before[1]], before[0][before[1]])
    for each in running:
        sim.finish(each)
        sim.check()


@every_spec
def test_invariant_5_nothing_is_visible_before_its_forward_finished(spec):
    sim = Simulator(PrefixCache(spec, 400))
    prompt = tokens(50)
    running = sim.start(prompt)
    reservation = sim.cache.reserve_checkpoint(running.lease, 50)
    sim.compute(running, 50)
    assert sim.cache.match(prompt).shared_tokens == 0
    sim.cache.commit(running.lease, prompt, 50)
    assert known_tokens(sim.cache, prompt) == 50
    assert sim.cache.match(prompt).skipped_tokens < 50
    sim.publish(running, reservation)
    assert sim.cache.match(prompt).skipped_tokens == 50
    sim.check()


@every_spec
def test_invariant_7_decisions_depend_only_on_the_order_of_operations(spec):
    def play():
        sim = Simulator(PrefixCache(spec, 40))
        random = np.random.default_rng(5)
        reports, digests = [], []
        for _ in range(30):
            length, seed = int(random.integers(1, 100)), int(random.integers(3))
            if sim.cache.fits(length + 3):
                reports.append(sim.run(tokens(length, seed), answer=[1, 2, 3]).lease.report)
            digests.append(sim.cache.digest())
        return reports, digests

    first, second = play(), play()
    assert first == second
    assert len(set(first[1])) > 25


@every_spec
def test_invariant_8_optional_work_is_skipped_and_counted(spec):
    """A pool for one request and no checkpoint: it runs, and says what it could not keep."""
    spec = replace(spec, hidden_bytes=1_000_000)
    blocks = len(spec.groups) * 64 // 16
    sim = Simulator(PrefixCache(spec, 1 + max(1, blocks)))
    report = sim.run(tokens(64)).lease.report
    assert report.checkpoints_saved == 0
    assert report.checkpoints_skipped >= 1
    assert sim.cache.stats()["checkpoints_no_room"] == report.checkpoints_skipped
