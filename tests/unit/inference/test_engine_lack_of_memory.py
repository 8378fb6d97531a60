"""The engine where memory is short. Optional work (a state to be saved, bytes to be parked) fails
no request; a step that fails loses no request, leaks no page and changes no answer."""

from contextlib import suppress
from unittest.mock import DEFAULT, Mock

import pytest
from matrix import matrix_rows
from memory_fuzz import CONFIGURATIONS, fuzz
from reference import finish, greedy, is_greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.cache.index.prefix_index import PrefixIndex
from megatron_hybrid.cache.pages.allocator import PageAllocator
from megatron_hybrid.inference.memory.cache_pool import CachePool
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.request import RequestStatus
from megatron_hybrid.inference.requests.view import EndedRequests

MODEL = tiny_model()


def without_memory(*arguments, **options):
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")


def no_memory(*arguments, **options):
    raise MemoryError("no room")


@pytest.mark.parametrize(
    ("owner", "operation"), [(CachePool, "save_checkpoint"), (PrefixIndex, "store")]
)
def test_invariant_8_a_state_without_memory_to_encode_or_enter_it_is_not_saved(
    monkeypatch, owner, operation
):
    engine = tiny_engine(MODEL, state_encoding="int8")
    prompt = random_tokens(100)
    monkeypatch.setattr(owner, operation, without_memory)
    result = engine.generate([prompt], greedy(5))[0]
    assert is_greedy(MODEL, prompt, result.token_ids)
    assert result.prefix.checkpoints_saved == 0 and result.prefix.checkpoints_skipped >= 2
    stats = engine.stats()
    assert stats["checkpoints"] == 0 and stats["checkpoints_no_room"] >= 2
    engine.check_integrity()
    assert not engine.cache.allocator.ref_counts.any()


@pytest.mark.parametrize("operation", ["save_checkpoint", "insert", "reserve_checkpoint"])
def test_a_request_is_cancelled_without_memory_for_its_last_state(monkeypatch, operation):
    engine = tiny_engine(MODEL)
    request = engine.add_request(random_tokens(40), greedy(20))
    while request.num_generated < 3:
        engine.step()

    with monkeypatch.context() as patch:
        owners = {"save_checkpoint": engine.memory, "insert": engine.cache.index}
        patch.setattr(owners.get(operation, engine.cache), operation, no_memory)
        engine.cancel(request)
    assert request.closed and request.result().finish_reason == "cancelled"
    assert not engine.scheduler.running and not engine.has_work
    engine.check_integrity()
    assert not engine.cache.allocator.ref_counts.any()


def test_an_end_that_finds_no_memory_to_be_noted_is_an_end(monkeypatch):
    engine = tiny_engine(MODEL)
    monkeypatch.setattr(EndedRequests, "note", no_memory)
    prompts = [random_tokens(40, seed=seed) for seed in range(2)]
    short, long = (engine.add_request(p, greedy(n)) for p, n in zip(prompts, (4, 30)))
    while not short.closed:
        engine.step()
    engine.cancel(long)
    assert long.closed and not engine.has_work
    for prompt, request in zip(prompts, (short, long)):
        assert is_greedy(MODEL, prompt, request.result().token_ids)
    assert engine.requests() == []
    engine.check_integrity()


def test_siblings_wait_in_line_where_starting_a_later_one_fails(monkeypatch):
    """One sibling starts, one finds no room, and the next one fails."""
    engine = tiny_engine(MODEL, max_requests=5)
    request = engine.add_request(random_tokens(40), greedy(4), RequestOptions(n=5))
    results = [DEFAULT, MemoryError("no room"), OSError("a bug")]
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "fork", Mock(wraps=engine.cache.fork, side_effect=results))
        with pytest.raises(OSError, match="a bug"):
            finish(engine)
    finish(engine)
    answers = [sample.token_ids for sample in request.result().samples]
    assert len(answers) == 5
    assert all(is_greedy(MODEL, request.result().prompt_tokens, answer) for answer in answers)


def test_invariant_8_tokens_without_memory_to_publish_them_are_not_found_by_others(monkeypatch):
    engine = tiny_engine(MODEL)
    prompt = random_tokens(100)
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache.index, "insert", no_memory)
        result = engine.generate([prompt], greedy(5))[0]
    assert is_greedy(MODEL, prompt, result.token_ids)
    assert engine.explain(prompt).match.shared_tokens == 0
    engine.check_integrity()
    engine.generate([prompt], greedy(1))
    assert engine.generate([prompt], greedy(1))[0].prefix.skipped_tokens == 100


@pytest.mark.parametrize("operation", ["load_checkpoint", "copy_pages"])
def test_invariant_8_a_state_without_memory_to_restore_it_is_computed(monkeypatch, operation):
    """Requests that run do not wait for it, however long memory is short."""
    engine = tiny_engine(MODEL, state_encoding="bf16")
    prompt = random_tokens(100)
    engine.generate([prompt], greedy(2))
    other = engine.add_request(random_tokens(30, seed=5), greedy(8))
    engine.step()
    monkeypatch.setattr(CachePool, operation, without_memory)
    request = engine.add_request(prompt + random_tokens(5, seed=1), greedy(3))
    while not other.done:
        engine.step()
    if operation == "copy_pages":
        monkeypatch.undo()
    finish(engine)
    assert is_greedy(MODEL, request.result().prompt_tokens, request.token_ids)
    assert is_greedy(MODEL, other.result().prompt_tokens, other.token_ids)


@pytest.mark.parametrize("broken", ["release", "retain", "recount"])
def test_requests_are_neither_lost_nor_stuck_while_pages_cannot_be_counted(monkeypatch, broken):
    """Memory that stays short for several steps, in which each look at the counts fails."""
    engine = tiny_engine(MODEL, max_requests=4)
    prompts = [random_tokens(40 + 9 * seed, seed=seed) for seed in range(4)]
    requests = [engine.add_request(prompt, greedy(6)) for prompt in prompts]
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(PageAllocator, broken, no_memory)
        patch.setattr(PageAllocator, "recount", no_memory)
        patch.setattr(engine.runner, "forward", without_memory)
        for _ in range(3):
            with pytest.raises((MemoryError, RuntimeError)):
                engine.step()
        engine.cancel(requests[3])
        assert requests[3].closed
    finish(engine)
    for prompt, request in zip(prompts[:3], requests):
        assert is_greedy(MODEL, prompt, request.token_ids)
    assert not engine.cache.allocator.ref_counts.any()


@pytest.mark.parametrize("status", ["CLOSING", "DECODE"])
def test_a_commit_that_breaks_off_leaves_no_request_behind(monkeypatch, status):
    engine = tiny_engine(MODEL)
    requests = [
        engine.add_request(random_tokens(40, seed=i), greedy(3), RequestOptions(n=2))
        for i in range(2)
    ]
    while all(r.status is not RequestStatus[status] for r in requests[0].samples):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "commit", Mock(side_effect=OSError("a bug")))
        with pytest.raises(OSError):
            engine.cancel(requests[0])
        with suppress(OSError):  # it may have been ended with the other
            engine.cancel(requests[1])
    assert all(sample.closed for request in requests for sample in request.samples)
    assert not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize(
    "name",
    matrix_rows(CONFIGURATIONS, "hybrid, host memory and disk"),
)
def test_no_page_no_request_and_no_token_is_lost_whatever_allocation_fails(name, tmp_path):
    counts = fuzz(name, steps=80, seed=1, folder=tmp_path)
    assert counts.failures > 15
    assert (counts.leaks, counts.lost, counts.wrong) == (0, 0, 0), counts
