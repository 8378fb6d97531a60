"""The manners of Megatron's engine that scripts rely on, through the door."""

import asyncio
import warnings
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from differential import failing_at_first
from door import MIB, LetterTokenizer, answer, door_engine, finish, greedy_params
from megatron.core.inference.sampling_params import SamplingParams as CoreParams
from reference import full_logits, greedy_tokens, is_greedy, random_tokens, tiny_model

from megatron_hybrid import build_hybrid_model, compat
from megatron_hybrid.megatron import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextErrorFactory,
    ContextOverflowError,
    CoordinatorError,
    DynamicInferenceContext,
    DynamicInferenceEngine,
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    EngineState,
    EngineSuspendedError,
    GPTInferenceWrapper,
    InferenceClient,
    InferenceConfig,
    KVCacheManagementMode,
    MaxSequenceLengthOverflowError,
    SamplingParams,
    Status,
    TextGenerationController,
)

PROMPT = random_tokens(40, vocab_size=95)


@pytest.fixture
def engine():
    """With the cache in restore mode."""
    return door_engine()


def kinds(request) -> list[str]:
    return [event.type.name for event in request.events]


def test_the_callers_ids_are_kept(engine):
    prompts = {7: PROMPT, 3: PROMPT[9:20], 1000: PROMPT[5:]}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy_params(4))
    result = engine.step_modern()
    finished = {"finished_request_records", "finished_requests"}
    assert set(result) == {"active_request_ids", "step_time", "cuda_graph_request_count", *finished}
    assert sorted(result["active_request_ids"]) == [3, 7, 1000]
    assert result["step_time"] > 0 and result["cuda_graph_request_count"] is None
    assert engine.get_request(3).generated_tokens
    answers = finish(engine)
    assert set(answers) == set(prompts)
    for request_id, request in answers.items():
        assert is_greedy(tiny_model(), prompts[request_id], request.generated_tokens)
        assert request.status is Status.COMPLETED and request.succeeded()


def test_an_id_of_an_unfinished_request_is_refused(engine):
    engine.add_request(1, PROMPT, greedy_params(2))
    for request_id in (1, None, "a"):
        with pytest.raises(ValueError, match=f"request_id (is )?{request_id!r}"):
            engine.add_request(request_id, PROMPT[:5], greedy_params(2))
    with pytest.raises(KeyError, match="request_id 999"):
        engine.abort_request(999)
    assert list(finish(engine)) == [1]
    engine.add_request(1, PROMPT, greedy_params(2))  # the id is free again
    assert list(finish(engine)) == [1]


@pytest.mark.parametrize(
    ("prompt", "fields", "text"),
    [
        ([], {}, "empty"),
        ([5, 97], {}, "token 97"),
        (random_tokens(1025), {}, "max_sequence_length"),
        ([5], {"num_tokens_to_generate": -1}, "num_tokens_to_generate"),
        ([5], {"num_tokens_to_generate": "3"}, "SamplingParams.num_tokens_to_generate is '3'"),
        ([5], {"temperature": float("nan")}, "temperature is nan; it must be a number from 0"),
        ([5], {"top_n_logprobs": 3}, "top_n_logprobs"),
        ([5], {"do_kv_handoff": True}, "do_kv_handoff"),
        ([5], {"stop_words": [""]}, "stop_words"),
        ([[1, 2]], {}, "list"),
        ([1 << 70], {}, "token 1180591620717411303424"),
        (torch.tensor([1.5]), {}, "float"),
    ],
)
def test_what_cannot_be_served_fails_and_does_not_raise(engine, prompt, fields, text):
    engine.add_request(1, PROMPT, greedy_params(3))
    digest = engine.engine.cache.digest()
    with pytest.warns(UserWarning, match="request 2 failed"):
        future = engine.add_request(2, prompt, SamplingParams(**fields))
    assert engine.engine.cache.digest() == digest
    assert future.result().merge().failed()
    answers = finish(engine)
    failed = answers[2]
    assert failed.status is Status.FAILED
    assert (failed.generated_tokens, failed.generated_text) == ([], "")
    assert kinds(failed) == ["ADD_ENGINE", "ERROR_NONTRANSIENT", "FAIL"]
    assert text in str(failed.events[1].payload)
    assert text in failed.events[1].serialize()["payload"]["message"]
    assert is_greedy(tiny_model(), PROMPT, answers[1].generated_tokens)


@pytest.mark.parametrize(
    ("prompt", "fields", "kind"),
    [
        (random_tokens(1025), {}, MaxSequenceLengthOverflowError),
        ([5], {"num_tokens_to_generate": -1}, MaxSequenceLengthOverflowError),
        ([5] * 10, {"num_tokens_total": 9}, MaxSequenceLengthOverflowError),
        (random_tokens(600), {"num_tokens_to_generate": 400}, BlockOverflowError),
    ],
)
def test_what_does_not_fit_fails_with_megatrons_error(prompt, fields, kind):
    engine = door_engine(max_requests=1, buffer_size_gb=0.2 * MIB, prefix_caching_mamba_gb=None)
    with pytest.warns(UserWarning, match="request 2 failed"):
        engine.add_request(2, prompt, SamplingParams(**fields))
    event = finish(engine)[2].events[1]
    assert type(event.payload) is kind and isinstance(event.payload, ContextOverflowError)
    assert event.payload.request_id == 2
    assert event.payload.is_transient == (kind is BlockOverflowError)
    again = DynamicInferenceEvent.deserialize(event.serialize())
    assert type(again.payload) is kind and str(again.payload) == str(event.payload)


def test_the_error_factory_knows_megatrons_errors_only():
    error = ActiveRequestCountOverflowError(4, 9)
    again = ContextErrorFactory.deserialize(ContextErrorFactory.serialize(error))
    assert type(again) is ActiveRequestCountOverflowError and str(again) == str(error)
    for data, message in (({"type": "KeyError"}, "is none of"), ({}, r"fields \[\]"), (3, "is 3")):
        with pytest.raises(ValueError, match=message):
            ContextErrorFactory.deserialize(data)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"imgs": torch.zeros(1)}, ValueError),
        ({"num_img_embeddings_per_tile": 2}, ValueError),
        ({"pictures": None}, TypeError),
    ],
)
def test_images_and_two_numbers_of_tokens_are_refused_at_the_door(engine, given, kind):
    with pytest.raises(kind, match=next(iter(given))):
        engine.add_request(1, PROMPT, greedy_params(2), **given)
    with pytest.raises(AssertionError, match="num_tokens_total=9 exclude"):
        engine.add_request(1, PROMPT, greedy_params(2, num_tokens_total=9))
    assert not engine.has_unfinished_requests()
    none = {"imgs": None, "num_tiles": None, "num_img_embeddings_per_tile": 0, "imgs_sizes": None}
    engine.add_request(1, PROMPT, greedy_params(2), **none)
    assert finish(engine)[1].succeeded()


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, b"text"])
def test_a_prompt_of_another_type_raises_and_changes_nothing(engine, prompt):
    with pytest.raises(TypeError, match="prompt"):
        engine.add_request(1, prompt, greedy_params(2))
    for prompts, params in (([PROMPT, prompt], greedy_params(2)), ([PROMPT], {"top_k": 1})):
        with pytest.raises(TypeError, match=r"prompt|sampling_params must be"):
            engine.generate(prompts, params)
    assert not engine.has_unfinished_requests()


def test_a_text_that_the_tokenizer_refuses_fails():
    picky = LetterTokenizer()
    picky.bos, picky.tokenize = None, mock.Mock(side_effect=RuntimeError("no tokens for this"))
    engine = door_engine(tokenizer=picky)
    with pytest.warns(UserWarning, match="no tokens for this"):
        assert answer(engine, "text", greedy_params(2)).failed()
    with pytest.warns(UserWarning, match="add_BOS"):
        assert answer(engine, "text", greedy_params(2, add_BOS=True)).failed()
    assert answer(engine, PROMPT, greedy_params(2)).succeeded()


def test_outputs_of_a_failed_step_for_an_aborted_request_are_dropped(engine, monkeypatch):
    for request_id in (1, 2):
        engine.add_request(request_id, PROMPT[request_id:], greedy_params(6))
    engine.step_modern()
    live, error = engine.engine.live, MemoryError("after the tokens were drawn")
    monkeypatch.setattr(live, "run_moves", failing_at_first(live.run_moves, error))
    with pytest.raises(MemoryError):
        engine.step_modern()
    engine.abort_request(1)
    answers = finish(engine)
    assert list(answers) == [2]
    assert is_greedy(tiny_model(), PROMPT[2:], answers[2].generated_tokens)
    assert len(answers[2].generated_tokens) == 6


def test_the_rest_of_the_context_bounds_answers_and_a_larger_number_is_warned_of():
    engine, params = door_engine(max_sequence_length=48), greedy_params(None)
    with pytest.warns(UserWarning, match="leaves 8"):
        request = answer(engine, PROMPT, greedy_params(100))
    assert request.generated_length == request.sampling_params.num_tokens_to_generate == 8
    before = params.serialize()
    assert answer(engine, PROMPT, params).generated_length == 8
    assert params.serialize() == before
    assert answer(engine, PROMPT, greedy_params(None, num_tokens_total=46)).generated_length == 6


def test_prompts_as_text_list_or_tensor_are_one():
    engine, tokenizer = door_engine(), LetterTokenizer()
    text = "once upon a time there was"
    tokens = tokenizer.tokenize(text)
    answers = [
        answer(engine, prompt, greedy_params(5)) for prompt in (text, tokens, torch.tensor(tokens))
    ]
    assert len({tuple(request.generated_tokens) for request in answers}) == 1
    for request in answers:
        assert request.prompt == text
        assert request.prompt_tokens.tolist() == tokens
        assert request.prompt_length == len(tokens)
        assert request.generated_text == tokenizer.detokenize(request.generated_tokens)
    with_bos = answer(engine, text, greedy_params(5, add_BOS=True))
    assert with_bos.prompt_tokens.tolist() == [tokenizer.bos, *tokens]


def test_the_terminating_token_is_in_the_tokens_and_not_in_the_text(engine):
    tokens = greedy_tokens(tiny_model(), PROMPT, 6)
    ends = tokens.index(tokens[3])
    params = greedy_params(6, termination_id=tokens[3], return_log_probs=True)
    request = answer(engine, PROMPT, params)
    assert request.generated_tokens == tokens[: ends + 1]
    assert len(request.generated_log_probs) == ends + 1
    assert request.generated_text == LetterTokenizer().detokenize(tokens[:ends])
    params.detokenize_stop_sequence = True
    kept = answer(engine, PROMPT, params)
    assert kept.generated_text == LetterTokenizer().detokenize(tokens[: ends + 1])


def test_a_stop_words_tokens_are_cut_with_their_log_probs():
    engine, tokenizer = door_engine(), LetterTokenizer()
    tokens = greedy_tokens(tiny_model(), PROMPT, 8)
    text = tokenizer.detokenize(tokens)
    word = text[3:5]
    first = text.find(word)
    params = greedy_params(8, stop_words=[word], return_log_probs=True, top_n_logprobs=2)
    request = answer(engine, PROMPT, params)
    assert request.generated_text == text[:first]
    assert request.generated_tokens == tokens[:first]
    assert len(request.generated_log_probs) == len(request.generated_top_n_logprobs) == first
    params.detokenize_stop_sequence = True
    kept = answer(engine, PROMPT, params)
    assert kept.generated_text == text[: first + len(word)]
    assert kept.generated_tokens == tokens[: first + len(word)]


def test_scores_are_those_of_a_full_forward_pass_by_text():
    engine, tokenizer = door_engine(), LetterTokenizer()
    params = greedy_params(4, return_log_probs=True, top_n_logprobs=3)
    answer(engine, PROMPT, greedy_params(1))
    request = answer(engine, PROMPT, params)
    tokens = PROMPT + request.generated_tokens
    rows = full_logits(tiny_model(), tokens).log_softmax(-1)[:-1]
    expected = rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    scores = request.prompt_log_probs + request.generated_log_probs
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len(request.prompt_log_probs) == len(PROMPT) - 1
    tops = request.prompt_top_n_logprobs + request.generated_top_n_logprobs
    for row, top in zip(rows, tops, strict=True):
        values, ids = row.topk(3)
        by_text: dict[str, float] = {}
        for token, value in zip(ids.tolist(), values.tolist()):
            by_text.setdefault(tokenizer.detokenize([token]), value)
        assert list(top) == list(by_text)
        assert list(top.values()) == pytest.approx(list(by_text.values()), abs=1e-5)
    params.skip_prompt_log_probs = True
    params.add_attributes({})
    without = answer(engine, PROMPT, params)
    assert without.prompt_log_probs == [] and without.prompt_top_n_logprobs == []
    assert without.generated_log_probs == pytest.approx(request.generated_log_probs, abs=1e-5)
    assert without.num_cached_tokens == len(PROMPT)
    assert answer(engine, PROMPT, greedy_params(1)).generated_log_probs is None


def test_processed_log_probs_are_of_the_distribution_that_was_drawn_from():
    engine = door_engine(logprobs_mode="processed_logprobs")
    params = greedy_params(4, return_log_probs=True, skip_prompt_log_probs=True)
    assert answer(engine, PROMPT, params).generated_log_probs == [0.0] * 4


def test_preempted_requests_have_an_event_and_the_same_answers():
    engine = door_engine(
        max_requests=4,
        buffer_size_gb=(4 * 24576 + 27 * 4096) / (1 << 30),  # live slots, and 27 pages
        prefix_caching_mamba_gb=None,
        track_paused_request_events=True,
        max_sequence_length=256,
    )
    prompts = {i: random_tokens(40, seed=i) for i in range(4)}
    for i, prompt in prompts.items():
        engine.add_request(i, prompt, greedy_params(60))
    answers = finish(engine)
    assert engine.engine.scheduler.num_preemptions > 0
    moved = [kind for request in answers.values() for kind in kinds(request)]
    assert {"PAUSE", "EVICT"}.intersection(moved)
    for i, prompt in prompts.items():
        assert is_greedy(tiny_model(), prompt, answers[i].generated_tokens)


def test_records_merge_and_survive_serialization(engine):
    params = greedy_params(3, return_log_probs=True, return_prompt_tokens=True)
    (record,) = engine.generate([PROMPT], params)
    assert isinstance(record, DynamicInferenceRequestRecord)
    merged = record.merge()
    assert isinstance(merged, DynamicInferenceRequest)
    assert merged.latency == record.latency
    assert (record[-1].request_id, record.request_id) == (0, 0)
    assert record[-1].uid == merged.uid
    again = DynamicInferenceRequestRecord.deserialize(record.serialize()).merge()
    assert again.generated_tokens == merged.generated_tokens
    assert again.prompt_tokens.tolist() == PROMPT
    assert again.sampling_params == merged.sampling_params
    assert again.status is Status.COMPLETED and kinds(again) == kinds(merged)
    merged.sampling_params.return_prompt_tokens = False
    data = merged.serialize()
    assert data["prompt_tokens"] is None and data["prompt_length"] == len(PROMPT)


EVENT = DynamicInferenceEventType


def test_events_are_added_by_name():
    request, error = DynamicInferenceRequest(request_id=1), ValueError("why")
    names = [kind.name for kind in EVENT]
    for name in names:
        given = {"GENERATED_TOKEN": [7]}.get(name, [error] if "ERROR" in name else [])
        added = getattr(request, f"add_event_{name.lower()}")(*given)
        assert added is request.events[-1]
    assert kinds(request) == names and request.events[2].payload == {"token_id": 7}


def test_events_print_and_serialize_as_often_as_one_likes():
    engine = door_engine(track_generated_token_events=True)
    with pytest.warns(UserWarning):
        failed = answer(engine, [], greedy_params(1))
    for event in (*failed.events, *answer(engine, PROMPT, greedy_params(1)).events):
        data = event.serialize()
        again = DynamicInferenceEvent.deserialize(data)
        assert again.serialize() == data and str(again) == str(event)
    assert str(failed.events[1]).endswith("ERROR_NONTRANSIENT, ValueError")


def test_futures_hold_the_records(engine):
    future = engine.add_request(5, PROMPT, greedy_params(2))
    assert not future.done()
    records = engine.generate([PROMPT[:9]], greedy_params(4))  # also runs what was queued
    assert [record.request_id for record in records] == [0, 5]
    assert future.result() is records[1]


async def test_a_loop_serves_futures_and_a_failed_step_is_its_requests_error(engine, monkeypatch):
    step = engine.engine.step

    def fail():
        monkeypatch.setattr(engine.engine, "take_failed", lambda: [engine.requests[5].handle])
        raise OSError("the device is gone")

    loop = asyncio.create_task(engine.run_engine())
    futures = [engine.add_request(n, PROMPT, greedy_params(3)) for n in range(2)]
    records = [await future for future in futures]
    monkeypatch.setattr(engine.engine, "step", fail)
    lost = engine.add_request(5, PROMPT, greedy_params(3))
    await asyncio.sleep(0.05)
    monkeypatch.setattr(engine.engine, "step", step)
    records += [await lost, await engine.add_request(6, PROMPT, greedy_params(3))]
    loop.cancel()
    first, second, lost, last = (record.merge() for record in records)
    for each in (first, second, last):
        assert is_greedy(tiny_model(), PROMPT, each.generated_tokens)
    assert "the device is gone" in str(lost.events[1].payload)
    assert engine.get_prefix_coordination_metrics()["waits"] > 0


async def test_futures_can_be_awaited(engine):
    future = engine.add_request(5, PROMPT, greedy_params(3))
    while not future.done():
        await engine.async_step()
    assert is_greedy(tiny_model(), PROMPT, (await future).merge().generated_tokens)


def test_the_steps_of_older_and_newer_scripts(engine):
    engine.add_request(2, PROMPT, greedy_params(2))
    active, finished, seconds = engine.step()
    assert [request.request_id for request in active] == [2] and finished == [] and seconds > 0
    active, finished, _ = engine.step_legacy(greedy_params(2))
    assert active == [] and len(finished[0].generated_tokens) == 2
    engine.add_request(2, PROMPT, greedy_params(1))
    (request,) = engine.step_modern()["finished_requests"]
    assert request.generated_text == LetterTokenizer().detokenize(request.generated_tokens)


def test_a_script_may_do_all_in_inference_mode_and_go_on_without():
    with torch.inference_mode():
        model = build_hybrid_model(replace(tiny_model("M*-").config))
        engine = door_engine(model, kv_cache_management_mode="offload")
        first = answer(engine, PROMPT, greedy_params(3))
    again = answer(engine, PROMPT, greedy_params(3))
    assert again.generated_tokens == first.generated_tokens
    assert again.num_cached_tokens == len(PROMPT)
    engine.suspend()
    engine.resume()
    assert answer(engine, PROMPT, greedy_params(3)).num_cached_tokens == len(PROMPT)
    engine.reset()
    assert answer(engine, PROMPT, greedy_params(3)).generated_tokens == first.generated_tokens


def test_configs_and_parameters_of_megatron_core_itself_do_as_well():
    """Four changed imports are enough: those of context, wrapper, controller and engine."""
    theirs = CoreParams(top_k=1, num_tokens_to_generate=4, termination_id=-1)
    before = dict(vars(theirs))
    engine = door_engine()
    assert is_greedy(tiny_model(), PROMPT, answer(engine, PROMPT, theirs).generated_tokens)
    assert vars(theirs) == before
    if compat.MEGATRON_CORE_VERSION >= (0, 19, 0):  # 0.16 has no such config
        from megatron.core.inference import config as core

        mode = core.KVCacheManagementMode.OFFLOAD
        config = core.InferenceConfig(max_tokens=77, kv_cache_management_mode=mode)
        context = DynamicInferenceContext(None, config)
        assert context.max_tokens == 77
        assert context.config.kv_cache_management_mode is KVCacheManagementMode.OFFLOAD


def test_the_context_counts_steps_and_prefill_tokens(engine):
    context = engine.context
    answer(engine, PROMPT, greedy_params(3))
    assert context.lifetime_prefill_token_count == len(PROMPT)
    assert context.step_count >= 3
    second = answer(engine, [*PROMPT, 1, 2], greedy_params(3))
    assert second.num_cached_tokens == len(PROMPT)
    assert context.lifetime_prefill_token_count == len(PROMPT) + 2
    assert context.prefix_cache_prefill_computed_tokens == len(PROMPT) + 2
    assert context.prefix_cache_prefill_skipped_tokens == len(PROMPT)
    assert context.prefix_cache_hits == 1
    assert context.prefix_cache_blocks_matched == len(PROMPT) // 16
    context.reset(preserve_prefix_cache=True, preserve_counters=True)
    assert answer(engine, PROMPT, greedy_params(3)).num_cached_tokens == len(PROMPT)
    assert context.prefix_cache_hits == 2
    context.reset()
    assert answer(engine, PROMPT, greedy_params(3)).num_cached_tokens == 0
    assert context.prefix_cache_hits == 0
    assert (context.max_requests, context.max_tokens) == (8, 512)
    assert (context.max_sequence_length, context.block_size_tokens) == (1024, 16)
    assert context.enable_prefix_caching and context.unified_memory_level == 0
    blocks = context.kv_block_allocator
    assert blocks.pool_size - 1 == blocks.active_count >= blocks.total_avail > 0
    assert len(context.cuda_graph_batch_dimensions_list) == 0
    engine.reset()
    assert (context.step_count, context.lifetime_prefill_token_count) == (0, 0)
    assert answer(engine, PROMPT, greedy_params(3)).num_cached_tokens == 0
    assert engine.capture_stats is None


def test_a_reset_drops_unfinished_requests(engine):
    future = engine.add_request(1, PROMPT, greedy_params(30))
    engine.step_modern()
    with pytest.warns(UserWarning):
        engine.add_request(2, [], greedy_params(30))
    engine.reset()
    assert future.cancelled() and not engine.has_unfinished_requests()
    assert engine.step_modern()["finished_request_records"] == []
    engine.engine.check_integrity()


def test_decode_only_tells_of_the_last_step():
    engine = door_engine(max_tokens=32)
    assert engine.decode_only.launched is None
    engine.add_request(1, PROMPT, greedy_params(4))
    seen = []
    while engine.has_unfinished_requests():
        engine.step_modern()
        seen.append((engine.decode_only.launched, engine.decode_only.consumed))
    assert seen[:3] == [(False, False), (False, False), (True, True)]


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_suspend_and_resume(mode):
    engine = door_engine(kv_cache_management_mode=mode)
    answer(engine, PROMPT, greedy_params(2))
    engine.add_request(1, [*PROMPT, 3, 4], greedy_params(6))
    engine.step_modern()
    engine.suspend()
    engine.suspend()
    assert engine.state is EngineState.SUSPENDED and engine.is_suspended
    held = engine.engine.memory.pool.untyped_storage().nbytes()
    assert (held > 0) is (mode == "persist") is engine.context.is_tensor_state_allocated
    with pytest.raises(EngineSuspendedError, match="resume"):
        engine.step_modern()
    engine.add_request(2, PROMPT, greedy_params(3))
    engine.resume()
    engine.resume()
    assert engine.state is EngineState.RUNNING
    answers = finish(engine)
    assert is_greedy(tiny_model(), [*PROMPT, 3, 4], answers[1].generated_tokens)
    assert is_greedy(tiny_model(), PROMPT, answers[2].generated_tokens)
    if mode != "recompute":
        assert answers[2].num_cached_tokens == len(PROMPT)


def test_records_tell_the_epochs_of_weights(engine):
    assert answer(engine, PROMPT, greedy_params(2)).policy_epoch == [(0, 0)]
    engine.add_request(1, [*PROMPT, 3, 4], greedy_params(6))
    while len(engine.get_request(1).generated_tokens) < 2:
        engine.step_modern()
    engine.engine.update_weights()
    engine.add_request(2, PROMPT, greedy_params(3))
    engine.add_request(3, PROMPT, greedy_params(0))
    answers = finish(engine)
    total = len(PROMPT) + 4
    assert answers[1].policy_epoch == [(0, 0), (total - 1, 1)]
    assert answers[1].kv_cache_epoch == [(0, 1)]  # all of it was computed anew
    for request in (answers[2], answers[3]):
        assert request.policy_epoch == request.kv_cache_epoch == [(0, 1)]
        assert DynamicInferenceRequest.deserialize(request.serialize()).policy_epoch == [(0, 1)]


class Panic(BaseException):
    """As a native tokenizer raises it."""


@pytest.mark.parametrize("error", [ValueError, Panic])
def test_an_error_of_the_tokenizer_fails_its_request_only(error):
    class Broken(LetterTokenizer):
        def detokenize(self, tokens):
            if 3 in tokens and len(tokens) == 41:
                raise error("no text for 3")
            return super().detokenize(tokens)

    engine = door_engine(tokenizer=Broken())
    engine.add_request(1, [*PROMPT, 3], greedy_params(2))
    engine.add_request(2, PROMPT, greedy_params(2))
    answers = finish(engine)
    assert answers[1].failed() and "no text for 3" in str(answers[1].events[-2].payload)
    assert answers[2].succeeded()


def test_the_coordinators_calls_are_refused_by_the_version_that_lacks_it(engine):
    version = ".".join(map(str, compat.MEGATRON_CORE_VERSION))
    message = rf"megatron-core {version} is installed, and this needs the coordinator of 0\.19"
    with mock.patch.object(compat, "HAVE_COORDINATOR", False):
        with pytest.raises(CoordinatorError, match=message):
            asyncio.run(engine.start_listening_to_data_parallel_coordinator())
        with pytest.raises(CoordinatorError, match=message):
            InferenceClient("tcp://127.0.0.1:5000")
    with pytest.raises(RuntimeError, match="engine_loop_task is of an engine that has joined"):
        _ = engine.engine_loop_task
    with pytest.raises(RuntimeError, match=r"wait_until\(\) is of an engine that has joined"):
        asyncio.run(engine.wait_until(EngineState.RUNNING))
    assert not engine.use_coordinator


def test_parts_of_other_packages_are_refused_and_a_tokenizer_may_be_left_out():
    model = tiny_model()
    with pytest.raises(TypeError, match="inference_config"):
        DynamicInferenceContext(model.config, object())
    context = DynamicInferenceContext(model.config, InferenceConfig(buffer_size_gb=0.01))
    with pytest.raises(TypeError, match="inference_context"):
        GPTInferenceWrapper(model, object())
    with pytest.raises(TypeError, match="GPTInferenceWrapper"):
        TextGenerationController(object(), None)
    with pytest.raises(TypeError, match="TextGenerationController"):
        DynamicInferenceEngine(object(), context)
    assert context.max_tokens == 16384  # scripts compare their prompts with it
    with pytest.raises(RuntimeError, match="max_requests follows from the model"):
        _ = context.max_requests
    controller = TextGenerationController(GPTInferenceWrapper(model, context), None)
    with pytest.raises(TypeError, match="context"):
        DynamicInferenceEngine(controller, object())
    engine = DynamicInferenceEngine(controller, context)
    with pytest.raises(ValueError, match="belongs to another engine"):
        DynamicInferenceEngine(controller, context)
    # Without a tokenizer, answers are ids.
    request = answer(engine, PROMPT, greedy_params(3))
    assert request.generated_text is None and request.prompt is None
    assert is_greedy(model, PROMPT, request.generated_tokens)
    with pytest.warns(UserWarning, match="needs a tokenizer"):
        assert answer(engine, "text", greedy_params(3)).failed()


def test_answers_survive_a_failure_to_save_their_last_states(engine, monkeypatch):
    complete, steps = engine.engine.step, []

    def step():
        steps.append(engine.requests)
        if not engine.requests:
            raise MemoryError("no room for a last state")
        return complete()

    monkeypatch.setattr(engine.engine, "step", step)
    request = answer(engine, PROMPT, greedy_params(3))
    assert is_greedy(tiny_model(), PROMPT, request.generated_tokens)
    assert not steps[-1], "no last state was to be saved"
    monkeypatch.undo()
    again = answer(engine, PROMPT, greedy_params(3))
    assert again.generated_tokens == request.generated_tokens
    engine.engine.check_integrity()


class Euros(LetterTokenizer):
    """Tokens 1 to 3 are the bytes of a character, 0 is special, 7 and 8 are "aX" and "X"."""

    eod = bos = 96

    def detokenize(self, tokens):
        parts = {1: b"\xe2", 2: b"\x82", 3: b"\xac", 7: b"aX", 8: b"X"}
        return b"".join(parts.get(t, b"") for t in tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("tokens", "kept", "text"),
    [
        ([1, 2, 3, 8], [1, 2, 3], "\u20ac"),
        ([1, 2, 3, 0, 8], [1, 2, 3, 0], "\u20ac"),
        ([1, 2, 3, 7], [1, 2, 3, 7], "\u20aca"),  # the token also holds text before the word
        ([8], [], ""),
    ],
)
def test_a_stop_word_is_cut_at_its_own_tokens(tokens, kept, text):
    engine = door_engine(tokenizer=Euros())
    params = SamplingParams(stop_words=["X"])
    request = DynamicInferenceRequest(
        request_id=1, prompt="", sampling_params=params, generated_tokens=list(tokens)
    )
    engine._write_text(request, SimpleNamespace(stop_ids=frozenset()))
    assert (request.generated_tokens, request.generated_text) == (kept, text)


def test_warnings_as_errors_leave_no_phantom_request():
    engine = door_engine(max_sequence_length=48)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for prompt, count in (([], 3), (PROMPT, 100)):
            with pytest.raises(UserWarning):
                engine.add_request(1, prompt, greedy_params(count))
            (record,) = engine.step_modern()["finished_request_records"]
            assert record.merge().failed() and not engine.has_unfinished_requests()


def test_a_future_of_a_closed_loop_disturbs_no_step(engine):
    async def add(request_id):
        future = engine.add_request(request_id, PROMPT[request_id:], greedy_params(2))
        future.add_done_callback(print)

    for request_id in (1, 2):
        asyncio.run(add(request_id))
    engine.abort_request(1)
    assert list(finish(engine)) == [2]
