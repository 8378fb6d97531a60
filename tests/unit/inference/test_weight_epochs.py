"""New weights in a training loop: nothing of older ones is used, and results tell their epochs."""

import pytest
import torch
from differential import LogitsRecorder
from matrix import matrix_rows
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from reference import copy_of, fresh_model, greedy, is_greedy, random_tokens, tiny_engine
from slow_tiers import SlowArrival, SlowStore
from torch import nn

from megatron_hybrid.cache.matching import PREFIX_CACHING_MODES
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.offload.fetch import FetchState
from megatron_hybrid.offload.page_mover import PageMover
from megatron_hybrid.training.core_cpu_patch import core_cpu_patch

PROMPT, SECOND, THIRD = (random_tokens(100, seed=seed) for seed in range(3))
PATTERNS = {"hybrid": "MG*-", "attention": "*-*-"}


# Wrapped models ----------------------------------------------------------------------------------


def in_megatron_ddp(model):
    with core_cpu_patch():
        return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


WRAPPERS = {
    "torch": nn.parallel.DistributedDataParallel,
    "all": lambda model: [in_megatron_ddp(Float16Module(model.config, model))],
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_an_engine_serves_the_parameters_of_a_wrapped_model(name, core_groups):
    model = fresh_model(params_dtype=torch.bfloat16) if name == "all" else fresh_model()
    wrapped = WRAPPERS[name](model)
    engine = tiny_engine(wrapped)
    assert engine.model is model
    engine.generate([PROMPT], greedy(3))
    outer = wrapped[0] if isinstance(wrapped, list) else wrapped
    outer.train()
    with torch.no_grad():
        for parameter in outer.parameters():
            parameter.data.mul_(0.7)
    with pytest.raises(RuntimeError, match=r"eval\(\), or update_weights\(\) after a training"):
        engine.generate([PROMPT], greedy(3))
    engine.update_weights()
    result = engine.generate([PROMPT], greedy(3))[0]
    assert result.prefix.skipped_tokens == 0 and result.epochs == [(1, 0)]
    expected = tiny_engine(copy_of(model)).generate([PROMPT], greedy(3))[0]
    assert result.token_ids == expected.token_ids


@pytest.mark.parametrize("given", [[1], [1, 2], nn.Linear(2, 2), nn.Identity()])
def test_what_holds_no_hybrid_model_is_refused(given):
    with pytest.raises(TypeError, match=f"bare or wrapped, got {type(given).__name__}"):
        tiny_engine(given)


# No stale hit ------------------------------------------------------------------------------------


def optimizer_step(model):
    model(torch.tensor([PROMPT])).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.3).step()


def replace_a_module(model):
    """The first layer, so that every state and all KV behind it changes."""
    model.decoder.layers[0] = fresh_model(model.config.layer_pattern, seed=7).decoder.layers[0]


def write_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.6)


def busy_engine(model, mode, folder):
    """Prefixes in the pool and in all tiers, and a request of each kind: decoding, in its prefill
    with samples to fork, waiting; where there are tiers, also fetching."""
    fields = {"prefix_caching": mode, "max_tokens": 64}
    if mode == "restore":
        fields |= {"host_cache_bytes": 8 << 20, "cache_dir": folder}
    engine = tiny_engine(model, **fields)
    engine.generate([SECOND], greedy(3))
    if mode == "restore":
        engine.save_cache()
        engine.cache.evict(10**6)
    engine.generate([PROMPT], greedy(3))
    decoding = engine.add_request([*PROMPT, 5], greedy(12))
    while decoding.num_generated < 2:
        engine.step()
    forking = engine.add_request(THIRD, greedy(4), RequestOptions(n=3))
    engine.step()
    assert 0 < forking.num_computed < len(THIRD) and forking.siblings
    waiting = [engine.add_request(prompt, greedy(4)) for prompt in (PROMPT, SECOND, THIRD)]
    if mode == "restore":
        engine.scheduler.schedule()  # finds what to fetch, as the step that fails then
        engine.scheduler.abort()
        assert any(request.fetch is not None for request in waiting)
    return engine, [decoding, *forking.samples, *waiting]


def finish(engine, requests, fresh):
    """Run the rest; every row of logits is that of a model which never had other weights."""
    before = [request.num_generated for request in requests]
    computed, fetched = (engine.stats()[key] for key in ("forward_tokens", "fetched_tokens"))
    recorder = LogitsRecorder(engine)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert {id(request) for request, *_ in recorder.rows} == {id(r) for r in requests}
    recorder.check(fresh)
    answers = [request.tokens[: request.num_tokens].tolist() for request in requests]
    prefixes = {tuple(answer[:end]) for answer in answers for end in range(1, len(answer))}
    assert engine.stats()["forward_tokens"] - computed >= len(prefixes), "some was not computed"
    assert engine.stats()["fetched_tokens"] == fetched
    for request, start in zip(requests, before):
        tokens, prompt = request.token_ids, request.tokens[: request.num_prompt_tokens]
        assert is_greedy(fresh, [*prompt.tolist(), *tokens[:start]], tokens[start:])
        epochs = [(0, 0), (1, start)] if start else [(1, 0)]
        assert request.result().epochs == epochs


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("mode", matrix_rows(PREFIX_CACHING_MODES, "restore"))
@pytest.mark.parametrize("change", [replace_a_module, write_data])
def test_nothing_of_older_weights_is_used(tmp_path, change, mode, pattern):
    model = fresh_model(pattern)
    engine, requests = busy_engine(model, mode, tmp_path)
    change(model)
    engine.update_weights()
    assert engine.epoch == 1 and engine.runner.parked_bytes == 0
    assert not engine.stats()["cached_tokens"] and not engine.stats()["host_bytes"]
    assert not engine.stats()["disk_bytes"]
    finish(engine, requests, copy_of(model))
    engine.close()


@pytest.mark.parametrize("mode", matrix_rows(PREFIX_CACHING_MODES, "restore"))
@pytest.mark.parametrize("change", [optimizer_step, replace_a_module])
def test_what_the_engine_notices_begins_an_epoch_too(tmp_path, change, mode):
    model = fresh_model()
    engine, requests = busy_engine(model, mode, tmp_path)
    change(model)
    finish(engine, requests, copy_of(model))
    assert engine.epoch == engine.stats()["weight_changes"] == 1
    engine.close()


@pytest.mark.parametrize("keep_cache", matrix_rows(["drop", "host", "disk"], "host"))
@pytest.mark.parametrize("change", [optimizer_step, write_data])
def test_nothing_of_older_weights_outlives_a_suspension(tmp_path, change, keep_cache):
    model = fresh_model()
    engine, requests = busy_engine(model, "restore", tmp_path)
    engine.suspend(keep_cache)
    change(model)
    if change is write_data:
        engine.update_weights()
        assert engine.memory.held_bytes == 0 and engine.epoch == 1
    engine.resume()
    assert engine.epoch == 1
    finish(engine, requests, copy_of(model))
    engine.close()


@pytest.mark.parametrize("is_loading", [False, True])
@pytest.mark.parametrize("host_bytes", [0, 8 << 20], ids=["disk", "host"])
def test_a_fetch_under_way_brings_nothing_of_older_weights(
    tmp_path, host_bytes, is_loading, monkeypatch
):
    model = fresh_model()
    folder = None if host_bytes else tmp_path
    engine = tiny_engine(model, host_cache_bytes=host_bytes, cache_dir=folder)
    engine.generate([PROMPT], greedy(3))
    engine.cache.evict(10**6)
    (tier,) = engine.offload.tiers
    store, tier.store = tier.store, SlowStore(tier.store)
    to_pool = PageMover.to_pool

    def slow_to_pool(*parts):
        to_pool(*parts)
        return SlowArrival(lambda: False)

    monkeypatch.setattr(PageMover, "to_pool", slow_to_pool)
    request = engine.add_request(PROMPT, greedy(5))
    engine.step()
    late = [(future, store.get(record).result()) for future, record in tier.store.reads]
    if is_loading:
        tier.store.arrive()
        engine.step()
    state = FetchState.LOADING if is_loading else FetchState.READING
    assert request.fetch.state is state and late
    write_data(model)
    engine.update_weights()
    for future, old_bytes in late:
        if not future.done():
            future.set_result(old_bytes)
    finish(engine, [request], copy_of(model))
    assert request.prefix.skipped_tokens == 0
    engine.close()


def test_parked_requests_are_computed_anew():
    model = fresh_model("M*-")
    engine = tiny_engine(model, cache_bytes=80 << 10, max_requests=4)
    requests = [engine.add_request(random_tokens(60, seed=i), greedy(60)) for i in range(4)]
    while not engine.runner.parked_bytes:
        engine.step()
    write_data(model)
    engine.update_weights()
    assert engine.runner.parked_bytes == 0
    assert not any(request.parked_tokens for request in requests)
    finish(engine, requests, copy_of(model))


def test_encoded_states_follow_the_decays_of_the_new_weights(tmp_path):
    model = fresh_model("M*-")
    engine = tiny_engine(model, state_encoding="int8")
    engine.generate([PROMPT], greedy(2))
    model.decoder.layers[0].mixer.A_log.data.sub_(3.0)
    engine.update_weights()
    engine.generate([PROMPT], greedy(2))
    again = tiny_engine(copy_of(model), state_encoding="int8")
    again.generate([PROMPT], greedy(2))
    for each in (engine, again):
        assert each.generate([[*PROMPT, 3]], greedy(2))[0].prefix.skipped_tokens == 100
    (saved,), (expected,) = (
        [c for c in each.cache.contents.stored_checkpoints() if c.position == 100]
        for each in (engine, again)
    )
    assert torch.equal(engine.memory.pool[saved.pages], again.memory.pool[expected.pages])


# Epochs ------------------------------------------------------------------------------------------


def test_outputs_and_results_tell_their_epochs():
    model = fresh_model()
    engine = tiny_engine(model)
    request = engine.add_request(PROMPT, greedy(6), RequestOptions(n=2))
    epochs = {sample.request_id: [] for sample in request.samples}
    for step in range(100):
        if not engine.has_work:
            break
        if step in (2, 3, 5):
            engine.update_weights()
        for output in engine.step():
            epochs[output.request_id] += [output.epoch] * len(output.token_ids)
    for result in request.result().samples:
        told = epochs[result.request_id]
        expected = [(e, i) for i, e in enumerate(told) if e not in told[:i]]
        assert result.epochs == expected and len(told) == 6 and len(expected) > 2
    assert engine.epoch == 3
    assert engine.generate([PROMPT], greedy(0))[0].epochs == []


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.clear_cache(),
        lambda engine: (engine.suspend("drop"), engine.resume()),
        lambda engine: engine.save_cache(),
    ],
)
def test_no_call_hides_a_change_of_the_weights(tmp_path, call):
    model = fresh_model()
    with tiny_engine(model, cache_dir=tmp_path) as engine:
        assert engine.generate([PROMPT], greedy(2))[0].epochs == [(0, 0)]
        call(engine)
        assert engine.epoch == 0
        optimizer_step(model)
        call(engine)
        assert engine.epoch == 1
        result = engine.generate([PROMPT], greedy(2))[0]
        assert result.epochs == [(1, 0)] and result.prefix.skipped_tokens == 0
        assert is_greedy(copy_of(model), PROMPT, result.token_ids)


def test_a_dropped_stop_token_begins_no_epoch():
    engine = tiny_engine(fresh_model())
    stop = engine.generate([PROMPT], greedy(1))[0].token_ids[0]
    result = engine.generate([PROMPT], greedy(3, stop_token_ids=(stop,)))[0]
    assert result.token_ids == [] == result.epochs
