"""Admission: how many requests run concurrently, and what is evicted for them."""

import numpy as np
import pytest
from cache_prompts import tokens

from megatron_hybrid.cache.pages.lease_pages import LeasePages
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.policy.hybrid import STEP_TOKENS, AnswerLengths, saved_by_one_more
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.tools.replay.ours import Ours

SPEC = CacheSpec(16, (KVGroup(2, 64),), state_bytes=20_000, hidden_bytes=128)
DOCUMENTS = 8
PAGES = DOCUMENTS * (2 * SPEC.checkpoint_pages + 40)
STRANGER = 30  # pages of 480 tokens


def test_what_each_one_more_saves_adds_up_to_what_all_save():
    """A request alone pays for all of its steps, one of 50 for a fiftieth."""
    saved = sum(saved_by_one_more(running, 299) for running in range(1, 50))
    assert saved == pytest.approx(300 * STEP_TOKENS * (1 - 1 / 50))


def test_answer_lengths_are_fitted():
    lengths = AnswerLengths()
    for _ in range(1000):
        lengths.observe(700)
    assert lengths.mean == pytest.approx(700, rel=1e-3)
    for _ in range(45):
        lengths.observe(0)
    assert 300 < lengths.mean < 400


def run(engine, prompt, answer):
    engine.finish(engine.begin(prompt), np.concatenate([prompt, answer]))


def served(mode="restore"):
    """A cache in which each of the documents of 480 tokens was asked about in turn, often."""
    engine = Ours(SPEC, 1e6)
    engine.cache = PrefixCache(SPEC, PAGES, mode)
    for visit in range(30):
        for document in range(DOCUMENTS):
            question = tokens(20, 1000 + 100 * visit + document)
            run(engine, np.concatenate([tokens(480, document), question]), tokens(5, visit))
    return engine.cache


def start_strangers(cache, most=40):
    """Leases of requests that share nothing, until one is refused."""
    leases = []
    for n in range(most):
        lease = cache.acquire(tokens(480, 50_000 + n), capacity_tokens=480)
        if lease is None:
            break
        leases.append(lease)
    return leases


def test_beyond_some_number_requests_wait_rather_than_evict_what_others_use():
    cache = served()
    leases = start_strangers(cache)
    assert 2 <= len(leases) < PAGES // STRANGER - DOCUMENTS
    assert cache.stats()["held_back"] == cache.stats()["refused"] == 1
    prompts = [np.concatenate([tokens(480, n), tokens(20, 9)]) for n in range(DOCUMENTS)]
    skips = [cache.match(prompt).skipped_tokens for prompt in prompts]
    assert sum(skip == 480 for skip in skips) >= DOCUMENTS // 2, skips
    # It starts when others have ended, at the latest when it is alone.
    for lease in leases[1:]:
        cache.release(lease)
    assert cache.acquire(tokens(480, 99), capacity_tokens=480) is not None
    cache.check_integrity()


def test_a_long_answer_holds_nobody_back_for_long():
    """One request decodes for long, and a large new one would evict valuable states. But each step
    of waiting is one that both could have shared."""
    cache = served()
    cache.policy.answers.mean = 1.0
    decoding = cache.acquire(tokens(16, 9), capacity_tokens=16)
    large = tokens(16 * (PAGES // 2), 50_000)
    attempts = 1
    while cache.acquire(large, capacity_tokens=len(large)) is None:
        attempts += 1
        assert attempts < 1000
    assert attempts > 1
    assert cache.stats()["held_back"] == attempts - 1
    cache.release(decoding)


def test_whoever_starts_begins_the_count_of_attempts_anew():
    """Between two strangers a small request starts: the second one is held back as if no step had
    passed."""
    stranger = tokens(480, 60_000)

    def attempts(cache):
        count = 1
        while cache.acquire(stranger, capacity_tokens=480) is None:
            count += 1
        return count

    first, later = served(), served()
    for cache in (first, later):
        cache.policy.answers.mean = 0.0
        start_strangers(cache)
    for _ in range(2):
        assert later.acquire(stranger, capacity_tokens=480) is None
    for cache in (first, later):
        assert cache.acquire(tokens(3, 77), capacity_tokens=3) is not None
    assert attempts(first) == attempts(later) > 2


def test_without_room_nothing_is_held_back_but_refused():
    cache = served()
    lease = cache.acquire(tokens(480, 1), capacity_tokens=16 * (PAGES - 60))
    assert lease is not None
    assert cache.acquire(tokens(1600, 2), capacity_tokens=1600) is None
    assert (cache.stats()["held_back"], cache.stats()["refused"]) == (0, 1)


@pytest.mark.parametrize("mode", ["memory_only", "off"])
def test_where_nothing_is_restored_nothing_is_held_back(mode):
    cache = served(mode)
    assert len(start_strangers(cache)) == (PAGES - 1) // STRANGER
    assert cache.stats()["held_back"] == 0


def test_what_is_worth_little_holds_nobody_back():
    engine = Ours(SPEC, PAGES * SPEC.page_bytes)
    for n in range(40):  # no prompt returns
        run(engine, tokens(480, n), tokens(200, n))
    assert len(start_strangers(engine.cache)) == PAGES // STRANGER


def test_only_answers_teach_how_long_answers_are():
    cache = served()
    mean = cache.policy.answers.mean
    for seed in range(50):  # fetched from a tier below; cancelled in its answer
        cache.release(cache.adopt(tokens(64, seed), capacity_tokens=64))
        lease = cache.acquire(tokens(64, seed), capacity_tokens=64)
        cache.commit(lease, tokens(64, seed), 64, flush=True)
        cache.release(lease)
    assert cache.policy.answers.mean == mean
    lease = cache.acquire(tokens(64, 1), capacity_tokens=96)
    cache.commit(lease, tokens(96, 1), 96, answered=True)
    cache.commit(lease, tokens(96, 1), 96, answered=True)
    cache.release(lease)
    assert cache.policy.answers.mean == mean + (32 - mean) / 64


def test_who_was_preempted_is_not_held_back():
    cache = served()
    prompt = tokens(480, 77_777)
    lease = cache.acquire(prompt, capacity_tokens=480)
    cache.commit(lease, prompt, 320)
    cache.release(lease)
    start_strangers(cache)
    assert cache.stats()["held_back"] == 1
    assert cache.resume(lease, prompt[:320], capacity_tokens=480) is not None


WINDOWS = CacheSpec(16, (KVGroup(2, 64), KVGroup(10, 64, window=64)), state_bytes=0, hidden_bytes=0)


@pytest.mark.parametrize("shared", [0, 100, 480, 1600])
@pytest.mark.parametrize("chunk", [1, 16, 100, 512, None])
def test_the_most_pages_are_those_of_the_largest_forward(monkeypatch, shared, chunk):
    """The pages that a prompt takes, forward by forward, are at most the ones that admission
    counts, and as many once a forward is as long as the longest and starts behind a window."""
    length = 2000
    cache = PrefixCache(WINDOWS, 1 << 16)
    prompt = tokens(length, 0)
    if shared:
        run_whole(cache, prompt[:shared])
    cache.acquire(tokens(16, 9), capacity_tokens=16)  # nothing is priced for a request alone
    before = cache.allocator.num_pages - cache.allocator.num_free
    counted = []
    most_needed = LeasePages.most_needed

    def count(*args):
        counted.append(most_needed(*args))
        return counted[-1]

    monkeypatch.setattr(LeasePages, "most_needed", count)
    lease = cache.acquire(prompt, capacity_tokens=length, chunk_tokens=chunk)
    assert lease.skipped_tokens == shared
    peak = 0
    while lease.done < length:
        stop = min(length, lease.done + (chunk or length))
        assert cache.extend(lease, stop, chunk_tokens=stop - lease.done)
        peak = max(peak, cache.allocator.num_pages - cache.allocator.num_free - before)
        cache.commit(lease, prompt, stop)
    blocks_of_a_step = WINDOWS.pages_per_block[1] * 2  # partly filled ones, at both ends
    assert peak <= counted[0] <= peak + blocks_of_a_step


def run_whole(cache, prompt):
    lease = cache.acquire(prompt, capacity_tokens=len(prompt))
    cache.commit(lease, prompt, len(prompt))
    cache.publish_checkpoint(cache.reserve_checkpoint(lease, len(prompt)))
    cache.release(lease)


def test_a_prompt_of_several_forwards_is_priced_at_its_largest_one():
    """The first forward fits into the free pages. A later one, which also sees a window, would
    evict documents that others ask about, so the request waits."""
    spec = CacheSpec(16, (KVGroup(2, 64), KVGroup(10, 64, window=512)), 0, 0)
    engine = Ours(spec, 1e7)
    cache = engine.cache = PrefixCache(spec, 1400)
    for visit in range(30):
        for document in range(8):
            question = np.concatenate([tokens(480, document), tokens(20, visit)])
            run(engine, question, tokens(5, 0))
    running = cache.acquire(tokens(16, 9), capacity_tokens=16)
    cache.policy.admission_value = lambda running, held_back: 0.0  # whatever would be evicted
    length, chunk = 512, 256
    first = length // 16 + chunk // 16 * spec.pages_per_block[1]
    largest = length // 16 * (1 + spec.pages_per_block[1])
    cache.evict(first - cache.allocator.num_free)
    assert first <= cache.allocator.num_free < largest
    stranger = tokens(length, 50_000)
    assert cache.acquire(stranger, capacity_tokens=length, chunk_tokens=chunk) is None
    assert cache.stats()["held_back"] == 1
    cache.release(running)
    assert cache.acquire(stranger, capacity_tokens=length, chunk_tokens=chunk) is not None
