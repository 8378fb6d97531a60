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
    for seed in range(60):
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
def test_invariant_3_a_failed_operation_changes_nothing(spec):
    sim = Simulator(PrefixCache(spec, 21))
    sim.run(tokens(40))
    holder = sim.start(tokens(60, 1), chunk=60)
    assert holder is not None
    sim.forward(holder, 60)
    pool, tree = sim.cache.allocator, [path for path in cached_paths(sim.cache)]
    before = pool.ref_counts.copy(), pool.cached_counts.copy(), sim.cache.digest()
    huge = 30 * 16
    if spec.groups:
        assert sim.start(tokens(40), room=huge) is None
        assert not sim.cache.extend(holder.lease, huge)
        assert sim.cache.fork(holder.lease, tokens(60, 1), 60, capacity_tokens=huge) is None
    else:  # nothing but states takes pages
        assert sim.start(tokens(40), room=huge) is not None
        return
    assert np.array_equal(pool.ref_counts, before[0])
    assert np.array_equal(pool.cached_counts, before[1])
    assert sim.cache.digest() == before[2]
    assert [path[:2] for path in cached_paths(sim.cache)] == [path[:2] for path in tree]
    sim.check()


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
def test_invariant_5_a_cancelled_forward_leaves_nothing(spec):
    sim = Simulator(PrefixCache(spec, 400))
    running = sim.start(tokens(50))
    sim.forward(running, 20)
    assert sim.cache.reserve_checkpoint(running.lease, 50) is not None
    sim.cancel(running)
    assert known_tokens(sim.cache, tokens(50)) == 20
    assert not sim.cache.allocator.ref_counts.any()
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


@every_spec
@pytest.mark.parametrize("mode", ["off", "memory_only", "restore"])
def test_invariant_9_every_report_adds_up(spec, mode):
    sim = Simulator(PrefixCache(spec, 40, mode))
    random = np.random.default_rng(1)
    reasons = set()
    for _ in range(80):
        length, seed = int(random.integers(1, 100)), int(random.integers(3))
        if not sim.cache.fits(length):
            continue
        prompt = np.append(
            tokens(length, seed)[: length // 2], tokens(length - length // 2, length)
        )
        report = sim.run(prompt).lease.report
        assert report.skipped_tokens + report.computed_tokens == report.prompt_tokens == length
        assert 0 <= report.skipped_tokens <= report.shared_tokens <= length
        missed = report.skipped_tokens < report.shared_tokens or report.shared_tokens == 0
        assert (report.miss_reason is not None) or not missed
        assert report.skipped_tokens < length or report.miss_reason is None
        reasons.add(report.miss_reason)
    if mode != "restore":
        assert reasons <= {MissReason.MODE, MissReason.NO_SHARED_PREFIX, MissReason.KV_EVICTED}
