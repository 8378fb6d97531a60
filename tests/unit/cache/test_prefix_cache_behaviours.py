"""What this project holds itself to, at the level of the cache: sequences of prompts and what each
must skip. The sequences are those on which other engines fall short."""

import numpy as np
import pytest
from cache_prompts import joined, tokens
from followed_tree import FollowedTree
from settled import settled
from simulator import Simulator

from megatron_hybrid.cache.index.tree import Kind, Origin
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.policy.hybrid import HybridPolicy
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.report import MissReason

FULL = KVGroup(2, 64)
SECOND_TURN = Origin(Kind.ANSWER_END)


def hybrid(block=16, window=None):
    groups = (FULL,) if window is None else (FULL, KVGroup(2, 64, window=window))
    return CacheSpec(block, groups, state_bytes=20_000, hidden_bytes=128)


def simulator(block=16, num_pages=3000, window=None):
    return Simulator(PrefixCache(hybrid(block, window), num_pages))


def states(sim, but=()):
    """Positions of the stored states that are not of these kinds."""
    stored = (c for c in sim.cache.index.checkpoints() if c.pages is not None)
    return sorted(c.position for c in stored if c.kind not in but)


def skips(sim, prompt, answer=(), **options):
    return sim.run(prompt, answer, **options).lease.report.skipped_tokens


# ---- megatron-core's prefix caching and where it stops ----


@pytest.mark.parametrize(("window", "resumed"), [(64, 384), (100, 336), (300, 304)])
def test_in_a_model_of_windows_the_first_to_part_resumes_within_a_window(window, resumed):
    """However dear local KV is: five layers of it for each one of full attention."""
    spec = CacheSpec(16, (KVGroup(1, 64), KVGroup(5, 64, window=window)), 0, hidden_bytes=128)
    sim = Simulator(PrefixCache(spec, 4000))
    prompt = tokens(1000)
    skips(sim, prompt)
    assert skips(sim, joined(prompt[:400], tokens(50, 1))) == resumed


@pytest.mark.parametrize("chunk", [1, 7, 64, 768, None])
def test_chunks_of_a_prefill_do_not_matter(chunk):
    sim = simulator()
    skips(sim, tokens(1000), declared=[300, 301], chunk=chunk)
    intervals, opportunistic = {160, 320, 480, 640, 800, 960}, {256, 512, 768}
    assert states(sim) == sorted(intervals | opportunistic | {300, 301, 872, 1000})
    assert skips(sim, tokens(1000), chunk=chunk) == 1000


# ---- behaviours (7 also in test_report.py; 5, 6 and 9 need an engine) ----


def large_states(num_pages):
    """A state costs what 2,512 tokens of KV cost, so there is no interval."""
    policy = HybridPolicy(hybrid(), intervals=False, tails=False)
    return Simulator(PrefixCache(hybrid(), num_pages, policy=policy))


def test_while_pages_are_free_the_first_to_part_resumes_within_256_tokens():
    sim = large_states(3000)
    prompt = tokens(1000)
    skips(sim, prompt)
    assert skips(sim, joined(prompt[:700], tokens(60, 1))) == 512
    assert skips(sim, joined(prompt[:700], tokens(60, 2))) == 700


def test_opportunistic_states_take_only_free_pages_and_go_first():
    """Whatever runs, and in whatever order: to the cache without them all pages are as free."""
    caches = [
        PrefixCache(hybrid(), 400, policy=HybridPolicy(hybrid(), opportunistic=opportunistic))
        for opportunistic in (False, True)
    ]
    without, sim = (Simulator(cache) for cache in caches)
    rng, prompts = np.random.default_rng(3), [tokens(600, 9)]
    for number in range(16):
        base = prompts[rng.integers(len(prompts))]
        # no second one to part at a place: what is skipped differs, so what is learnt would, too
        prompts.append(joined(base, tokens(int(rng.integers(20, 700)), number))[:1400])
        skips(without, prompts[-1], tokens(30, number))
        skips(sim, prompts[-1], tokens(30, number))
        kept = [p for p in states(sim) if p not in spares_of(sim)]
        assert kept == states(without)
    assert sim.cache.stats()["checkpoints_saved"] > without.cache.stats()["checkpoints_saved"]
    assert sim.cache.stats()["checkpoints_no_room"] == without.cache.stats()["checkpoints_no_room"]


def spares_of(sim):
    return states(sim, set(Kind) - {Kind.OPPORTUNISTIC})


def test_opportunistic_states_of_a_forward_leave_room_for_its_end():
    sim = large_states(1 + 63 + 10)  # a prompt's KV, and one state
    running = sim.run(tokens(1000))
    assert running.saved == [1000]
    assert running.lease.report.checkpoints_skipped == 0


def test_a_opportunistic_state_where_prompts_part_is_kept_as_a_junction():
    sim = large_states(3000)
    prompt = tokens(1000)
    skips(sim, prompt)
    assert spares_of(sim) == [256, 512, 768]
    assert skips(sim, joined(prompt[:512], tokens(60, 1))) == 512
    assert spares_of(sim) == [256, 768]
    kinds = {p.position: p.kind for p in sim.cache.explain(prompt).positions}
    assert kinds[512] is Kind.JUNCTION
    skips(sim, joined(prompt[:768], tokens(60, 2)), declared=[768])
    assert spares_of(sim) == [256]
    skips(sim, prompt[:256])  # the end of a prompt
    assert spares_of(sim) == []


def test_intervals_of_an_answer_go_on_where_those_of_the_prompt_end():
    sim = simulator()
    running = sim.run(tokens(330), tokens(330, 1))
    assert [p for p in running.saved if p % 160 == 0] == [160, 320, 480, 640]
    samples = sim.start(tokens(330), room=1)
    sim.forward(samples, 330 - samples.done)
    sample = sim.fork(samples)
    for token in tokens(200, 2):
        sample.tokens.append(int(token))
        sim.forward(sample, 1)
    assert sample.saved == [480]
    sim.finish(sample)
    sim.finish(samples)
    sim.check()


def test_an_answer_that_stops_at_a_interval_is_the_end_of_an_answer():
    sim, followed = simulator(), FollowedTree()
    for length, kind in ((60, Kind.ANSWER_END), (61, Kind.INTERVAL)):
        prompt, answer = tokens(100, length), tokens(length, 1)
        running = sim.start(prompt, room=length)
        assert sim.forward(running, 100)
        for token in answer:
            running.tokens.append(int(token))
            assert sim.forward(running, 1)
        followed.ask(sim.cache.contents.changes, 100)
        sim.finish(running)
        positions = sim.cache.explain(joined(prompt, answer)).positions
        assert {p.position: p.kind for p in positions}[160] == kind
        followed.ask(sim.cache.contents.changes, 100)
        followed.check(sim.cache)


def test_intervals_of_an_answer_take_no_room_from_what_is_worth_more():
    """Nothing optional fails a request: without room the intervals are left out and counted."""
    sim = Simulator(settled(PrefixCache(hybrid(), 1 + 30 + 38 + 9)))
    used = tokens(320)  # 20 blocks and a state of 10 pages
    for _ in range(5):
        sim.run(used)
    sim.cache.policy.interval_tokens = 160
    running = sim.run(tokens(100, 1), tokens(500, 2), room=501)  # 38 blocks; 9 pages are left
    assert running.saved == []
    assert running.lease.report.checkpoints_skipped == 1 + 3 + 1  # prompt, intervals, answer
    assert sim.cache.match(used).skipped_tokens == 320
    # but what becomes of such places is watched
    positions = sim.cache.explain(joined(tokens(100, 1), tokens(500, 2))).positions
    kinds = {p.position: p.kind for p in positions if not p.is_stored}
    assert [kinds[p] for p in (160, 320, 480)] == [Kind.INTERVAL] * 3


def test_intervals_of_an_old_prompt_thin_out_before_all_go():
    """The less that is left, the more each saves: of an evenly spaced row every other one goes, and
    the ends, which alone were used, stay longest."""
    sim = simulator()
    old = tokens(1600)
    skips(sim, old)
    for _ in range(3):
        assert skips(sim, old) == 1600
    distances = []
    while len(states(sim)) > 2:
        before = len(states(sim))
        while len(states(sim)) == before:
            assert sim.cache.evict(1)
        left = states(sim)
        assert left[-1] == 1600
        distances.append((len(left), int(np.diff([0, *left]).max())))
    worst = dict(distances)
    # n states split 1600 tokens into n gaps; halving gaps is within a factor 2 of the best split
    assert all(worst[n] <= 2 * (1600 // n + 160) for n in range(2, 10)), worst
    assert worst[9] == 320


def test_the_most_used_interval_outlives_its_neighbours():
    sim = simulator()
    old = tokens(1600)
    skips(sim, old)
    for seed in range(1, 6):
        skips(sim, joined(old[:810], tokens(30, seed)))  # leaves it behind the interval at 800
    while len([p for p in states(sim) if p in range(160, 1600, 160)]) > 3:
        assert sim.cache.evict(1)
        skips(sim, joined(old[:810], tokens(30, 6)))
    assert sim.cache.match(old[:900]).skipped_tokens in (800, 810)


def test_a_resumed_prefill_saves_what_it_wanted_as_what_it_was():
    sim = simulator()
    prompt = tokens(400)
    running = sim.start(prompt, messages=[350], declared=[200], room=200)
    lease = running.lease
    assert sim.forward(running, 100)
    sim.cache.want(lease, 300)  # where another request will leave it
    wanted = {p: kind for p, kind in lease.wanted.items() if p > 100}
    assert {wanted[p] for p in (200, 300, 350)} == {Kind.JUNCTION, Kind.MESSAGE}
    parked = sim.preempt(running)
    resumed = sim.resume(parked, room=500)
    assert resumed.lease.wanted == wanted
    assert resumed.lease.origin == lease.origin
    assert sim.forward(resumed, 300)
    kinds = {p.position: p.kind for p in sim.cache.explain(prompt).positions}
    assert {p: kinds[p] for p in wanted} == wanted
    for token in tokens(100, 1):
        resumed.tokens.append(int(token))
        assert sim.forward(resumed, 1)
    assert sorted(resumed.saved) == [*sorted(wanted), 480]
    assert sim.cache.stats()["checkpoints_duplicate"] == 0
    sim.finish(resumed)
    sim.check()


def test_a_resumed_answer_goes_on_saving_intervals_as_the_turn_that_it_is():
    sim = simulator()
    history, answer = tokens(100), tokens(20, 1)
    skips(sim, history, answer)
    prompt = joined(history, answer, tokens(30, 2))
    running = sim.start(prompt, room=400)
    assert running.lease.origin == SECOND_TURN
    assert sim.forward(running, 30)
    for token in tokens(20, 3):
        running.tokens.append(int(token))
        assert sim.forward(running, 1)
    resumed = sim.resume(sim.preempt(running), room=400)
    for token in tokens(200, 4):
        resumed.tokens.append(int(token))
        assert sim.forward(resumed, 1)
    sim.finish(resumed)
    assert resumed.saved[-2:] == [320, 370]
    path = sim.cache.index.walk("", np.array(resumed.tokens, np.int32))
    ends = {p: c.origin for edge in path.edges for p, c in edge.checkpoints.items()}
    assert ends[370] == SECOND_TURN


def test_forks_and_answers_that_end_on_a_interval_are_of_the_turn_that_they_are():
    sim = simulator()
    history, answer, question, rest = tokens(100), tokens(20, 1), tokens(30, 2), tokens(170, 4)
    skips(
        sim, joined(history, answer, question, rest, tokens(20, 5))
    )  # an interval at 320, of no turn
    skips(sim, history, answer)
    running = sim.start(joined(history, answer, question), room=400)
    while running.lease.done < 150:
        assert sim.forward(running, 1)
    other = sim.fork(running)
    assert other.lease.origin == running.lease.origin == SECOND_TURN
    sim.cancel(running)
    for token in rest:
        other.tokens.append(int(token))
        assert sim.forward(other, 1)
    sim.finish(other)
    path = sim.cache.index.walk("", np.array(other.tokens, np.int32))
    end = path.edges[-1].at(320).checkpoints.get(320)
    assert (end.kind, end.origin) == (Kind.ANSWER_END, SECOND_TURN)


def test_a_lease_that_is_live_cannot_be_resumed():
    sim = simulator()
    running = sim.start(tokens(20))
    sim.forward(running, 10)
    with pytest.raises(ValueError, match="released before it is resumed"):
        sim.cache.resume(running.lease, tokens(20)[:10], capacity_tokens=20)


def test_forks_of_long_chains_are_covered():
    """Three chains of 32k tokens, room for 48 states (one every 2,048 tokens); then a fork of the
    first at 8,192, then all chains again. By recency of whole chains they resume at 0, 8,192, 0, 0;
    8,192, 8,192, 16,384 and 28,672 are possible for the states alone: 61,440 tokens together. Here
    at 1/16 of the size."""
    state_pages, chain = 8, 2048
    spec = CacheSpec(16, (FULL,), state_bytes=state_pages * 2048 - 128, hidden_bytes=128)
    assert spec.checkpoint_pages == state_pages
    sim = Simulator(PrefixCache(spec, 1 + 3 * chain // 16 + 48 * state_pages))
    chains = [tokens(chain, seed) for seed in range(3)]
    for prompt in chains:
        assert skips(sim, prompt) == 0
    fork = joined(chains[0][:512], tokens(chain - 512, 9))
    got = [skips(sim, prompt) for prompt in (fork, *chains)]
    assert got[0] == 512 and min(got) >= 512 and sum(got) >= 61_440 // 16, got


def test_behaviour_7_part_of_the_kv_evicted():
    sim = Simulator(settled(PrefixCache(hybrid(), 3000)))
    prompt = tokens(160)
    sim.run(prompt[:100])
    sim.run(prompt)
    sim.cache.evict(sim.cache.spec.checkpoint_pages + 3)
    match = sim.cache.match(prompt)
    assert (match.shared_tokens, match.skipped_tokens) == (112, 100)
    assert match.miss_reason is MissReason.KV_EVICTED


@pytest.mark.parametrize("branch", [40, 320, 1200])
def test_behaviour_8_the_shallow_state_of_many_branches_outlives_the_deep_ones(branch):
    """Also where each branch is many times as long as what they share, and came later."""
    sim = Simulator(settled(PrefixCache(hybrid(), 3000)))
    shared = tokens(160)
    for seed in range(1, 9):
        skips(sim, joined(shared, tokens(branch, seed)), declared=[160])
    assert len(states(sim)) == 1 + 8
    while states(sim) != [160]:
        assert sim.cache.evict(1)
        assert 160 in states(sim)
    assert skips(sim, joined(shared, tokens(branch, 10))) == 160


@pytest.mark.parametrize("states_bytes", [20_000, 0])
def test_what_a_waiting_request_resumes_from_outlives_what_was_used_later(states_bytes):
    spec = CacheSpec(16, (FULL,), state_bytes=states_bytes, hidden_bytes=128)
    sim = Simulator(settled(PrefixCache(spec, 3000)))
    prompts = [tokens(320, seed) for seed in range(8)]
    for prompt in (*prompts, *prompts[1:]):
        skips(sim, prompt)
    sim.cache.expected.add(7, joined(prompts[0], tokens(20, 9)))
    sim.cache.expected.add(7, prompts[1])  # the same request
    per_prompt = 20 * sim.cache.spec.kv_pages_per_block + sim.cache.spec.checkpoint_pages
    sim.cache.evict(7 * per_prompt)
    assert [sim.cache.match(p).skipped_tokens >= 319 for p in prompts] == [True] + [False] * 7
    sim.cache.expected.discard(7)
    for prompt in prompts[1:]:
        skips(sim, prompt)
    sim.cache.evict(per_prompt)
    assert sim.cache.match(prompts[0]).skipped_tokens < 319
