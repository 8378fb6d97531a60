"""Host memory and disk below the pool: what left it comes back to the bit, and nobody waits for it
who need not."""

import errno
import gc
import itertools
import os
import random
import re
import threading
import weakref
from collections import Counter
from contextlib import suppress
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from differential import InjectedError, LogitsRecorder, failing_at_first, failing_forward, poison
from matrix import matrix_rows
from reference import (
    finish,
    greedy,
    greedy_tokens,
    is_greedy,
    random_tokens,
    tiny_engine,
    tiny_model,
)
from slow_tiers import SlowArrival, SlowStore

from megatron_hybrid.cache.index.prefix_index import PrefixIndex
from megatron_hybrid.cache.pages.allocator import NULL_PAGE
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference import engine_parts
from megatron_hybrid.inference.config import STATE_ENCODINGS
from megatron_hybrid.inference.metrics.prometheus import COUNTERS
from megatron_hybrid.inference.requests.request import RequestStatus
from megatron_hybrid.offload import disk_store, fetch
from megatron_hybrid.offload.disk_store import CacheFolderError
from megatron_hybrid.offload.page_mover import PageMover
from megatron_hybrid.offload.prefix_keys import PrefixKeys

PATTERNS = ("MG*-", "*-*-", "W*-", "W-", "C*-", "MK", "LG", "MG*-W-")
TIERS = ("host", "disk")
EVERYTHING = 10**6


def tier_fields(tier: str, folder) -> dict:
    return {"host_cache_bytes": 64 << 20} if tier == "host" else {"cache_dir": folder}


def empty_pool(engine):
    """Evicts all that is cached, and leaves nothing of it in the pool."""
    engine.cache.evict(EVERYTHING)
    assert not engine.cache.allocator.num_evictable
    poison(engine)


def answer(engine, prompt, count=6):
    result = engine.generate([prompt], greedy(count))[0]
    engine.check_integrity()
    return result


def answer_and_leave(engine, prompts):
    """Their answers, and nothing of them is in the pool any more."""
    tokens = [answer(engine, prompt).token_ids for prompt in prompts]
    empty_pool(engine)
    return tokens


@pytest.mark.parametrize(
    ("pattern", "length", "tier"),
    matrix_rows(
        itertools.product(PATTERNS, (33, 96), TIERS),
        *((pattern, 33, "host") for pattern in PATTERNS),
        ("MG*-W-", 96, "disk"),
        ("*-*-", 96, "disk"),
    ),
)
def test_what_was_evicted_comes_back(tmp_path, tier, pattern, length):
    model, prompt = tiny_model(pattern), random_tokens(length)
    engine = tiny_engine(model, **tier_fields(tier, tmp_path))
    recorder = LogitsRecorder(engine)
    first = answer(engine, prompt)
    empty_pool(engine)
    again = answer(engine, prompt)
    assert again.token_ids == first.token_ids == greedy_tokens(model, prompt, 6)
    # KV that resumes by itself comes back in full blocks; the last token is computed for logits.
    expected = length if engine.cache.spec.needs_state else (length - 1) // 16 * 16
    assert again.prefix.skipped_tokens >= expected
    assert again.prefix.fetched_tokens == again.prefix.skipped_tokens
    empty_pool(engine)
    longer = [*prompt, *first.token_ids, *random_tokens(9, seed=1)]
    turn = answer(engine, longer)
    if engine.cache.spec.needs_state:
        assert turn.prefix.skipped_tokens == length + 6
    assert turn.token_ids == greedy_tokens(model, longer, 6)
    recorder.check(model)
    stats = engine.stats()
    assert stats["fetches"] == 2 and not stats["fetches_failed"]
    assert stats["fetched_tokens"] == again.prefix.fetched_tokens + turn.prefix.fetched_tokens
    engine.close()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("encoding", STATE_ENCODINGS)
def test_the_bytes_are_the_same(tmp_path, tier, encoding):
    model, prompt = tiny_model("MG*-W-"), random_tokens(75)
    engine = tiny_engine(model, state_encoding=encoding, **tier_fields(tier, tmp_path))

    def cached_bytes():
        lease = engine.cache.acquire(
            torch.tensor(prompt).numpy(), capacity_tokens=len(prompt), chunk_tokens=1
        )
        assert lease.skipped_tokens == len(prompt)
        pages = torch.from_numpy(lease.checkpoint_pages).long()
        kept = engine.memory.pool[pages][:, : engine.cache.spec.checkpoint_bytes].clone()
        full = torch.from_numpy(lease.block_table[: len(prompt) // 16, 0]).long()
        kept_kv = engine.memory.pool[full].clone()
        engine.cache.release(lease)
        return kept, kept_kv

    answer(engine, prompt)
    before = cached_bytes()
    empty_pool(engine)
    answer(engine, prompt)
    for kept, again in zip(before, cached_bytes()):
        assert torch.equal(kept, again)
    engine.close()


def test_host_memory_hands_on_to_the_disk(tmp_path):
    model = tiny_model("MG*-")
    spec = tiny_engine(model).cache.spec
    room = 2 * (spec.checkpoint_pages + 8 * spec.kv_pages_per_block) * spec.page_bytes
    engine = tiny_engine(model, host_cache_bytes=room, cache_dir=tmp_path)
    prompts = [random_tokens(90, seed=seed) for seed in range(8)]
    answers = answer_and_leave(engine, prompts)
    stats = engine.stats()
    assert stats["host_records_evicted"] and stats["disk_states"]
    assert stats["host_bytes"] <= room
    for prompt, expected in zip(prompts, answers):
        again = answer(engine, prompt)
        assert again.prefix.fetched_tokens == 90
        assert again.token_ids == expected
    engine.close()


@pytest.mark.parametrize(
    ("pattern", "tier"),
    matrix_rows(
        itertools.product(PATTERNS, TIERS),
        ("MG*-W-", "host"),
        ("W-", "disk"),
        ("MK", "host"),
    ),
)
def test_a_tier_that_could_hold_nothing_is_refused_and_the_least_one_serves(
    pattern, tier, tmp_path
):
    model, name = tiny_model(pattern), f"{tier}_cache_bytes"
    folder = tmp_path / "cache"
    with pytest.raises(ValueError, match=f"{name}=1 holds nothing") as error:
        tiny_engine(model, **{**tier_fields(tier, folder), name: 1})
    assert not folder.exists()
    least = int(re.search(r"have (\d+) bytes", str(error.value))[1])
    with pytest.raises(ValueError, match=f"{name}={least - 1} holds nothing"):
        tiny_engine(model, **{**tier_fields(tier, folder), name: least - 1})
    with tiny_engine(model, **{**tier_fields(tier, folder), name: least}) as engine:
        prompt = random_tokens(engine.config.block_size_tokens)
        answer(engine, prompt, 0)
        empty_pool(engine)
        assert answer(engine, [*prompt, 1], 1).prefix.fetched_tokens == len(prompt)


def test_what_was_counted_stays_when_the_engine_is_closed(tmp_path):
    engine = tiny_engine(tiny_model("MG*-"), host_cache_bytes=100_000, cache_dir=tmp_path)
    answer_and_leave(engine, [random_tokens(90, seed=seed) for seed in range(6)])
    before = engine.stats()
    assert before["host_records_evicted"] and before["host_bytes"]
    engine.close()
    after = engine.stats()
    assert not after["host_bytes"] and not after["disk_bytes"]
    grows = [name for name in COUNTERS if name in before]
    assert all(after[name] == before[name] for name in grows)


def test_what_can_be_fetched_is_told_and_a_deeper_prefix_in_the_pool_is_not_fetched():
    engine, prompt, _ = with_a_prompt_in_host_memory(60)
    prompt += random_tokens(40, seed=1)
    scored = greedy(3, return_log_probs=True, skip_prompt_log_probs=False)
    assert engine.explain(prompt, scored).below is None  # these need every token
    explanation = engine.explain(prompt)
    assert explanation.below == ("host", 60)
    assert "60 can be fetched: host memory has them" in str(explanation)
    *told, waits = str(explanation).splitlines()
    assert any(line.startswith(f"stops at 0 ({explanation.reason.value}): ") for line in told)
    assert waits == "a request waits for what can be fetched, and starts at 60"
    answer(engine, prompt)  # 60 come back, the rest is computed
    assert engine.stats()["fetched_tokens"] == 60 and engine.explain(prompt).below is None
    result = answer(engine, prompt)
    assert (result.prefix.skipped_tokens, result.prefix.fetched_tokens) == (100, 0)
    assert engine.stats()["fetches"] == 1


@pytest.mark.parametrize(
    ("pattern", "spare_pages"),
    matrix_rows(itertools.product(["M*", "W*", "*-"], [0, 1, 4]), ("M*", 0), ("W*", 1), ("*-", 4)),
)
def test_explain_promises_no_more_than_the_request_gets(pattern, spare_pages):
    """On a pool for one request and a little more, above host memory."""
    promises_on_a_small_pool(pattern, spare_pages, seed=0, count=20)


def promises_on_a_small_pool(pattern, spare_pages, seed, count) -> Counter:
    model, longest, choose = tiny_model(pattern), 80, random.Random(seed)
    fields = dict(max_tokens=64, max_sequence_length=longest + 1, host_cache_bytes=1 << 20)
    cache = tiny_engine(model, **fields).cache
    pages = next(n for n in range(2, 999) if PrefixCache(cache.spec, n).fits(longest + 1, 64))
    cache_bytes = (pages + spare_pages) * cache.spec.page_bytes
    engine = tiny_engine(model, cache_bytes=cache_bytes, **fields)
    prompts, kinds = [random_tokens(40)], Counter()
    for number in range(count):
        known = choose.choice(prompts)
        known = known[: choose.choice((len(known), choose.randrange(len(known))))]
        new = random_tokens(choose.choice((0, choose.randrange(40))), seed=seed + number)
        prompts.append((known + new or [1])[:longest])
        told = engine.explain(prompts[-1])
        promised = told.match.skipped_tokens if told.below is None else told.below[1]
        got = engine.generate([prompts[-1]], greedy(1))[0].prefix.skipped_tokens
        assert told.lacks_room or promised <= got, (pattern, spare_pages, seed, number, told)
        kinds["lacks room" if told.lacks_room else "fetched" if told.below else "pool"] += 1
    assert kinds["pool"] + kinds["fetched"] > count / 2, kinds
    return kinds


def test_what_is_fetched_for_a_request_that_comes_again_is_not_in_its_report():
    """The report is of the first time: then all of the prompt was computed."""
    engine = tiny_engine(tiny_model("MG*-"), host_cache_bytes=64 << 20)
    request = engine.add_request(random_tokens(60), greedy(8))
    for _ in range(3):
        engine.step()
    with failing_forward(engine), pytest.raises(InjectedError):
        engine.step()
    empty_pool(engine)
    finish(engine, request)
    assert engine.stats()["fetches"] == 1
    assert (request.prefix.skipped_tokens, request.prefix.fetched_tokens) == (0, 0)


def test_prompt_log_probs_need_every_token():
    engine, prompt, _ = with_a_prompt_in_host_memory(60)
    params = greedy(3, return_log_probs=True, skip_prompt_log_probs=False)
    assert engine.generate([prompt], params)[0].prefix.skipped_tokens == 0
    assert engine.stats()["fetches"] == 0


# Nobody waits who need not -----------------------------------------------------------------------


@pytest.fixture
def slow():
    """An engine with a prompt in host memory that takes its time."""
    engine, prompt, engine.expected = with_a_prompt_in_host_memory(60, cache_bytes=256 << 10)
    tier = engine.offload.tiers[0]
    tier.store = SlowStore(tier.store)
    return engine, prompt, tier.store


def test_others_run_while_a_prompt_is_fetched(slow):
    engine, prompt, store = slow
    waiting = engine.add_request(prompt, greedy(6))
    other = engine.add_request(random_tokens(30, seed=5), greedy(6))
    finish(engine, other)
    assert waiting.status is RequestStatus.WAITING and store.reads
    store.arrive()
    finish(engine, waiting)
    assert waiting.result().prefix.skipped_tokens == 60
    assert waiting.token_ids == engine.expected
    assert waiting.result().prefix.fetched_tokens == 60


def test_two_requests_share_a_fetch(slow):
    engine, prompt, store = slow
    first = engine.add_request(prompt, greedy(6))
    second = engine.add_request([*prompt, 1, 2, 3], greedy(6))
    other = engine.add_request(random_tokens(30, seed=5), greedy(2))
    gone = engine.add_request(prompt, greedy(6))
    engine.step()
    engine.cancel(gone)
    finish(engine, other)
    assert store.arrive() == 60 // 16 + 1
    finish(engine)
    assert not store.reads
    assert [r.result().prefix.skipped_tokens for r in (first, second)] == [60, 60]
    assert engine.stats()["fetches"] == 1


def test_a_request_that_waits_can_be_cancelled(slow):
    engine, prompt, store = slow
    request = engine.add_request(prompt, greedy(6))
    other = engine.add_request(random_tokens(30, seed=5), greedy(6))
    engine.step()
    engine.cancel(request)
    assert not engine.offload.fetches.is_busy and all(
        future.cancelled() for future, _ in store.reads
    )
    assert all(not record.pins for record in engine.offload.tiers[0].records())
    store.arrive()
    finish(engine, other)
    assert not engine.stats()["fetches"] and not engine.cache.allocator.ref_counts.any()


def test_an_engine_with_nothing_else_to_do_waits(slow):
    engine, prompt, store = slow
    request = engine.add_request(prompt, greedy(6))
    for _ in range(3):
        assert engine.step() == []  # its caller is not held up
    threading.Timer(0.4, store.arrive).start()
    steps = 0
    while not request.closed:
        assert engine.step() == [] or request.num_generated
        steps += 1
    assert steps < 800  # nor kept busy
    assert request.result().prefix.skipped_tokens == 60


def test_blocks_that_leave_the_pool_meanwhile_are_fetched_too(slow):
    engine, prompt, store = slow
    store.arrive()
    engine.generate([prompt[:40]], greedy(1))  # two blocks are in the pool again
    store.arrive()
    request = engine.add_request(prompt, greedy(6))
    other = engine.add_request(random_tokens(30, seed=5), greedy(20))
    for _ in range(3):
        engine.step()
    assert store.reads
    engine.cache.evict(EVERYTHING)
    while not request.closed:
        store.arrive()
        engine.step()
    assert request.token_ids == engine.expected
    assert request.result().prefix.skipped_tokens == 60
    finish(engine, other)


def hold_all_but(engine, blocks: int):
    """A lease that leaves room for so many blocks in the pool."""
    pages = engine.cache.allocator.num_free + engine.cache.allocator.num_evictable
    room = (pages // engine.cache.spec.kv_pages_per_block - blocks) * 16
    return engine.cache.acquire(torch.arange(8).numpy(), "hog", capacity_tokens=room)


def test_a_request_whose_fetch_lacks_room_is_not_overtaken(slow):
    engine, prompt, store = slow
    hog = hold_all_but(engine, 3)
    waiting = engine.add_request(prompt, greedy(6))
    step_with_arrival(engine, store)
    later = engine.add_request(random_tokens(20, seed=5), greedy(1))
    engine.step()
    assert waiting.fetch.lacks_room and later.status is RequestStatus.WAITING
    engine.cache.release(hog)
    finish(engine)
    assert waiting.token_ids == engine.expected
    assert waiting.result().prefix.skipped_tokens == 60
    engine.check_integrity()


def step_with_arrival(engine, store):
    """A step that has nothing to do but to read; what it reads arrives behind it."""
    engine.step()
    assert store.arrive()


@pytest.mark.parametrize(
    ("slots", "in_pool", "is_late"),
    matrix_rows(
        [
            (*room, is_late)
            for room in ((1, 2), (2, 2), (2, 3), (4, 4))
            for is_late in (False, True)
        ],
        (1, 2, True),
        (4, 4, False),
    ),
)
def test_queued_prompts_do_not_evict_each_other(monkeypatch, slots, in_pool, is_late):
    """All are in host memory, and the pool has room for a few."""
    model = tiny_model("MG*-")
    spec = tiny_engine(model).cache.spec
    room = in_pool * (8 * spec.kv_pages_per_block + 2 * spec.checkpoint_pages) * spec.page_bytes
    engine = tiny_engine(model, cache_bytes=room, host_cache_bytes=64 << 20, max_requests=slots)
    prompts = [random_tokens(100, seed=seed) for seed in range(8)]
    expected = answer_and_leave(engine, prompts)
    to_pool = PageMover.to_pool

    def late(*parts):
        """Their pages have arrived when they are asked for the third time."""
        to_pool(*parts)
        asked = itertools.count()
        return SlowArrival(lambda: next(asked) > 1)

    if is_late:
        monkeypatch.setattr(PageMover, "to_pool", late)
    results = engine.generate(prompts, greedy(6))
    assert [result.prefix.fetched_tokens for result in results] == [100] * 8
    assert [result.token_ids for result in results] == expected
    assert engine.stats()["fetches"] == 8
    engine.check_integrity()


def with_a_prompt_in_host_memory(length=100, **fields):
    """An engine with an empty pool, a prompt that is fetched, and its answer."""
    engine = tiny_engine(tiny_model("MG*-"), host_cache_bytes=64 << 20, **fields)
    prompt = random_tokens(length)
    (expected,) = answer_and_leave(engine, [prompt])
    return engine, prompt, expected


@pytest.mark.parametrize(
    ("pattern", "lengths"),
    matrix_rows(
        itertools.product(("*-", "MG*-"), ((20, 33), (40, 64), (70, 81))),
        ("*-", (20, 33)),
        ("MG*-", (40, 64)),
    ),
)
def test_a_request_waits_for_the_pages_of_a_fetch_behind_it(pattern, lengths):
    """The pool has just the pages that two fetches take, and requests need one or two more."""
    model = tiny_model(pattern)
    spec = tiny_engine(model).cache.spec
    blocks = sum(spec.num_blocks(length) for length in lengths)
    least = 1 + blocks * sum(spec.pages_per_block) + 2 * spec.checkpoint_pages
    prompts = [random_tokens(length, seed=length) for length in lengths]
    for pages in range(least - 2, least + 4):
        engine = tiny_engine(model, cache_bytes=pages * spec.page_bytes, host_cache_bytes=64 << 20)
        if not engine.cache.fits(max(lengths) + 3):
            continue
        expected = answer_and_leave(engine, prompts)
        results = engine.generate(prompts, greedy(6))
        assert [result.token_ids for result in results] == expected
        engine.check_integrity()


def test_a_fetch_is_an_entry_of_the_plan():
    """Its pages are written when the plan is run, and nobody else's until it has arrived."""
    engine, prompt, expected = with_a_prompt_in_host_memory()
    request = engine.add_request(prompt, greedy(6))
    before = engine.memory.pool.clone()
    plan = engine.scheduler.schedule()
    ((key, targets),) = plan.loads.items()
    assert not (plan.restores or plan.work) and request.fetch.record.key == key
    pages = np.concatenate(targets)
    assert (engine.cache.allocator.ref_counts[pages[pages != NULL_PAGE]] == 1).all()
    assert torch.equal(engine.memory.pool, before)
    result = engine.runner.run(plan)
    assert not torch.equal(engine.memory.pool, before)
    assert (engine.cache.allocator.ref_counts[pages[pages != NULL_PAGE]] == 1).all()
    engine.scheduler.complete(result)
    while not request.done:
        engine.step()
    assert request.token_ids == expected
    assert request.result().prefix.fetched_tokens == 100
    engine.check_integrity()


def test_a_fetch_whose_step_fails_is_computed():
    engine, prompt, expected = with_a_prompt_in_host_memory()
    request = engine.add_request(prompt, greedy(6))
    assert engine.scheduler.schedule().loads
    engine.scheduler.abort()
    assert not engine.cache.allocator.ref_counts.any()
    assert not engine.scheduler.schedule().loads
    engine.scheduler.abort()
    while not request.done:
        engine.step()
    assert request.token_ids == expected and engine.stats()["fetches_failed"] == 1
    engine.check_integrity()


def test_what_leaves_the_pool_while_its_request_waits_is_fetched():
    engine = tiny_engine(tiny_model("MG*-"), host_cache_bytes=64 << 20, max_requests=1)
    prompt = random_tokens(100)
    expected = answer(engine, prompt).token_ids
    first = engine.add_request(random_tokens(30, seed=5), greedy(20))
    request = engine.add_request(prompt, greedy(6))
    engine.step()  # the pool has it
    engine.cache.evict(EVERYTHING)
    finish(engine)
    assert request.token_ids == expected and first.done
    assert request.result().prefix.fetched_tokens == 100


def test_the_disk_is_read_while_the_slots_are_taken(tmp_path):
    engine = tiny_engine(tiny_model("MG*-"), cache_dir=tmp_path, max_requests=1)
    prompt = random_tokens(60)
    answer_and_leave(engine, [prompt])
    store = engine.offload.disk.store = SlowStore(engine.offload.disk.store)
    running = engine.add_request(random_tokens(30, seed=5), greedy(6))
    request = engine.add_request(prompt, greedy(6))
    engine.step()
    assert store.arrive() == 60 // 16 + 1
    engine.step()
    assert not running.done and not engine.stats()["fetches"]
    assert engine.explain(prompt).match.skipped_tokens == 0  # not in the pool before its turn
    finish(engine)
    assert request.result().prefix.fetched_tokens == 60
    engine.close()


def test_the_first_in_line_is_read_whatever_was_read_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_READ_BYTES", 1)
    engine = tiny_engine(tiny_model("MG*-"), cache_dir=tmp_path, max_requests=1)
    prompts = [random_tokens(60, seed=seed) for seed in range(2)]
    for prompt in prompts:
        answer_and_leave(engine, [prompt])
    engine.offload.disk.store.flush()
    engine.add_request(random_tokens(30, seed=5), greedy(2))
    requests = [engine.add_request(prompt, greedy(2)) for prompt in prompts]
    engine.step()
    assert engine.offload.fetches.read_bytes > 1
    waiting = engine.scheduler.waiting
    waiting.discard(requests[0])
    waiting.add(requests[0])  # the other one comes first
    engine.scheduler.max_waiting_looked_at = 1  # and this one is too far behind
    finish(engine)
    assert [request.result().prefix.fetched_tokens for request in requests] == [60, 60]
    engine.close()


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (PageMover, "to_pool", MemoryError("no room")),
        (PageMover, "to_pool", OSError("a bug")),
        (PrefixIndex, "store", MemoryError("no room")),
    ],
)
def test_what_fails_on_the_way_into_the_pool_is_computed(slow, monkeypatch, owner, name, error):
    """Without memory no step fails, and no other request waits; a bug is told once."""
    engine, prompt, store = slow
    other = engine.add_request(random_tokens(30, seed=5), greedy(3))
    request = engine.add_request(prompt, greedy(6))
    step_with_arrival(engine, store)
    monkeypatch.setattr(owner, name, Mock(side_effect=error))
    if not isinstance(error, MemoryError):
        with pytest.raises(OSError, match="a bug"):
            engine.step()
        assert not engine.cache.allocator.ref_counts.any()
    finish(engine, request)
    assert other.done
    result = request.result()
    assert result.prefix.skipped_tokens == result.prefix.fetched_tokens == 0
    assert is_greedy(engine.model, prompt, result.token_ids)
    assert engine.stats()["fetches_failed"] == 1


def test_reads_ahead_fit_into_their_limit(tmp_path, monkeypatch):
    engine = tiny_engine(tiny_model("MG*-"), cache_dir=tmp_path)
    prompts = [random_tokens(length, seed=length) for length in (60, 200, 62, 61)]
    for prompt in prompts:
        answer_and_leave(engine, [prompt])
    engine.offload.disk.store.flush()
    sizes = []
    for prompt in prompts:
        record = engine.offload.fetches.find(torch.tensor(prompt).numpy(), "", 0)[1]
        sizes.append(sum(each.num_bytes for each in [*record.chain(), record]))
    limit = sizes[0] + sizes[2]
    assert sizes[1] > sizes[2]  # the long one does not fit beside a short one
    monkeypatch.setattr(fetch, "MAX_READ_BYTES", limit)
    store = engine.offload.disk.store = SlowStore(engine.offload.disk.store)
    for prompt in prompts:
        engine.add_request(prompt, greedy(2))
    engine.add_request(random_tokens(30, seed=5), greedy(30))
    engine.step()
    assert engine.stats()["disk_read_bytes"] == limit
    while engine.has_work:
        store.arrive()
        engine.step()
        assert engine.num_steps < 100
        assert engine.stats()["disk_read_bytes"] <= limit + sizes[1]  # it is first in line now
    assert engine.stats()["fetches"] == 4
    assert not engine.stats()["disk_read_bytes"]
    engine.close()


def test_a_handle_keeps_no_bytes(slow):
    engine, prompt, store = slow
    request = engine.add_request(prompt, greedy(6))
    step_with_arrival(engine, store)
    fetch = request.fetch
    assert fetch.reads
    engine.cancel(request)
    assert request.fetch is fetch and fetch.is_over and not fetch.reads and fetch.arrival is None


@pytest.mark.parametrize("in_pool", [False, True])
def test_an_engine_is_closed_while_it_fetches(tmp_path, in_pool, monkeypatch):
    engine = tiny_engine(tiny_model("MG*-"), cache_dir=tmp_path)
    prompt = random_tokens(60)
    answer_and_leave(engine, [prompt])
    disk = engine.offload.disk
    store = disk.store = SlowStore(disk.store)
    request = engine.add_request(prompt, greedy(6))
    if in_pool:
        monkeypatch.setattr(PageMover, "to_pool", lambda *parts: SlowArrival(lambda: False))
        step_with_arrival(engine, store)
        engine.step()
    else:
        answer(engine, random_tokens(30, seed=5))
    assert engine.offload.fetches.is_busy and engine.cache.allocator.ref_counts.any() == in_pool
    engine.close()
    assert not engine.cache.allocator.ref_counts.any() and not engine.offload.fetches.is_busy
    assert all(not record.pins for record in disk.records())
    assert request.closed and request.result().finish_reason == "cancelled"
    assert not engine.has_work
    engine.check_integrity()


# What is damaged is not used ---------------------------------------------------------------------


def damage(store, record):
    """Change a bit of a record in the file."""
    path = store.folder / "pages.bin"
    content = bytearray(path.read_bytes())
    content[content.index(store.get(record).result().numpy().tobytes()) + 100] ^= 4
    path.write_bytes(content)


def test_a_damaged_page_costs_a_look_at_what_lies_before_it(tmp_path):
    model, prompt = tiny_model("MG*-"), random_tokens(100)
    engine = tiny_engine(model, cache_dir=tmp_path)
    answer(engine, prompt[:50])
    expected = answer(engine, prompt).token_ids
    engine.save_cache()
    deep = max(engine.offload.disk.records(), key=lambda record: record.position)
    damage(engine.offload.disk.store, deep)
    engine.close()
    engine = tiny_engine(model, cache_dir=tmp_path)
    longer = [*prompt, *expected, 3]
    result = answer(engine, longer)
    assert result.token_ids == greedy_tokens(model, longer, 6)
    assert result.prefix.skipped_tokens == 100  # not 106, whose state is damaged
    assert engine.stats()["fetches_failed"] == 1
    assert "pages.bin" in engine.offload.disk.store.problems[0]
    assert answer(engine, longer).prefix.skipped_tokens == len(longer)
    engine.close()


def test_what_could_not_be_read_once_is_still_there(tmp_path, monkeypatch):
    model, shared = tiny_model("MG*-"), random_tokens(40)
    engine = tiny_engine(model, cache_dir=tmp_path)
    prompts = [[*shared, *random_tokens(30, seed=seed)] for seed in range(4)]
    for prompt in prompts:
        answer_and_leave(engine, [prompt])
    engine.offload.disk.store.flush()
    states = engine.stats()["disk_states"]
    read = failing_at_first(os.preadv, MemoryError("no room for a moment"))
    monkeypatch.setattr(os, "preadv", read)
    assert answer(engine, prompts[0]).prefix.skipped_tokens == 0
    assert engine.stats()["disk_states"] >= states
    empty_pool(engine)
    assert answer(engine, prompts[1]).prefix.fetched_tokens == 70
    assert answer(engine, prompts[0]).prefix.fetched_tokens == 0  # left alone for a while
    monkeypatch.setattr(fetch.time, "monotonic", lambda: 1e12)
    empty_pool(engine)
    assert answer(engine, prompts[0]).prefix.fetched_tokens == 70
    assert not engine.offload.fetches.is_busy
    engine.close()


def test_what_could_not_be_written_is_not_counted_and_comes_later(tmp_path, monkeypatch):
    model, prompts = tiny_model("MG*-"), [random_tokens(60, seed=seed) for seed in range(3)]
    engine = tiny_engine(model, cache_dir=tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Mock(side_effect=full))
        answer(engine, prompts[0])
        empty_pool(engine)
        answer(engine, prompts[1])
        with pytest.raises(OSError, match="No space left"):
            engine.offload.disk.store.flush()
        stats = engine.stats()
        assert (stats["disk_bytes"], stats["disk_states"], stats["disk_kv_blocks"]) == (0, 0, 0)
        assert stats["disk_records_unwritten"] >= 4
        with pytest.raises(OSError, match="No space left"):
            engine.save_cache()
    saved = engine.save_cache()  # there is space again
    assert saved.states == engine.stats()["disk_states"] == 2
    engine.clear_cache()
    answer(engine, prompts[2])
    assert engine.save_cache().states
    engine.close()
    engine = tiny_engine(model, cache_dir=tmp_path)
    assert answer(engine, prompts[2]).prefix.fetched_tokens == 60
    engine.close()


@pytest.mark.parametrize("number", matrix_rows([errno.ENOSPC, errno.EDQUOT], errno.ENOSPC))
def test_a_full_disk_is_a_smaller_tier(tmp_path, monkeypatch, number):
    """What is asked for again and again gets in, in the place of what came first."""
    monkeypatch.setattr(disk_store, "RETRY_SECONDS", 0.0)
    engine = tiny_engine(tiny_model("MG*-"), cache_dir=tmp_path, disk_cache_bytes=8 << 20)
    disk, pwrite = engine.offload.disk, os.pwrite
    limit = disk.capacity_bytes

    def small(descriptor, data, offset):
        if offset + len(data) > 1 << 18:
            raise OSError(number, "there is no more")
        return pwrite(descriptor, data, offset)

    def ask(seed):
        result = answer(engine, random_tokens(60, seed=seed))
        empty_pool(engine)
        with suppress(OSError):
            disk.store.flush()
        return result.prefix.fetched_tokens

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", small)
        seed = 0
        while not engine.stats()["disk_records_unwritten"]:
            ask(seed)
            seed += 1
        assert 0 < disk.capacity_bytes == disk.used_bytes < 1 << 18
        unwritten = engine.stats()["disk_records_unwritten"]
        assert [ask(1000 + i % 3) for i in range(30)][-3:] == [60] * 3
        assert engine.stats()["disk_records_unwritten"] == unwritten
        assert disk.used_bytes <= disk.capacity_bytes < 1 << 18
    for seed in range(2000, 2003):
        answer(engine, random_tokens(60, seed=seed))
    engine.save_cache()  # there is space again
    assert disk.capacity_bytes == limit
    engine.close()


# What outlives the engine ------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", matrix_rows(PATTERNS, "MG*-W-", "*-*-", "MK"))
def test_save_cache_and_a_warm_start(tmp_path, pattern):
    model = tiny_model(pattern)
    engine = tiny_engine(model, host_cache_bytes=1 << 20)
    prompts = [random_tokens(50 + 7 * seed, seed=seed) for seed in range(4)]
    answers = [answer(engine, prompt).token_ids for prompt in prompts]
    saved = engine.save_cache(tmp_path)
    assert saved.kv_blocks and (saved.states or not engine.cache.spec.needs_state)
    again = engine.save_cache(tmp_path)
    assert again == saved

    engine = tiny_engine(model, cache_dir=tmp_path)
    for prompt, expected in zip(prompts, answers):
        result = answer(engine, prompt)
        least = len(prompt) if engine.cache.spec.needs_state else (len(prompt) - 1) // 16 * 16
        assert result.prefix.skipped_tokens >= least
        assert result.token_ids == expected
    engine.close()


@pytest.mark.parametrize("pattern", ["MG*-", "*-*-"])
def test_another_folder_gets_what_only_the_own_one_has(tmp_path, pattern):
    model = tiny_model(pattern)
    engine = tiny_engine(model, cache_dir=tmp_path / "own")
    shared = random_tokens(40, seed=9)
    prompts = [[*shared, *random_tokens(50, seed=seed)] for seed in range(4)]
    for prompt in prompts:
        answer_and_leave(engine, [prompt])
    disk = engine.offload.disk
    damaged = disk.find(PrefixKeys(torch.tensor(prompts[3]).numpy(), "", 16))
    disk.store.flush()
    damage(disk.store, damaged)
    held = engine.stats()
    saved = engine.save_cache(tmp_path / "other")
    assert engine.save_cache(tmp_path / "other") == saved
    if engine.cache.spec.needs_state:
        assert saved.states == held["disk_states"] - 1
    after = engine.stats()
    assert all(after[name] == held[name] for name in ("disk_states", "disk_kv_blocks"))
    engine.close()
    engine = tiny_engine(model, cache_dir=tmp_path / "other")
    for prompt in prompts[:3]:
        result = answer(engine, prompt)
        assert result.prefix.skipped_tokens >= 80 and result.prefix.fetched_tokens
        assert result.token_ids == greedy_tokens(model, prompt, 6)
    assert not engine.stats()["fetches_failed"]
    engine.close()


def test_another_model_or_configuration_is_told_apart(tmp_path):
    engine = tiny_engine(tiny_model("MG*-"))
    answer(engine, random_tokens(40))
    engine.save_cache(tmp_path)
    for model, fields, name in (
        (tiny_model("MG*-", seed=1), {}, "weights"),
        (tiny_model("MG*-"), {"state_encoding": "bf16"}, "state encoding"),
        (tiny_model("MG*-"), {"kv_cache_dtype": torch.bfloat16}, "kv dtype"),
        (tiny_model("MG*-"), {"block_size_tokens": 32}, "block size tokens"),
        (tiny_model("MG*-", rotary_base=5000), {}, "model configuration"),
    ):
        with pytest.raises(CacheFolderError, match=f"for another ({name})"):
            tiny_engine(model, cache_dir=tmp_path, **fields)
        with pytest.raises(CacheFolderError, match=f"for another ({name})"):
            tiny_engine(model, **fields).save_cache(tmp_path)
    tiny_engine(tiny_model("MG*-"), cache_dir=tmp_path).close()


def test_what_changes_no_cached_byte_does_not_tell_engines_apart(tmp_path):
    """A Hugging Face folder's other entries, and counters of the training."""
    routing = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    engine = tiny_engine(tiny_model("ME*-", **routing))
    answer(engine, random_tokens(40))
    engine.save_cache(tmp_path)
    noted = {"transformers_version": "5"}
    again = tiny_model.__wrapped__("ME*-", huggingface_config=noted, **routing)
    counters = [b for name, b in again.named_buffers() if name.endswith("tokens_per_expert")]
    for counter in counters:
        counter.add_(7)
    assert counters
    tiny_engine(again, cache_dir=tmp_path).close()


def test_an_engine_that_could_not_be_made_releases_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_parts, "OutputProcessor", lambda tokenizer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny_engine(tiny_model("MG*-"), cache_dir=tmp_path)
    monkeypatch.undo()
    tiny_engine(tiny_model("MG*-"), cache_dir=tmp_path).close()


def test_an_engine_that_nobody_closed_releases_its_folder(tmp_path):
    model, prompt = tiny_model("MG*-"), random_tokens(90)
    engine = tiny_engine(model, cache_dir=tmp_path, host_cache_bytes=1 << 20)
    answer_and_leave(engine, [prompt])
    answer(engine, prompt)
    engine.save_cache()
    gone = weakref.ref(engine), weakref.ref(engine.memory.pool), weakref.ref(engine.offload)
    del engine
    gc.collect()
    assert [each() for each in gone] == [None] * 3
    engine = tiny_engine(model, cache_dir=tmp_path)
    assert answer(engine, prompt).prefix.fetched_tokens == 90
    engine.close()
    engine.close()


def test_save_cache_leaves_what_a_larger_folder_holds(tmp_path):
    model = tiny_model("MG*-")
    engine = tiny_engine(model, cache_bytes=16 << 20)
    for seed in range(12):
        answer(engine, random_tokens(90, seed=seed))
    large = engine.save_cache(tmp_path)
    engine = tiny_engine(model, disk_cache_bytes=large.num_bytes // 10)
    assert engine.save_cache(tmp_path) == large
    answer(engine, random_tokens(90, seed=99))
    again = engine.save_cache(tmp_path)
    assert again.num_bytes > large.num_bytes * 0.8
    assert again.num_bytes <= large.num_bytes


def test_save_cache_without_a_folder_or_where_nothing_is_restored_is_refused(tmp_path):
    engine = tiny_engine(tiny_model("MG*-"))
    for folder in (None, ""):
        with pytest.raises(ValueError, match="save_cache needs a folder"):
            engine.save_cache(folder)
    engine = tiny_engine(prefix_caching="memory_only")
    with pytest.raises(ValueError, match="save_cache needs prefix_caching='restore', it is 'mem"):
        engine.save_cache(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_relative_folder_is_where_the_engine_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = tiny_engine(tiny_model("MG*-"), cache_dir="cache")
    answer(engine, random_tokens(60))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    saved = engine.save_cache()
    assert engine.save_cache(tmp_path / "cache") == saved  # its own
    assert not list((tmp_path / "elsewhere").iterdir())
    assert engine.save_cache("cache") == saved
    assert (tmp_path / "elsewhere" / "cache").is_dir()
    engine.clear_cache()
    engine.close()


def test_tiers_of_a_cache_that_restores_nothing_are_refused():
    with pytest.raises(ValueError, match="need prefix_caching='restore'"):
        tiny_engine(tiny_model("MG*-"), host_cache_bytes=1, prefix_caching="memory_only")
