"""Every reason for a miss, each brought about on purpose through the cache's public calls, and what
is counted under it."""

import pytest
from cache_prompts import joined, tokens
from settled import settled
from simulator import LARGE_STATES, Simulator

from megatron_hybrid.cache import matching
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.report import MissReason

STATE_PAGES = LARGE_STATES.checkpoint_pages


def simulator(num_pages=3000, mode="restore"):
    return Simulator(settled(PrefixCache(LARGE_STATES, num_pages, mode)))


def lost(sim):
    """Tokens lost so far, by reason."""
    stats = sim.cache.stats()
    counts = {reason: stats[f"lost_tokens_{reason.value}"] for reason in MissReason}
    return {reason: count for reason, count in counts.items() if count}


def report_of(sim, prompt, salt="", **options):
    """The report of a request that is cancelled at once."""
    running = sim.start(prompt, salt, **options)
    sim.cancel(running)
    return running.lease.report


def test_none_where_nothing_went_unused():
    sim = simulator()
    sim.run(tokens(100))
    assert report_of(sim, tokens(100)).miss_reason is None
    assert report_of(sim, joined(tokens(100), tokens(9, 1))).miss_reason is None
    assert report_of(sim, tokens(100, 1)).miss_reason is MissReason.NO_SHARED_PREFIX
    assert lost(sim) == {}  # there was nothing to lose


@pytest.mark.parametrize(
    ("mode", "recompute", "reason"),
    [
        ("memory_only", None, MissReason.MODE),
        ("memory_only", "prompt_log_probs", MissReason.MODE),
        ("restore", "prompt_log_probs", MissReason.PROMPT_LOG_PROBS),
    ],
)
def test_what_had_to_be_computed_anyway_was_lost_to_nothing_else(mode, recompute, reason):
    """Neither to eviction, nor because another request was not finished."""
    sim = simulator(mode=mode)
    assert report_of(sim, tokens(100), recompute_reason=recompute).miss_reason is (
        MissReason.NO_SHARED_PREFIX
    )
    running = sim.start(tokens(100))
    sim.forward(running, 10)
    assert report_of(sim, tokens(100), recompute_reason=recompute).miss_reason is reason
    sim.finish(running)
    sim.cache.evict(10_000)
    assert report_of(sim, tokens(100), recompute_reason=recompute).miss_reason is reason
    assert lost(sim) == {reason: 10 + 10}


@pytest.mark.parametrize(
    ("evicted", "length", "reason"),
    [
        (0, 90, MissReason.STATE_NEVER_SAVED),
        (1, 100, MissReason.STATE_EVICTED),  # on which all of the KV hangs
        (10_000, 100, MissReason.KV_EVICTED),
    ],
)
def test_a_state_or_kv_that_is_not_there(evicted, length, reason):
    sim, prompt = simulator(), tokens(100)[:length]
    sim.run(tokens(100))
    sim.cache.evict(evicted)
    if reason is MissReason.STATE_EVICTED:
        assert "100  evicted     end of a prompt" in str(sim.cache.explain(prompt))
    assert report_of(sim, prompt).miss_reason is reason
    assert lost(sim) == {reason: length}


def test_in_flight():
    sim = simulator()
    running = sim.start(tokens(100))
    sim.forward(running, 60)
    assert report_of(sim, tokens(100)).miss_reason is MissReason.IN_FLIGHT
    assert lost(sim) == {MissReason.IN_FLIGHT: 100}


def test_in_flight_counts_what_will_be_there_although_it_is_not_known_yet():
    sim = simulator()
    sim.run(tokens(100))
    sim.start(joined(tokens(100), tokens(100, seed=1)), declared=[130, 150, 170])
    longer = joined(tokens(100), tokens(60, seed=1), tokens(60, seed=2))
    report = report_of(sim, longer)
    assert (report.skipped_tokens, report.miss_reason) == (100, MissReason.IN_FLIGHT)
    assert lost(sim) == {MissReason.IN_FLIGHT: 50}  # up to 150


def test_no_room():
    sim = simulator(1 + 7 + STATE_PAGES)
    sim.run(tokens(100))  # 7 blocks
    running = sim.start(tokens(100), room=16 * (7 + STATE_PAGES) - 100)
    assert running.lease.report.miss_reason is MissReason.NO_ROOM
    sim.cancel(running)


@pytest.mark.parametrize(
    ("mode", "why", "reason"),
    [
        ("memory_only", None, MissReason.MODE),
        ("restore", "prompt_log_probs", MissReason.PROMPT_LOG_PROBS),
        ("restore", None, MissReason.BUDGET),
    ],
)
def test_no_room_is_no_reason_where_nothing_would_have_been_restored(mode, why, reason):
    """The part of a block that the prompt would share is in its own way."""
    cache = PrefixCache(LARGE_STATES, 1 + 3, mode)
    prompt = joined(tokens(20), tokens(28, seed=1))
    lease = cache.acquire(prompt[:20], capacity_tokens=20)
    assert cache.reserve_checkpoint(lease, 20) is None
    cache.commit(lease, prompt, 20)
    cache.release(lease)
    match = cache.match(prompt, recompute_reason=why)
    lease = cache.acquire(prompt, capacity_tokens=48, recompute_reason=why)
    assert (match.shared_tokens, lease.shared_tokens) == (20, 16)
    assert match.miss_reason is lease.report.miss_reason is reason


# ---- the pool is too small ----


def test_budget_at_the_end_of_a_prompt():
    sim = simulator(1 + 8)  # a state takes 10 pages
    assert sim.run(tokens(100)).lease.report.checkpoints_skipped > 0
    report = report_of(sim, tokens(100))
    assert (report.shared_tokens, report.miss_reason) == (100, MissReason.BUDGET)
    assert report_of(sim, tokens(90)).miss_reason is MissReason.STATE_NEVER_SAVED
    assert lost(sim) == {MissReason.BUDGET: 100, MissReason.STATE_NEVER_SAVED: 90}
    explanation = str(sim.cache.explain(tokens(100)))
    assert "      100  refused     end of a prompt, used 1 x" in explanation.splitlines()
    assert explanation.endswith("(budget): a state after it was wanted, and found no room")


def test_budget_at_the_end_of_an_answer():
    """Its position is in the tree when the state is refused, the end of a prompt's is not."""
    sim = simulator(1 + 8)
    prompt, answer = tokens(60), tokens(20, 1)
    sim.run(prompt, answer)
    positions = sim.cache.explain(joined(prompt, answer)).positions
    assert [(p.position, p.refused) for p in positions] == [(60, True), (80, True)]
    assert report_of(sim, joined(prompt, answer)).miss_reason is MissReason.BUDGET


def test_a_state_that_nobody_asked_for_was_not_refused():
    sim = simulator(1 + 8)
    running = sim.start(tokens(100))
    sim.forward(running, 100, save=False)
    sim.cancel(running)
    assert report_of(sim, tokens(100)).miss_reason is MissReason.STATE_NEVER_SAVED


def test_a_state_that_found_no_room_says_nothing_of_one_at_the_same_position_of_another_prompt():
    sim = simulator(1 + 2 * 7 + STATE_PAGES - 1)
    prompt = tokens(100)
    first = sim.start(prompt)
    sim.forward(first, 100, save=False)
    parting = sim.start(joined(prompt[:20], tokens(80, 1)))
    again = sim.start(prompt)  # from now on its tokens are in one piece again
    sim.forward(parting, 100)
    assert parting.lease.report.checkpoints_skipped > 0
    for running in (first, parting, again):
        sim.cancel(running)
    positions = sim.cache.explain(prompt).positions
    assert [(p.position, p.refused) for p in positions] == [(20, True), (100, False)]


def test_a_refused_state_that_is_saved_later_is_no_longer_missed():
    sim = simulator(1 + 7 + STATE_PAGES)
    prompt = tokens(100)
    running, blocker = sim.start(prompt), sim.start(tokens(100, 1)[:50])
    sim.forward(running, 100)
    sim.cancel(blocker)
    sim.finish(running, save=False)
    assert sim.cache.match(prompt).miss_reason is MissReason.BUDGET
    sim.run(prompt)
    assert sim.cache.match(prompt).miss_reason is None
    assert sim.cache.match(joined(prompt, tokens(9, 2))).miss_reason is None
    sim.cache.evict(1)
    assert sim.cache.match(prompt).miss_reason is MissReason.STATE_EVICTED


def test_the_deepest_state_that_is_missed_says_why():
    """At 50 a state was dropped, at 100 there was no room for one: with more room, 100 would be
    skipped."""
    sim = simulator(1 + 9 + STATE_PAGES)
    prompt = tokens(100)
    sim.run(prompt[:50])
    sim.cache.evict(sim.cache.allocator.num_free and STATE_PAGES)
    assert sim.cache.match(prompt[:50]).miss_reason is MissReason.STATE_EVICTED
    running, blocker = sim.start(prompt), sim.start(tokens(40, 1))
    sim.forward(running, 100)
    sim.cancel(blocker)
    sim.finish(running, save=False)
    assert sim.cache.match(prompt).miss_reason is MissReason.BUDGET
    assert sim.cache.match(prompt[:99]).miss_reason is MissReason.STATE_EVICTED


# ---- other salts ----


def test_salt_is_told_to_the_operator_and_not_to_the_tenant():
    sim = simulator()
    prompt = tokens(100)
    sim.run(prompt, salt="a")
    report = report_of(sim, joined(prompt, tokens(9, 1)), "b")
    assert (report.shared_tokens, report.miss_reason) == (0, MissReason.NO_SHARED_PREFIX)
    assert sim.cache.match(prompt, "b").miss_reason is MissReason.NO_SHARED_PREFIX
    assert lost(sim) == {MissReason.SALT: 100}
    explanation = sim.cache.explain(prompt, "c")
    assert explanation.match.miss_reason is MissReason.NO_SHARED_PREFIX
    assert (explanation.reason, explanation.elsewhere_tokens) == (MissReason.SALT, 100)
    assert str(explanation).splitlines()[-2:] == [
        "100 are known under another salt",
        "stops at 0 (salt): its tokens are known, but under another salt",
    ]


@pytest.mark.parametrize("mode", ["restore", "memory_only"])
def test_explain_tells_of_another_salt_where_that_is_what_is_missing(mode):
    sim = simulator(mode=mode)
    sim.run(tokens(100), salt="a")
    explanation = sim.cache.explain(tokens(100), "b")
    assert explanation.reason is (
        MissReason.SALT if mode == "restore" else MissReason.NO_SHARED_PREFIX
    )
    running = sim.start(tokens(100), "b")  # about to save it under the own salt
    explanation = sim.cache.explain(tokens(100), "b")
    assert explanation.reason is explanation.match.miss_reason
    sim.cancel(running)


@pytest.mark.parametrize(("shared", "elsewhere"), [(15, 0), (16, 16), (17, 17)])
def test_less_than_a_block_is_chance(shared, elsewhere):
    sim = simulator()
    sim.run(tokens(100), salt="a")
    prompt = joined(tokens(100)[:shared], tokens(50, 1))
    assert sim.cache.explain(prompt, "b").elsewhere_tokens == elsewhere


def test_a_common_first_token_under_the_own_salt_does_not_hide_it():
    """All prompts start with one token; only the rest of it is known under another salt alone."""
    sim = simulator()
    prompt = tokens(100)
    sim.run(prompt, salt="a")
    sim.run(joined(prompt[:1], tokens(40, 1)), salt="b")
    report = report_of(sim, prompt, "b")
    assert (report.shared_tokens, report.miss_reason) == (1, MissReason.STATE_NEVER_SAVED)
    assert lost(sim) == {MissReason.STATE_NEVER_SAVED: 1, MissReason.SALT: 99}


def test_log_probs_of_a_prompt_are_not_lost_to_the_salt():
    sim = simulator()
    sim.run(tokens(100), salt="a")
    report_of(sim, tokens(100), "b", recompute_reason="prompt_log_probs")
    assert lost(sim) == {}


def test_salts_are_bounded(monkeypatch):
    monkeypatch.setattr(matching, "MAX_SALT_ENTRIES", 3)
    sim = simulator()
    for seed in (0, 1, 2, 0, 3):  # 1 is the longest unused
        sim.run(tokens(20, seed), salt="a")
    found = [sim.cache.explain(tokens(20, seed), "b").elsewhere_tokens for seed in range(4)]
    assert found == [20, 0, 20, 20]
    assert not sim.cache.explain(tokens(20), "a").elsewhere_tokens
