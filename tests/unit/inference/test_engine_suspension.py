"""suspend, resume and close: memory is given back, and answers are those of an engine without."""

import errno
import os
from unittest import mock

import pytest
import torch
from differential import poison
from reference import finish, greedy, is_greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.exclusive import EngineSuspendedError
from megatron_hybrid.inference.requests.options import RequestOptions

PROMPT = random_tokens(100)


def held_bytes(engine) -> int:
    memory = engine.memory
    return memory.pool.untyped_storage().nbytes() + memory.slots.untyped_storage().nbytes()


def halfway(engine):
    """A request with an answered prefix in the cache, two steps into its own answer."""
    engine.generate([PROMPT], greedy(4))
    request = engine.add_request([*PROMPT, 1, 2, 3], greedy(12))
    engine.step()
    engine.step()
    assert not request.done
    return request


@pytest.mark.parametrize(
    ("keep_cache", "mode"),
    [
        ("drop", "off"),
        ("host", "off"),
        ("drop", "restore"),
        ("host", "restore"),
        ("disk", "restore"),
    ],
)
def test_a_running_request_goes_on_after_a_suspension(tmp_path, keep_cache, mode):
    folder = tmp_path if keep_cache == "disk" else None
    engine = tiny_engine(prefix_caching=mode, cache_dir=folder)
    request = halfway(engine)
    before = held_bytes(engine)
    engine.suspend(keep_cache)
    engine.suspend(keep_cache)  # no effect
    assert held_bytes(engine) == 0 < before
    waiting = engine.add_request(PROMPT, greedy(5))
    engine.resume()
    engine.resume()
    assert held_bytes(engine) == before
    while not (request.closed and waiting.closed):
        engine.step()
    assert is_greedy(tiny_model(), [*PROMPT, 1, 2, 3], request.token_ids)
    assert is_greedy(tiny_model(), PROMPT, waiting.token_ids)
    skips = mode == "restore" and keep_cache != "drop"
    assert (waiting.prefix.skipped_tokens == len(PROMPT)) is skips
    assert (waiting.prefix.fetched_tokens > 0) is (keep_cache == "disk")
    engine.check_integrity()
    engine.close()


def test_keep_host_computes_no_token_again():
    engine = tiny_engine()
    request = halfway(engine)
    left = request.params.num_tokens_to_generate - request.num_generated
    before = engine.stats()["forward_tokens"]
    stats = engine.stats()
    engine.suspend("host")
    used = (stats["pages_cached"] + stats["pages_in_use"]) * stats["page_bytes"]
    assert engine.memory.held_bytes == used + engine.memory.slots.shape[1]  # one request
    engine.resume()
    poison(engine)
    while not request.done:
        engine.step()
    assert engine.stats()["forward_tokens"] - before == left


def test_a_suspended_engine_refuses_what_needs_its_memory():
    engine = tiny_engine()
    request = halfway(engine)
    stream = engine.stream(PROMPT, greedy(3))
    engine.suspend("host")
    digest = engine.cache.digest()
    for call in (
        engine.step,
        engine.clear_cache,
        lambda: engine.generate([PROMPT], greedy(1)),
        lambda: engine.cancel(request),
        lambda: engine.save_cache("nowhere"),
        lambda: next(stream),
    ):
        with pytest.raises(EngineSuspendedError, match="resume"):
            call()
    assert engine.cache.digest() == digest
    other = engine.stream(PROMPT, greedy(3))
    other.close()  # cancels before the next step
    engine.resume()
    assert [token for output in stream for token in output.token_ids]  # the refusal ended nothing
    assert next(other, None) is None
    finish(engine)
    assert is_greedy(tiny_model(), [*PROMPT, 1, 2, 3], request.token_ids)


def test_an_unknown_keep_cache_is_refused():
    engine = tiny_engine()
    with pytest.raises(ValueError, match="keep_cache is 'all'; use 'drop', 'host' or 'disk'"):
        engine.suspend("all")
    with pytest.raises(ValueError, match=r"needs a folder to write to: set config\.cache_dir"):
        engine.suspend("disk")
    assert not engine.is_suspended


@pytest.mark.parametrize("pattern", ["MG*-W-", "*-*-"])
def test_what_went_to_the_disk_is_fetched(tmp_path, pattern):
    model = tiny_model(pattern)
    engine = tiny_engine(model, cache_dir=tmp_path, max_requests=2, cache_bytes=1 << 20)
    engine.generate([PROMPT], greedy(4))
    others = [engine.add_request(random_tokens(50, seed=i), greedy(30)) for i in (1, 2)]
    waiting = engine.add_request([*PROMPT, 3], greedy(4))
    engine.step()
    assert waiting.looked_up_at is not None  # its prefix is in the pool, where it looked then
    before = [request.token_ids for request in others]
    engine.suspend("disk")
    assert engine.memory.held_bytes == 0 and not engine.stats()["cached_tokens"]
    assert engine.stats()["disk_bytes"] and [r.token_ids for r in others] == before
    engine.resume()
    finish(engine)
    assert waiting.prefix.skipped_tokens == waiting.prefix.fetched_tokens >= 96
    for request in (*others, waiting):
        prompt = request.result().prompt_tokens
        assert is_greedy(model, prompt, request.token_ids)
    engine.close()


def test_preempted_and_forked_requests_go_on_from_the_disk(tmp_path):
    model = tiny_model("M*-")
    engine = tiny_engine(model, cache_dir=tmp_path, cache_bytes=80 << 10, max_requests=4)
    requests = [engine.add_request(random_tokens(60, seed=i), greedy(60)) for i in range(3)]
    requests += engine.add_request(
        random_tokens(40, seed=9), greedy(20), RequestOptions(n=2)
    ).samples
    while not engine.runner.parked_bytes:
        engine.step()
    engine.suspend("disk")
    assert engine.runner.parked_bytes == 0
    engine.resume()
    finish(engine)
    for request in requests:
        assert is_greedy(model, request.result().prompt_tokens, request.token_ids)
    engine.close()


LACKS = {
    "disk": (os, "pwrite", OSError(errno.ENOSPC, "No space left on device"), "No space left"),
    "host": (torch, "empty", RuntimeError("can't allocate memory"), "the host has no room"),
}
"""By tier: the function of a module that fails, its error, and what the caller is told."""


@pytest.mark.parametrize("tier", LACKS)
def test_a_tier_without_room_changes_nothing(tier, tmp_path, monkeypatch):
    engine = tiny_engine(cache_dir=tmp_path if tier == "disk" else None)
    request = halfway(engine)
    left = request.params.num_tokens_to_generate - request.num_generated
    digest, computed = engine.cache.digest(), engine.stats()["forward_tokens"]
    owner, name, error, said = LACKS[tier]
    with monkeypatch.context() as patch, pytest.raises((OSError, MemoryError), match=said):
        patch.setattr(owner, name, mock.Mock(side_effect=error))
        engine.suspend(tier)
    assert not engine.is_suspended and engine.cache.digest() == digest
    while not request.done:
        engine.step()
    assert engine.stats()["forward_tokens"] - computed == left
    assert is_greedy(tiny_model(), [*PROMPT, 1, 2, 3], request.token_ids)
    engine.suspend(tier)  # once there is room again
    engine.resume()
    again = engine.generate([PROMPT], greedy(4))[0]
    assert again.prefix.skipped_tokens == len(PROMPT)
    assert again.prefix.fetched_tokens == (len(PROMPT) if tier == "disk" else 0)
    engine.close()


def test_a_failed_resume_holds_nothing(monkeypatch):
    engine = tiny_engine()
    request = halfway(engine)
    engine.suspend("host")
    kept = engine.memory.held_bytes
    storage = type(engine.memory.slots.untyped_storage())
    resize = storage.resize_

    def no_room_for_slots(self, size):
        if size == engine.memory.slots.numel():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return resize(self, size)

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="has no room for"):
        patch.setattr(storage, "resize_", no_room_for_slots)
        engine.resume()
    assert engine.is_suspended and held_bytes(engine) == 0 and engine.memory.held_bytes == kept
    engine.resume()
    finish(engine)
    assert is_greedy(tiny_model(), [*PROMPT, 1, 2, 3], request.token_ids)


# Closing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_cache", [None, "drop", "host"])
def test_a_closed_engine_has_no_memory_and_keeps_what_can_be_read(keep_cache):
    engine = tiny_engine()
    request = halfway(engine)
    engine.add_request(PROMPT, greedy(2), RequestOptions(n=2))
    stream = engine.stream(PROMPT, greedy(4))
    engine.step()
    before = engine.stats()
    if keep_cache is not None:
        engine.suspend(keep_cache)
    engine.close()
    engine.close()
    assert engine.memory.held_bytes == 0 and not engine.has_work
    for call in (
        engine.step,
        engine.resume,
        engine.update_weights,
        engine.clear_cache,
        lambda: engine.load_weights({}),
        lambda: engine.add_request(PROMPT),
        lambda: engine.stream(PROMPT),
        lambda: engine.generate([PROMPT]),
        lambda: engine.save_cache("nowhere"),
    ):
        with pytest.raises(RuntimeError, match=r"\(\) was called on a closed engine.*make another"):
            call()
    engine.suspend()
    engine.cancel(request)
    assert request.closed and request.result().finish_reason == "cancelled"
    assert [output.finish_reason for output in stream][-1] == "cancelled"
    after = engine.stats()
    assert after["steps"] == before["steps"] and after["requests_running"] == 0
    assert engine.metrics() and str(after)
    engine.check_integrity()
