"""What Megatron-LM's own tests of its engine check and no other test here does, for a hybrid model
and for one of attention alone (docs/reference/megatron_tests.md lists all of it); and a model that
Megatron built for a script, wrapped or bare."""

import pytest
import stock_megatron
import torch
from door import MIB, LetterTokenizer, answer, door_engine, finish, greedy_params
from reference import VOCAB_SIZE, greedy_tokens, is_greedy, random_tokens, tiny_model
from torch import nn

from megatron_hybrid.megatron import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    MegatronLLM,
    SamplingParams,
    TextGenerationController,
)

EVENT = DynamicInferenceEventType
LONG = random_tokens(150, vocab_size=95)


@pytest.fixture(params=["M*-M*-", "*-*-"])
def model(request):
    return tiny_model(request.param)


def cached(engine, prompt, **fields):
    """Prompt tokens that were not computed; the answer is checked."""
    request = answer(engine, prompt, greedy_params(3, **fields))
    model = engine.controller.inference_wrapped_model.hybrid_model
    assert is_greedy(model, prompt, request.generated_tokens)
    return request.num_cached_tokens


@pytest.mark.parametrize("length", [73, 80])
def test_a_prompt_that_comes_again_is_skipped_whole(model, length):
    engine = door_engine(model)
    assert [cached(engine, LONG[:length]) for _ in range(2)] == [0, length]


def test_a_fork_is_skipped_to_where_it_parts(model):
    """Where recurrent layers have a state there from the second time on, before at an interval."""
    engine, recurrent = door_engine(model), "M" in model.config.layer_pattern
    forks = [LONG[:80], *([*LONG[:50], n, *LONG[51:70]] for n in (93, 94))]
    assert [cached(engine, fork) for fork in forks] == [0, 48 if recurrent else 50, 50]


def test_what_scripts_read_of_engines_and_what_is_not_there():
    engine = door_engine()
    context = engine.context
    assert context.async_sched_step_count == context.async_sched_compaction_step_count == 0
    assert not engine.use_coordinator and engine.pg_collection.dp.size() == 1
    for part, names in (
        (engine, ("schedule_waiting_requests", "schedule_chunked_prefill")),
        (engine.context.kv_block_allocator, ("block_ref_counts", "kv_hash_to_block_id")),
        (DynamicInferenceRequest(request_id=1), ("precomputed_block_hashes",)),
        (DynamicInferenceRequestRecord, ("checkpoint",)),
        (MegatronLLM, ("submit", "run_sync")),
    ):
        assert not any(hasattr(part, name) for name in names)


def test_a_second_turn_skips_the_answer_of_the_first(model):
    engine = door_engine(model)
    turn = LONG[:80] + answer(engine, LONG[:80], greedy_params(14)).generated_tokens
    assert cached(engine, [*turn, 5, 6]) == len(turn)


def test_running_requests_share_the_blocks_of_a_prompt(model):
    engine = door_engine(model, prefix_caching_mamba_gb=None)
    engine.add_request(1, LONG[:64], greedy_params(8))
    engine.step_modern()
    free = engine.context.kv_block_allocator.total_avail
    engine.add_request(2, LONG[:64], greedy_params(8))
    engine.step_modern()
    assert free - engine.context.kv_block_allocator.total_avail <= 1, "but for its answer"
    assert len({tuple(each.generated_tokens) for each in finish(engine).values()}) == 1


def test_cached_chunked_and_fresh_prefills_in_a_step_are_right(model):
    engine = door_engine(model, max_tokens=32, max_requests=4)
    cached(engine, LONG[:64])
    for number, prompt in enumerate(prompts := [LONG[:70], LONG, LONG[7:40], LONG[:64], LONG[9:]]):
        engine.add_request(number, prompt, greedy_params(6))
    most = 0
    while not (result := engine.step_modern())["finished_request_records"]:
        most = max(most, len(result["active_request_ids"]))
    assert most <= 4
    done = {each.request_id: each.merge() for each in result["finished_request_records"]}
    done |= finish(engine)
    for number, prompt in enumerate(prompts):
        assert is_greedy(model, prompt, done[number].generated_tokens)
    assert cached(engine, LONG) == len(LONG)


@pytest.mark.parametrize("length", [33, 97, 150])
def test_scores_over_chunks_are_those_of_one_pass(model, length):
    """Also where a chunk has one token alone; a prompt is scored without an answer, too."""
    params = {"return_log_probs": True, "top_n_logprobs": 2}
    whole = door_engine(model, track_generated_token_events=True)
    parts = door_engine(model, max_tokens=32)
    one, other = (
        answer(each, LONG[:length], greedy_params(4, **params)) for each in (whole, parts)
    )
    assert one.generated_tokens == other.generated_tokens
    assert one.prompt_log_probs == pytest.approx(other.prompt_log_probs, abs=1e-5)
    scored = answer(parts, LONG[:length], greedy_params(0, **params))
    assert scored.succeeded() and scored.generated_tokens == []
    assert scored.prompt_log_probs == pytest.approx(one.prompt_log_probs, abs=1e-5)
    for request, tokens in ((scored, 0), (other, 0), (one, 4)):
        names = [each.type.name for each in request.events]
        assert names == ["ADD_ENGINE", "ADD_CONTEXT", *["GENERATED_TOKEN"] * tokens, "FINISH"]
        times = [each.timestamp for each in request.events]
        assert times == sorted(times) and request.latency > 0
    assert 0 < one.ttft < one.latency and len(one.tpot) == len(other.tpot) == 4


def test_a_small_pool_evicts_and_answers(model):
    engine = door_engine(model, buffer_size_gb=0.5 * MIB, prefix_caching_mamba_gb=None)
    for seed in range(12):
        cached(engine, random_tokens(60, seed=seed, vocab_size=95))
    engine.engine.check_integrity()


def test_drafts_change_no_answer_score_or_end(model):
    engines = [
        door_engine(model, num_speculative_tokens=n, max_sequence_length=48) for n in (0, 20)
    ]
    prompt = [7, 8, 9] * 8
    text = LetterTokenizer().detokenize(greedy_tokens(model, prompt, 12))
    for fields in ({}, {"stop_words": [text[5:7]]}):
        params = greedy_params(40, return_log_probs=True, top_n_logprobs=2, **fields)
        plain, drafted = (answer(each, prompt, params) for each in engines)
        assert plain.generated_tokens == drafted.generated_tokens
        assert plain.generated_log_probs == pytest.approx(drafted.generated_log_probs, abs=1e-5)
        assert len(drafted.generated_top_n_logprobs) == len(drafted.generated_tokens) <= 24


def test_stop_words_that_do_not_come_and_odd_choices_of_tokens(model):
    engine, prompt = door_engine(model), LONG[:20]
    for words in (None, [], ["no such word in any answer"]):
        assert len(answer(engine, prompt, greedy_params(9, stop_words=words)).generated_tokens) == 9
    for top_k, top_p in ((3, 0.5), (100_000, 0.0)):
        params = SamplingParams(top_k=top_k, top_p=top_p, num_tokens_to_generate=2)
        assert answer(engine, prompt, params).succeeded()
    with pytest.warns(UserWarning, match="top_p"):
        assert answer(engine, prompt, SamplingParams(top_p=1.5)).failed()


def test_equal_engines_draw_equal_tokens(model):
    params = SamplingParams(temperature=1.0, num_tokens_to_generate=9, termination_id=-1)
    one, other = (answer(door_engine(model), LONG[:20], params).generated_tokens for _ in "ab")
    assert one == other and len(set(one)) > 1


def test_texts_begin_with_one_bos_and_end_without_eod():
    tokenizer, controller = LetterTokenizer(), TextGenerationController
    tokenizer.tokenize = lambda text: [96, 96, 1, 2]
    assert controller.tokenize_prompt(tokenizer, "", add_BOS=True) == [96, 1, 2]
    assert controller.tokenize_prompt(tokenizer, "") == [1, 2]
    tokenizer.bos = None
    with pytest.raises(AssertionError, match="no bos token"):
        controller.tokenize_prompt(tokenizer, "", add_BOS=True)
    assert controller.detokenize(tokenizer, [65, 66, 95, 95]) == "ab"
    tokenizer.eod, tokenizer.detokenize = None, repr
    engine = door_engine(tokenizer=tokenizer)
    assert answer(engine, [1, 2], SamplingParams(num_tokens_to_generate=3)).succeeded()


@pytest.mark.parametrize(
    ("kind", "payload"),
    [("FINISH", None), (EVENT.PAUSE, "why"), (EVENT.FAIL, 1), (EVENT.ERROR_TRANSIENT, None)]
    + [(EVENT.GENERATED_TOKEN, payload) for payload in (None, 42, {"token": 1})],
)
def test_an_event_has_the_payload_of_its_kind(kind, payload):
    with pytest.raises(AssertionError, match="payload"):
        DynamicInferenceEvent(type=kind, payload=payload)


def test_a_record_of_segments_merges():
    first, second = (answer(door_engine(), LONG[:n], greedy_params(2)) for n in (20, 30))
    merged = DynamicInferenceRequestRecord(requests=[first, second]).merge()
    assert merged.generated_tokens == first.generated_tokens + second.generated_tokens
    assert merged.prompt_tokens.tolist() == LONG[:20] and merged.generated_length == 4
    assert merged.generated_text == first.generated_text + second.generated_text


PROMPT = random_tokens(40)


class Wrapper(nn.Module):
    """Has the model as `module`, as Float16Module and DDP do, and its config."""

    def __init__(self, module):
        super().__init__()
        self.module, self.config = module, module.config


@pytest.mark.parametrize("pattern", ["M*-M*-", None])
@pytest.mark.parametrize("wrapped", [False, True])
def test_its_answers_are_those_of_its_own_forward(pattern, wrapped):
    config = stock_megatron.core_config(init_method_std=0.2)
    torch.manual_seed(0)
    with stock_megatron.on_cpu():
        rope = {"position_embedding_type": "rope"}
        stock = stock_megatron.stock_model(config, pattern, vocab_size=VOCAB_SIZE, **rope)
    engine = door_engine(Wrapper(Wrapper(stock)) if wrapped else stock)
    given = answer(engine, PROMPT, greedy_params(5))
    tokens = torch.tensor([PROMPT + given.generated_tokens])
    logits = stock_megatron.logits_of(stock, tokens)[0]
    assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == given.generated_tokens
    again = answer(engine, PROMPT, greedy_params(5))
    assert again.generated_tokens == given.generated_tokens
    assert again.num_cached_tokens >= len(PROMPT) - 1
