"""PrefixCache, one promise per test. Sequences of operations: test_prefix_cache_machine.py."""

from itertools import count

import numpy as np
import pytest
from cache_prompts import joined, tokens
from matrix import matrix_rows
from settled import settled
from simulator import Simulator, least_of
from valued_edges import FULL, HEAVY, HYBRID, PURE

from megatron_hybrid.cache import eviction
from megatron_hybrid.cache.eviction import MAX_RISEN
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.policy.hybrid import REFRESHED, HybridPolicy
from megatron_hybrid.cache.policy.reuse import ReuseModel
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.report import MissReason
from megatron_hybrid.tools.replay.ours import Ours

WINDOW = CacheSpec(16, (FULL, KVGroup(2, 64, window=32)), state_bytes=4000, hidden_bytes=64)


def simulator(spec=HYBRID, num_pages=400, mode="restore"):
    return Simulator(settled(PrefixCache(spec, num_pages, mode)))


# ---- bad input ----


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"mode is 'on'.*off, memory_only, restore"):
        PrefixCache(HYBRID, 10, "on")
    with pytest.raises(ValueError, match="num_pages is 1"):
        PrefixCache(HYBRID, 1)
    with pytest.raises(ValueError, match="because"):
        PrefixCache(HYBRID, 10).match(tokens(3), recompute_reason="because")


@pytest.mark.parametrize("bad", [[], [[1, 2]], [1.5], np.zeros((2, 2), np.int32), ["a"]])
def test_a_prompt_is_a_row_of_integers(bad):
    cache = PrefixCache(HYBRID, 10)
    with pytest.raises(ValueError, match="one-dimensional array of at least one integer"):
        cache.match(bad)
    with pytest.raises(ValueError, match="one-dimensional"):
        cache.acquire(bad, capacity_tokens=10)
    cache.check_integrity()


def test_a_token_that_would_wrap_is_refused():
    cache = PrefixCache(HYBRID, 10)
    for far in (2**32 + 1, -(2**31) - 1):
        low, high = sorted((far, 7))
        with pytest.raises(ValueError, match=f"tokens reach from {low} to {high}; they must fit"):
            cache.match(np.array([7, far]))
    assert cache.match([1, 2]).prompt_tokens == 2


def test_a_released_lease_is_dead():
    cache = PrefixCache(HYBRID, 50)
    lease = cache.acquire(tokens(10), capacity_tokens=20)
    cache.release(lease)
    for use in (
        lambda: cache.release(lease),
        lambda: cache.extend(lease, 100),
        lambda: cache.commit(lease, tokens(20), 20),
        lambda: cache.reserve_checkpoint(lease, 10),
        lambda: cache.restored(lease),
        lambda: cache.fork(lease, tokens(10), 0),
    ):
        with pytest.raises(ValueError, match="released before"):
            use()
    cache.check_integrity()


def test_commit_and_reserve_beyond_the_room_are_refused():
    cache = PrefixCache(HYBRID, 50)
    lease = cache.acquire(tokens(20), capacity_tokens=20)
    with pytest.raises(ValueError, match=r"commit of 33 tokens.*room for 32.*extend"):
        cache.commit(lease, tokens(40), 33)
    with pytest.raises(ValueError, match=r"commit of 21 tokens.*20 are given"):
        cache.commit(lease, tokens(20), 21)
    assert lease.done == 0
    cache.commit(lease, tokens(20), 20)
    with pytest.raises(ValueError, match="commit of 10 tokens: 20 were done"):
        cache.commit(lease, tokens(20), 10, flush=True)
    for position in (0, 19, 33):
        with pytest.raises(ValueError, match=f"checkpoint at {position} of a lease that is at 20"):
            cache.reserve_checkpoint(lease, position)
    with pytest.raises(ValueError, match="fork at token 10 of a lease that is at 20"):
        cache.fork(lease, tokens(20), 10)
    cache.check_integrity()


def test_a_reservation_is_settled_once():
    cache = PrefixCache(HYBRID, 50)
    lease = cache.acquire(tokens(20), capacity_tokens=20)
    reservation = cache.reserve_checkpoint(lease, 20)
    with pytest.raises(ValueError, match="published at 0: commit first"):
        cache.publish_checkpoint(reservation)
    cache.commit(lease, tokens(20), 20)
    assert cache.publish_checkpoint(reservation)
    for again in (cache.publish_checkpoint, cache.abandon):
        with pytest.raises(ValueError, match="published or abandoned before"):
            again(reservation)
    second = cache.reserve_checkpoint(lease, 21)
    cache.release(lease)
    with pytest.raises(ValueError, match="published or abandoned before"):
        cache.publish_checkpoint(second)
    cache.check_integrity()


# ---- q and p ----


def test_a_state_that_a_request_waits_for_evicts_any_unpinned_item():
    sim = simulator(num_pages=9)  # eight pages: a prompt's KV of two, and three states of two
    for seed in range(3):
        sim.run(tokens(16, seed))
    for seed in range(3):
        for _ in range(3):  # what is here is used, and worth more than a stranger
            sim.run(tokens(16, seed))
    stats = sim.cache.stats()
    running = sim.start(tokens(16, seed=9))
    assert sim.cache.reserve_checkpoint(running.lease, 16) is None
    reservation = sim.cache.reserve_checkpoint(running.lease, 16, wanted=True)
    assert reservation is not None
    assert sim.cache.stats()["checkpoints"] < stats["checkpoints"]
    sim.forward(running, 16, save=False)
    assert sim.publish(running, reservation)
    sim.finish(running, save=False)
    sim.check()
    assert sim.start(tokens(16, seed=9)).lease.skipped_tokens == 16


# ---- what becomes visible when ----


def test_a_decode_becomes_visible_block_by_block():
    sim = simulator()
    running = sim.start(tokens(20))
    sim.forward(running, 20)
    seen = []
    for token in tokens(30, 1):
        running.tokens.append(int(token))
        sim.forward(running, 1)
        seen.append(sim.cache.match(np.array(running.tokens, np.int32)).shared_tokens)
    assert sorted(set(seen)) == [20, 32, 48]
    assert seen[11] == 32  # token 32 filled its block
    sim.finish(running)
    assert sim.cache.match(np.array(running.tokens, np.int32)).shared_tokens == 50


def test_the_second_of_two_equal_checkpoints_is_given_back():
    sim = simulator()
    prompt = tokens(50)
    a, b = sim.start(prompt), sim.start(prompt)
    sim.forward(a, 50)
    assert a.lease.report.checkpoints_saved == 1
    sim.forward(b, 49, save=False)
    assert sim.cache.reserve_checkpoint(b.lease, 50) is None  # there already
    sim.finish(a)
    sim.cancel(b)
    a, b = sim.start(prompt[:33]), sim.start(prompt[:33])
    reservations = [sim.cache.reserve_checkpoint(r.lease, 33) for r in (a, b)]
    for running in (a, b):
        sim.forward(running, 33, save=False)
    free = sim.cache.allocator.num_free
    assert [sim.publish(r, x) for r, x in zip((a, b), reservations)] == [True, False]
    assert sim.cache.allocator.num_free == free + 2
    assert sim.cache.stats()["checkpoints_duplicate"] == 1
    assert sim.cache.match(prompt[:33]).skipped_tokens == 33
    sim.check()


# ---- room ----


def test_tables_are_replaced_never_changed():
    sim = simulator(WINDOW)
    running = sim.start(tokens(100), chunk=20)
    for _ in range(5):
        tables = [running.lease.block_table, *running.lease.local_tables]
        copies = [table.copy() for table in tables]
        sim.forward(running, 20)
        assert all(np.array_equal(a, b) for a, b in zip(tables, copies))
    sim.finish(running)


def test_alone_a_prompt_that_is_cached_whole_still_computes_its_last_token():
    """Its last hidden state had to go for the room that the answer takes."""
    cache, prompt = PrefixCache(PURE, num_pages=1 + 3), tokens(32)
    lease = cache.acquire(prompt, capacity_tokens=32)
    saved = cache.reserve_checkpoint(lease, 32)
    cache.commit(lease, prompt, 32)
    cache.publish_checkpoint(saved)
    cache.release(lease)
    assert cache.match(prompt).skipped_tokens == 32
    lease = cache.acquire(prompt, capacity_tokens=48)
    assert (lease.shared_tokens, lease.skipped_tokens) == (32, 31)
    assert lease.report.miss_reason is MissReason.NO_ROOM


# ---- forks ----


def test_a_fork_inside_a_known_prompt_goes_its_own_way():
    """The lease knows its whole prompt; the fork's tokens are others behind the fork."""
    sim = simulator(HYBRID)
    prompt = tokens(64)
    sim.run(prompt)
    while sim.cache.evict(1):  # its tokens stay known
        pass
    first = sim.start(prompt)
    sim.forward(first, 20)
    other = sim.fork(first)
    other.tokens[20:] = [9] * 30
    assert sim.forward(other, 30)
    sim.finish(other)
    sim.cancel(first)
    sim.check()
    assert sim.cache.match(np.array(other.tokens, np.int32)).skipped_tokens == 50
    assert sim.cache.match(prompt).shared_tokens == 20


# ---- integrity ----


def test_check_integrity_finds_a_lost_reference():
    sim = simulator()
    running = sim.start(tokens(40))
    sim.forward(running, 40)
    page = running.lease.block_table[0]
    sim.cache.allocator.retain(page)
    with pytest.raises(RuntimeError, match=f"leases hold page {page[0]} 1 times, counted 2"):
        sim.cache.check_integrity()
    sim.cache.allocator.release(page)
    sim.cache.allocator.cache(page)
    with pytest.raises(RuntimeError, match=f"the index holds page {page[0]} 1 times, counted 2"):
        sim.cache.check_integrity()


def test_states_of_prompts_too_long_to_be_remembered():
    """Where nothing attends to everything, the tokens of the states in the pool may be more than
    the index is to know; what it needs, it keeps."""
    spec = CacheSpec(16, (), state_bytes=3000, hidden_bytes=64)
    sim = Simulator(settled(PrefixCache(spec, 4)))
    for seed in range(4):
        prompt = tokens(6000, seed)
        assert sim.run(prompt).lease.report.checkpoints_saved == 1
        assert sim.cache.match(prompt).skipped_tokens == 6000


def test_states_of_one_forward_know_of_each_other():
    """A state next to another that is being saved is worth the tokens between them, no more."""
    sim = simulator(num_pages=30)
    sim.run(tokens(64))
    for _ in range(3):
        assert sim.run(joined(tokens(64), tokens(5, 9))).lease.report.prompt_tokens == 69
    kept = sim.cache.match(tokens(64)).skipped_tokens
    assert kept == 64
    sim.run(tokens(100, 1), declared=list(range(16, 100, 16)))
    assert sim.cache.match(tokens(64)).skipped_tokens == kept


def test_pure_attention_counts_requests_that_continue_a_position():
    """Ends of prompts and answers, and forks: what is known of them orders the KV."""

    def uses():
        positions = sim.cache.explain(joined(prompt, answer)).positions
        return {position.position: position.uses for position in positions}

    sim = simulator(PURE)
    prompt, answer = tokens(40), tokens(10, 1)
    sim.run(prompt, answer)
    assert uses() == {40: 0, 50: 0}
    sim.run(joined(prompt, answer, tokens(5, 2)))
    assert uses() == {40: 0, 50: 1}
    sim.run(joined(prompt, tokens(5, 3)))
    assert uses() == {40: 1, 50: 1}
    sim.run(joined(prompt[:30], tokens(5, 4)))
    sim.run(joined(prompt[:30], tokens(5, 5)))
    assert uses() == {30: 1, 40: 1, 50: 1}
    sim.run(joined(prompt, answer, tokens(5, 6)))
    assert uses() == {30: 2, 40: 2, 50: 2}


def test_in_pure_attention_kv_is_valued_by_what_is_watched_at_its_end_from_the_start():
    """It enters the heap before its end is watched, as if it had no use."""
    cache, edges = PrefixCache(PURE, 1000), []
    for seed in range(5):
        prompt = tokens(100, seed)
        lease = cache.acquire(prompt, capacity_tokens=100)
        cache.commit(lease, prompt, 100)
        edges += lease.path.edges
        cache.release(lease)
        values = [cache.policy.tail_value(edge) for edge in edges]
        rate = cache.policy.reuse.rate(edges[-1].checkpoints[100])
        assert values[-1] == pytest.approx(16 * rate)  # a block
        least, (_, value, _) = least_of(cache)
        assert value == min(values) and least is edges[values.index(value)]
    assert len(edges) == 5


def serve(engine, prompt, answer):
    """One request from start to end; what it skipped."""
    running = engine.begin(prompt)
    engine.finish(running, joined(prompt, answer))
    return running.skipped_tokens


def test_pure_attention_keeps_chats_through_one_off_prompts():
    """Between two turns of a chat more tokens come in than the pool has room for, so by recency all
    of it would be gone; but those others never come again."""
    engine, seeds, shares = Ours(PURE, 129 * PURE.page_bytes), count(), []
    chats = [tokens(100, next(seeds)) for _ in range(4)]
    for turn in range(1, 49):
        for i, prompt in enumerate(chats):
            answer, more = tokens(8, next(seeds)), tokens(8, next(seeds))
            skipped = serve(engine, prompt, answer)
            if turn % 8 != 1:
                shares.append(skipped / len(prompt))
            chats[i] = joined(prompt, answer, more) if turn % 8 else tokens(100, next(seeds))
            for _ in range(6):
                serve(engine, tokens(100, next(seeds)), tokens(8, next(seeds)))
    assert np.mean(shares[len(shares) // 2 :]) > 0.8


def test_the_state_of_a_new_prompt_outlives_its_first_answer():
    """Others of its kind were used only once an answer's state lay beneath them: that also tells of
    one that has none yet, although the interval right before it makes it look cheap to rebuild."""
    engine, seeds, missed = Ours(WINDOW, 78 * WINDOW.page_bytes), count(), []
    for number, prompt_tokens in enumerate([70, 135, 100, 90, 196] * 8):
        prompt = tokens(prompt_tokens, next(seeds))
        for sample in range(8):
            skipped = serve(engine, prompt, tokens(40, next(seeds)))
            if sample and skipped < prompt_tokens:
                missed.append(number)
    assert max(missed, default=0) < 5, missed  # it takes some to learn


def test_a_state_with_uses_of_its_own_stays():
    """Half of the prompts part from the others 30 tokens earlier, and there is room for one state:
    it stays where all resume."""
    engine, shared, skipped = Ours(HEAVY, 65 * HEAVY.page_bytes), tokens(640), []
    for seed in range(1, 61):
        running = engine.begin(joined(shared[: 610 + seed % 2 * 30], tokens(40, seed)))
        engine.cache.release(running.lease)
        skipped.append(running.skipped_tokens)
    assert set(skipped[10:]) == {610}, skipped


def test_new_documents_are_there_for_their_second_question():
    """Thirty popular documents are replaced by others, twice, in pure attention. Most of what
    is asked belongs to known documents and is never used again: that says nothing about a new
    one."""
    engine, rng, seeds = Ours(PURE, 1500 * PURE.page_bytes), np.random.default_rng(0), count()
    often, preamble, hits = 1 / np.arange(1, 31) ** 0.8, tokens(40, next(seeds)), []
    for phase in range(3):
        documents = [
            joined(preamble, tokens(length, next(seeds))) for length in rng.integers(200, 1200, 30)
        ]
        asked = np.zeros(30, int)
        for k in rng.choice(30, 400, p=often / often.sum()):
            question, answer = (tokens(n, next(seeds)) for n in (rng.integers(8, 30), 10))
            skipped = serve(engine, joined(documents[k], question), answer)
            asked[k] += 1
            if phase and asked[k] == 2:
                hits.append(skipped >= len(documents[k]) - 16)
    assert len(hits) > 50
    assert np.mean(hits) > 0.8


@pytest.mark.parametrize("spec", matrix_rows([HYBRID, PURE], HYBRID))
def test_no_request_waits_for_a_pass_over_all_that_is_known(spec, monkeypatch):
    """A request recomputes a bounded number of values, however many there are."""
    engine, looked_at, most = Ours(spec, 2000 * spec.page_bytes), [], 0
    for where, name in (
        (HybridPolicy, "state_value"),
        (eviction, "tail_key"),
        (ReuseModel, "rate"),
    ):
        call = getattr(where, name)
        monkeypatch.setattr(
            where, name, lambda *args, call=call: looked_at.append(1) or call(*args)
        )
    engine.cache = cache = PrefixCache(spec, 2000)
    for seed in range(700):
        serve(engine, tokens(30, 2 * seed), tokens(5, 2 * seed + 1))
        most, _ = max(most, len(looked_at)), looked_at.clear()
    assert len(list(cache.index.checkpoints())) > 1200
    assert most < 4 * REFRESHED + 8 * MAX_RISEN  # a part of the sweep, and its own work
    cache.check_integrity()


def test_a_preempted_request_ends_no_answer():
    sim = simulator()
    running = sim.start(tokens(20), room=30)
    sim.forward(running, 20)
    running.tokens += [1, 2, 3]
    sim.forward(running, 3)
    parked = sim.preempt(running)
    assert [p.position for p in sim.cache.explain(tokens(20)).positions] == [20]
    resumed = sim.resume(parked, room=10)
    known = np.array(resumed.tokens, dtype=np.int32)
    assert [p.position for p in sim.cache.explain(known).positions] == [20]
    sim.finish(resumed)
    assert [p.position for p in sim.cache.explain(known).positions] == [20, 23]
