"""suspend and resume: the memory is given back, and answers stay those of an engine without it."""

import pytest
from reference import greedy, is_greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.exclusive import EngineSuspendedError

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


@pytest.mark.parametrize("keep_cache", ["drop", "host"])
@pytest.mark.parametrize("mode", ["off", "restore"])
def test_a_running_request_goes_on_after_a_suspension(keep_cache, mode):
    engine = tiny_engine(prefix_caching=mode)
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
    assert is_greedy(tiny_model(), [*PROMPT, 1, 2, 3], request.generated_tokens)
    assert is_greedy(tiny_model(), PROMPT, waiting.generated_tokens)
    skips = mode == "restore" and keep_cache == "host"
    assert (waiting.report.skipped_tokens == len(PROMPT)) is skips
    engine.check_integrity()


def test_keep_host_computes_no_token_again():
    engine = tiny_engine()
    request = halfway(engine)
    left = request.params.num_tokens_to_generate - request.num_generated
    before = engine.stats()["forward_tokens"]
    engine.suspend("host")
    engine.resume()
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
    assert [token for output in stream for token in output.tokens]  # the refusal ended nothing
    assert next(other, None) is None
    while engine.has_work:
        engine.step()
    assert is_greedy(tiny_model(), [*PROMPT, 1, 2, 3], request.generated_tokens)
    engine.check_integrity()


def test_an_unknown_keep_cache_is_refused():
    engine = tiny_engine()
    with pytest.raises(ValueError, match="keep_cache is 'all'; use 'drop', 'host' or 'disk'"):
        engine.suspend("all")
    assert not engine.is_suspended


def test_no_room_at_resume_leaves_the_engine_suspended(monkeypatch):
    engine = tiny_engine()
    request = halfway(engine)
    engine.suspend("host")
    with monkeypatch.context() as patch:
        patch.setattr(engine.memory, "reacquire", _no_room)
        with pytest.raises(MemoryError):
            engine.resume()
    assert engine.is_suspended
    engine.resume()
    while not request.done:
        engine.step()
    assert is_greedy(tiny_model(), [*PROMPT, 1, 2, 3], request.generated_tokens)


def _no_room():
    raise MemoryError("the device is full")
