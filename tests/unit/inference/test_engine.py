"""What the engine promises its callers: seeds, scores, samples, cancelling, being preempted."""

import cProfile
import itertools

import pytest
import torch
from differential import (
    InjectedError,
    LogitsRecorder,
    check_answer,
    check_log_probs,
    failing_forward,
    poison,
)
from matrix import matrix_rows
from reference import (
    finish,
    full_logits,
    greedy,
    greedy_tokens,
    is_greedy,
    random_tokens,
    tiny_engine,
    tiny_model,
)
from scripted import ByteTokenizer

from megatron_hybrid.cache.report import MissReason
from megatron_hybrid.inference.memory.cache_pool import CachePool
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.output import OutputProcessor
from megatron_hybrid.inference.requests.request import RequestStatus
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.worker.context import DynamicInferenceContext
from megatron_hybrid.inference.worker.model_runner import ModelRunner

MODEL = tiny_model()
MODES = ("off", "memory_only", "restore")


def assert_idle(engine):
    assert not engine.has_work
    assert not engine.cache.allocator.ref_counts.any()
    assert len(engine.scheduler.free_slots) == engine.config.max_requests
    assert not engine.stats()["parked_bytes"]
    engine.check_integrity()


def sampled(count, seed=None, **fields):
    return SamplingParams(num_tokens_to_generate=count, seed=seed, **fields)


CHANGED = dict(
    repetition_penalty=1.15,
    presence_penalty=0.4,
    frequency_penalty=0.6,
    logit_bias={3: 5.0, 11: 4.0},
    min_tokens=9,
    min_p=0.02,
    termination_id=11,
)
"""Logits are changed in all ways that look at a request's tokens."""


# Seeds -------------------------------------------------------------------------------------------


def test_equal_seeds_draw_equal_tokens_in_any_batch_cut_and_mode():
    prompt = random_tokens(60)
    params = sampled(12, seed=5, **CHANGED)
    alone = tiny_engine().generate([prompt], params)[0].token_ids
    others = [random_tokens(length, seed=length) for length in (5, 31)]
    for mode, max_tokens in (("memory_only", 512), ("restore", 7)):
        engine = tiny_engine(prefix_caching=mode, max_tokens=max_tokens)
        results = engine.generate([*others, prompt, prompt], params)
        assert [r.token_ids for r in results[2:]] == [alone, alone]


def test_a_prompt_of_one_token_is_a_step_of_its_own():
    """As a decode, whose sums do not depend on the prompts next to it."""
    engine = tiny_engine(tiny_model("M*"))
    for length in (9, 1, 30):
        engine.add_request(random_tokens(length, seed=length), greedy(1))
    engine.step()
    layout = engine.context.ragged_layout()
    assert layout.lengths == (1, 9, 30) and layout.num_steps == 1


def test_equal_seeds_draw_equal_tokens_across_preemption():
    prompts = [random_tokens(20, seed=seed) for seed in range(4)]
    params = sampled(40, seed=5, **{**CHANGED, "min_tokens": 40})
    alone = tiny_engine(prefix_caching="off")
    expected = [alone.generate([prompt], params)[0].token_ids for prompt in prompts]
    engine = small_pool_engine("restore")
    results = engine.generate(prompts, params)
    assert engine.stats()["preemptions"] > 0
    assert [r.token_ids for r in results] == expected


def test_samples_of_one_prompt_differ_and_repeat():
    prompt = random_tokens(20)
    runs = []
    for engine in (tiny_engine(), tiny_engine(max_requests=4, max_tokens=9)):
        samples = engine.generate([prompt], sampled(10, seed=3), RequestOptions(n=4))[0].samples
        runs.append([sample.token_ids for sample in samples])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4


def test_requests_without_seed_differ_and_repeat_with_the_engines():
    prompt = random_tokens(20)

    def run(**fields):
        results = tiny_engine(**fields).generate([prompt] * 3, sampled(10))
        return [result.token_ids for result in results]

    first = run()
    assert len({tuple(tokens) for tokens in first}) == 3
    assert run() == first
    assert run(random_seed=1) != first


def test_what_was_refused_changes_no_later_draw():
    def drawn(refused):
        engine = tiny_engine()
        for prompts in refused:
            with pytest.raises(ValueError, match=f"prompt {len(prompts) - 1}: .*empty"):
                engine.generate(prompts, sampled(10))
        return engine.generate([random_tokens(20)], sampled(10))[0].token_ids

    assert drawn([[random_tokens(20), random_tokens(9), []], [[]]]) == drawn([])


# Scores ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "max_tokens"),
    matrix_rows(itertools.product(MODES, (1, 7, 512)), ("restore", 7)),
)
def test_log_probs_are_those_of_a_full_forward_pass(mode, max_tokens):
    # With fewer slots than samples, some start from the cache later.
    engine = tiny_engine(prefix_caching=mode, max_tokens=max_tokens, max_requests=4)
    recorder = LogitsRecorder(engine)
    prompts = [random_tokens(30), [*random_tokens(30)[:25], 1, 2, 3], [7]]
    for skip in (True, False, True):
        params = sampled(4, seed=1, return_log_probs=True, skip_prompt_log_probs=skip)
        requests = [engine.add_request(prompt, params, RequestOptions(n=2)) for prompt in prompts]
        finish(engine, *requests)
        for request in requests:
            for sample in request.samples:
                check_scores(sample)
    recorder.check(MODEL)


def check_scores(request):
    check_log_probs(request, full_logits(MODEL, request.tokens[: request.num_tokens].tolist()))
    is_scored = not request.params.skip_prompt_log_probs
    assert (request.result().prompt_log_probs is not None) == is_scored


@pytest.mark.parametrize("max_tokens", [7, 512])
def test_top_n_log_probs_of_prompt_and_answer(max_tokens):
    prompt = random_tokens(30)
    params = greedy(5, return_log_probs=True, top_n_logprobs=3)
    result = tiny_engine(max_tokens=max_tokens).generate([prompt], params)[0]
    logits = full_logits(MODEL, prompt + result.token_ids).log_softmax(-1)
    assert len(result.prompt_top_n_logprobs) == len(prompt) - 1
    tops = [*result.prompt_top_n_logprobs, *result.top_n_logprobs]
    for row, best in zip(logits[:-1], tops, strict=True):
        expected = row.topk(3)
        assert list(best) == expected.indices.tolist()
        assert list(best.values()) == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert [max(best.values()) for best in result.top_n_logprobs] == result.log_probs


def test_processed_log_probs_are_of_the_tempered_and_truncated_distribution():
    prompt = random_tokens(30)
    params = SamplingParams(
        temperature=0.5, top_k=5, seed=1, num_tokens_to_generate=6, return_log_probs=True
    )
    engine = tiny_engine(logprobs_mode="processed_logprobs")
    result = engine.generate([prompt], params)[0]
    tokens = prompt + result.token_ids
    logits = (full_logits(MODEL, tokens).double() / 0.5)[:-1]
    best = logits.topk(5)
    kept = torch.full_like(logits, -torch.inf).scatter(1, best.indices, best.values)
    expected = kept.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert result.prompt_log_probs == pytest.approx(expected[: len(prompt) - 1], abs=1e-4)
    assert result.log_probs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-4)
    assert -torch.inf in result.prompt_log_probs and -torch.inf not in result.log_probs


def test_prompt_log_probs_need_every_forward_and_say_so():
    engine, prompt = tiny_engine(MODEL), random_tokens(100)
    engine.generate([prompt], greedy(1))
    before, params = engine.stats()["forward_tokens"], greedy(0, return_log_probs=True)
    explanation = engine.explain(prompt, params)
    result = engine.generate([prompt], params)[0]
    for match in (result.prefix, explanation.match):
        assert (match.shared_tokens, match.skipped_tokens) == (100, 0)
        assert match.miss_reason is explanation.reason is MissReason.PROMPT_LOG_PROBS
    assert str(explanation).endswith("log-probs of the prompt need every token")
    assert engine.stats()["forward_tokens"] - before == 100
    assert len(result.prompt_log_probs) == 99
    # Those of the answer alone cost nothing.
    params = greedy(2, return_log_probs=True, skip_prompt_log_probs=True)
    assert engine.generate([prompt], params)[0].prefix.skipped_tokens == 100


# What one may ask of a request -------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_zero_tokens_run_the_prompt_alone(mode):
    engine = tiny_engine(prefix_caching=mode)
    prompt = random_tokens(50)
    result = engine.generate([prompt], greedy(0), RequestOptions(n=2))[0]
    assert [sample.token_ids for sample in result.samples] == [[], []]
    assert result.finish_reason == "length"
    assert engine.stats()["forward_tokens"] == 50
    second = engine.generate([prompt], greedy(4))[0]
    assert second.prefix.skipped_tokens == (50 if mode == "restore" else 0)
    assert is_greedy(MODEL, prompt, second.token_ids)
    assert_idle(engine)


def test_requests_of_other_salts_do_not_wait_for_each_other():
    engine = tiny_engine()
    requests = [
        engine.add_request(random_tokens(90), greedy(2), RequestOptions(salt=salt))
        for salt in "xyx"
    ]
    engine.step()
    assert [request.num_computed for request in requests] == [90, 90, 0]
    finish(engine, *requests)
    assert [request.prefix.skipped_tokens for request in requests] == [0, 0, 90]


def test_arguments_for_each_prompt():
    engine = tiny_engine()
    prompts = [random_tokens(20, seed=seed) for seed in range(2)]
    results = engine.generate(
        prompts,
        [greedy(1), greedy(3)],
        [RequestOptions(salt="a"), RequestOptions(cache_breakpoints=[7], n=2, salt="b")],
    )
    assert [len(result.token_ids) for result in results] == [1, 3]
    assert [len(result.samples) for result in results] == [1, 2]
    follower = engine.generate([[*prompts[1][:7], 3]], greedy(1), RequestOptions(salt="b"))[0]
    assert follower.prefix.skipped_tokens == 7


def test_result_fields():
    engine = tiny_engine(tokenizer=ByteTokenizer())
    result = engine.generate(
        "a cab", sampled(5, seed=1, ignore_termination=True), RequestOptions(n=2)
    )[0]
    assert result.prompt_tokens == ByteTokenizer().tokenize("a cab")
    assert result.samples[0] is result
    assert result.samples[1].samples == [result.samples[1]]
    assert [sample.request_id for sample in result.samples] == [0, 1]
    for sample in result.samples:
        assert sample.text == ByteTokenizer().detokenize(sample.token_ids)
        assert sample.finish_reason == "length"
        assert 0 < sample.time_to_first_token <= sample.total_time
        assert sample.log_probs is sample.prompt_log_probs is sample.top_n_logprobs is None
        assert sample.prefix.prompt_tokens == len(result.prompt_tokens)
    assert result.samples[1].prefix.skipped_tokens == len(result.prompt_tokens)
    assert tiny_engine().generate([[1, 2]], greedy(2))[0].text is None


@pytest.mark.parametrize("stop_words", [(), ("zzz",)])
def test_a_tokenizer_that_fails_ends_only_the_answer_that_it_fails_at(stop_words):
    """A model's vocabulary is often padded beyond its tokenizer's."""
    prompts = [random_tokens(20, seed=seed) for seed in range(3)]
    answers = [greedy_tokens(MODEL, prompt, 6) for prompt in prompts]
    (bad, *_) = set(answers[1]) - set(answers[0]) - set(answers[2])

    class Failing(ByteTokenizer):
        def detokenize(self, ids):
            if bad in ids:
                raise IndexError(f"piece id {bad} is out of range")
            return super().detokenize(ids)

    engine = tiny_engine(MODEL, Failing())
    params = greedy(6, stop_words=stop_words)
    results = engine.generate(prompts, params)
    assert results[1].finish_reason == "error"
    assert results[1].error == f"IndexError: piece id {bad} is out of range"
    assert results[1].text is None
    reached = answers[1].index(bad) + 1 if stop_words else 6
    assert results[1].token_ids == answers[1][:reached]
    for index in (0, 2):
        assert results[index].token_ids == answers[index]
        assert (results[index].finish_reason, results[index].error) == ("length", None)
    assert engine.generate(prompts[:1], params)[0].prefix.skipped_tokens >= 16
    *_, last = engine.stream(prompts[1], params)
    assert (last.result.error, last.result.finish_reason) == (results[1].error, "error")
    assert last.result.token_ids == results[1].token_ids
    request = engine.add_request(prompts[1], greedy(40))
    while bad not in request.token_ids:
        engine.step()
    engine.cancel(request)
    assert (request.result().finish_reason, request.error) == ("cancelled", results[1].error)
    assert_idle(engine)


def test_a_handle_shows_the_answer_so_far():
    engine = tiny_engine()
    request = engine.add_request(random_tokens(20), greedy(6))
    assert (request.result().token_ids, request.result().finish_reason) == ([], "waiting")
    for _ in range(3):
        engine.step()
    partial = request.result()
    assert partial.finish_reason == "decode"
    assert partial.token_ids == greedy_tokens(MODEL, random_tokens(20), 3)
    assert partial.total_time is None


def test_an_idle_engine_does_nothing():
    engine = tiny_engine()
    assert engine.step() == []
    assert engine.generate([]) == []
    assert engine.stats()["steps"] == 0


@pytest.mark.parametrize("kv_cache_dtype", [torch.bfloat16, torch.float16])
def test_keys_and_values_in_fewer_bits(kv_cache_dtype):
    engine = tiny_engine(kv_cache_dtype=kv_cache_dtype)
    prompt = random_tokens(60)
    exact = full_logits(MODEL, prompt)[-1].log_softmax(-1)
    params = greedy(3, return_log_probs=True, skip_prompt_log_probs=True)
    results = [engine.generate([prompt], params)[0] for _ in range(2)]
    assert [result.prefix.skipped_tokens for result in results] == [0, 60]
    first = exact[results[0].token_ids[0]].item()
    assert first > exact.max() - 0.1
    assert results[0].log_probs[0] == pytest.approx(first, abs=0.1)
    # The last hidden state is kept as it is: the first token comes from what was computed.
    assert results[0].log_probs[0] == pytest.approx(results[1].log_probs[0], abs=1e-6)
    wide = tiny_engine(cache_bytes=engine.config.cache_bytes)
    assert engine.cache.spec.pair_bytes(0) * 2 == wide.cache.spec.pair_bytes(0)


def test_a_model_whose_parameters_were_cast_serves_repeated_prompts():
    model = tiny_model.__wrapped__(params_dtype=torch.bfloat16).float()  # one of its own
    engine, prompt = tiny_engine(model), random_tokens(50)
    first, again = (engine.generate([prompt], greedy(6))[0] for _ in range(2))
    assert again.prefix.skipped_tokens == 50
    assert first.token_ids == again.token_ids == greedy_tokens(model, prompt, 6)


@pytest.mark.parametrize("field", ["params_dtype", "recurrent_state_dtype"])
def test_a_model_or_its_states_in_bf16(field):
    model = tiny_model(**{field: torch.bfloat16})
    engine = tiny_engine(model)
    prompt = random_tokens(60)
    for skipped in (0, 60):
        result = engine.generate([prompt], greedy(1))[0]
        assert result.prefix.skipped_tokens == skipped
        logits = full_logits(model, prompt)[-1].float()
        assert logits[result.token_ids[0]] > logits.max() - 0.1


# Cancel ------------------------------------------------------------------------------------------


STAGES = [*((1, step) for step in range(0, 12, 2)), *((3, step) for step in range(3, 12, 2))]


@pytest.mark.parametrize(
    ("mode", "n", "steps"),
    matrix_rows(
        [(mode, *stage) for mode in MODES for stage in STAGES],
        *(("restore", *stage) for stage in STAGES[::2]),
        ("off", 1, 4),
        ("memory_only", 3, 7),
    ),
)
def test_cancel_at_every_stage(mode, n, steps):
    engine = tiny_engine(prefix_caching=mode, max_tokens=16, max_requests=4)
    kept = engine.add_request(random_tokens(30, seed=1), greedy(8))
    request = engine.add_request(random_tokens(60), greedy(4), RequestOptions(n=n))
    for _ in range(steps):
        engine.step()
    answered = [sample.done for sample in request.samples]
    engine.cancel(request)
    engine.check_integrity()
    for sample, done in zip(request.samples, answered):
        assert sample.closed
        assert sample.finish_reason == ("length" if done else "cancelled")
        result = sample.result()
        assert result.prefix.prompt_tokens == 60
        assert is_greedy(MODEL, result.prompt_tokens, result.token_ids)
    engine.cancel(request)  # once more changes nothing
    finish(engine, kept)
    assert is_greedy(MODEL, random_tokens(30, seed=1), kept.token_ids)
    assert_idle(engine)
    again = engine.generate([random_tokens(60)], greedy(4))[0]
    assert is_greedy(MODEL, random_tokens(60), again.token_ids)


def test_another_engines_request_cannot_be_cancelled():
    one, other = tiny_engine(MODEL), tiny_engine(MODEL)
    request = one.add_request(random_tokens(40), greedy(6))
    mine = other.add_request(random_tokens(40, seed=1), greedy(6))
    one.step()
    other.step()
    with pytest.raises(ValueError, match="added to another engine"):
        other.cancel(request)
    for engine, kept in ((one, request), (other, mine)):
        finish(engine, kept)
        assert kept.result().finish_reason == "length"


def test_cancel_while_waiting_for_a_running_prefill():
    engine = tiny_engine(max_tokens=16)
    first = engine.add_request(random_tokens(100), greedy(2))
    second = engine.add_request(random_tokens(100), greedy(2))
    third = engine.add_request(random_tokens(100), greedy(2))
    for _ in range(2):
        engine.step()
    assert second.waits_for is not None
    engine.cancel(second)
    engine.cancel(first)  # the third waits for nobody any more
    finish(engine, third)
    assert is_greedy(MODEL, random_tokens(100), third.token_ids)
    # What the first had computed is there, with the state that it stopped at.
    assert (third.prefix.shared_tokens, third.prefix.skipped_tokens) == (32, 32)
    assert_idle(engine)


@pytest.mark.parametrize("answered", [1, 5])
def test_the_next_turn_resumes_where_an_answer_was_cancelled(answered):
    engine = tiny_engine()
    request = engine.add_request(random_tokens(40), greedy(30))
    while len(request.token_ids) < answered:
        engine.step()
    engine.cancel(request)
    next_turn = random_tokens(40) + request.token_ids + [7, 8, 9]
    later = engine.add_request(next_turn, greedy(4))
    finish(engine, later)
    # The last token was drawn and not computed: the state lies before it.
    assert later.prefix.skipped_tokens == 40 + answered - 1
    assert is_greedy(MODEL, next_turn, later.token_ids)
    assert_idle(engine)


def test_parked_bytes_of_a_failed_step_go_when_the_request_starts_again():
    engine = small_pool_engine("restore")
    requests = [engine.add_request(random_tokens(20, seed=s), greedy(40)) for s in range(4)]
    forward = engine.runner.forward

    def failing(plan):
        if plan.parks:
            engine.runner.forward = forward
            raise InjectedError
        return forward(plan)

    engine.runner.forward = failing
    with pytest.raises(InjectedError):
        finish(engine)
    assert engine.stats()["parked_bytes"] > 0
    assert not any(request.parked_tokens for request in requests)
    finish(engine, *requests)
    for request, seed in zip(requests, range(4)):
        assert is_greedy(MODEL, random_tokens(20, seed=seed), request.token_ids)
    assert_idle(engine)


def test_cancel_a_preempted_request():
    engine = small_pool_engine("restore")
    requests = [engine.add_request(random_tokens(20, seed=s), greedy(40)) for s in range(4)]
    while not any(request.parked_tokens for request in requests):
        engine.step()
    parked = next(request for request in requests if request.parked_tokens)
    assert engine.stats()["parked_bytes"] > 0
    engine.cancel(parked)
    assert engine.stats()["parked_bytes"] == 0
    finish(engine, *requests)
    for request in requests:
        check_answer(MODEL, request)
    assert_idle(engine)


# Preemption --------------------------------------------------------------------------------------


def small_pool_engine(mode, model=None, blocks=5, **fields):
    """A pool in which one request of 60 tokens fits, and not two; or of so many blocks."""
    spec = tiny_engine(model, prefix_caching=mode).cache.spec
    pages = 2 + blocks * sum(spec.pages_per_block) + 4
    return tiny_engine(
        model, prefix_caching=mode, cache_bytes=pages * spec.page_bytes, max_tokens=32, **fields
    )


@pytest.mark.parametrize(
    ("pattern", "mode"),
    matrix_rows(
        [*(("MG*-W-", mode) for mode in MODES), *((p, "restore") for p in ("*-", "M*", "*W", "W"))],
        ("MG*-W-", "memory_only"),
        ("MG*-W-", "restore"),
        ("W", "restore"),
    ),
)
def test_a_preempted_request_goes_on_where_it_stopped(mode, pattern):
    model = tiny_model(pattern)
    engine = small_pool_engine(mode, model)
    recorder = LogitsRecorder(engine)
    prompts = [random_tokens(20, seed=seed) for seed in range(4)]
    requests = [engine.add_request(prompt, greedy(40)) for prompt in prompts]
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        poison(engine)
    recorder.check(model)
    stats = engine.stats()
    assert stats["preemptions"] > 0
    for request in requests:
        check_answer(model, request)
        assert request.prefix.prompt_tokens == 20
    # Every prompt token once, every answer token but its last once; the last one where its state
    # is kept and there is room for that.
    exact = 4 * 20 + 4 * 39
    assert exact <= stats["forward_tokens"] <= exact + (4 if mode == "restore" else 0)
    ends = [request.finished_at for request in requests]
    assert ends == sorted(ends)  # first come, first served
    assert_idle(engine)


def test_an_answered_request_that_only_wants_its_state_kept_gives_way_first():
    model = tiny_model("*-")
    page = tiny_engine(model).cache.spec.page_bytes
    engine = tiny_engine(model, cache_bytes=4 * page)  # the null page and 3 blocks
    first = engine.add_request(random_tokens(15), greedy(20))
    second = engine.add_request(random_tokens(30, seed=1), greedy(2))
    for _ in range(2):
        engine.step()
    assert second.done and second.status is RequestStatus.CLOSING
    engine.step()  # the first one's second block takes its place
    assert second.closed
    finish(engine, first)
    assert engine.stats()["preemptions"] == 0
    for request in (first, second):
        check_answer(model, request)


# A forward that fails ----------------------------------------------------------------------------


@pytest.mark.parametrize("max_requests", [4, 8])
def test_samples_are_counted_whether_they_fork_or_wait(max_requests):
    engine = tiny_engine(max_requests=max_requests)
    results = engine.generate(
        [random_tokens(40), random_tokens(60, seed=1)], greedy(4), RequestOptions(n=4)
    )
    reports = [sample.prefix for result in results for sample in result.samples]
    stats = engine.stats()
    assert stats["requests"] == len(reports) == 8
    for name in ("prompt_tokens", "shared_tokens", "skipped_tokens"):
        assert stats[name] == sum(getattr(report, name) for report in reports)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_request_that_comes_again_is_counted_once(steps):
    engine = tiny_engine(max_tokens=24)
    engine.generate([random_tokens(40)], greedy(2))
    before = engine.stats()
    request = engine.add_request([*random_tokens(40)[:30], *random_tokens(30, seed=1)], greedy(6))
    for _ in range(steps):
        engine.step()
    with failing_forward(engine), pytest.raises(InjectedError):
        engine.step()
    finish(engine, request)
    more = {name: count - before[name] for name, count in engine.stats().items()}
    assert more["requests"] == 1
    assert more["prompt_tokens"] == 60
    assert more["skipped_tokens"] == request.prefix.skipped_tokens
    lost = sum(more[f"lost_tokens_{reason.value}"] for reason in MissReason)
    assert lost <= 40 - request.prefix.skipped_tokens


FAILING = {
    "forward": (ModelRunner, 40),
    "load_checkpoint": (CachePool, 40),
    "save_checkpoint": (CachePool, 40),
    "copy_pages": (CachePool, 40),
    "copy_slot": (CachePool, 40),
    "park": (CachePool, 6),
    "unpark": (CachePool, 6),
    "captured_states": (DynamicInferenceContext, 40),
    "append": (OutputProcessor, 40),
    "score": (ModelRunner, 40),
    "finish": (OutputProcessor, 40),
}
"""What fails, of which class, and the blocks of a pool in which it is called."""


@pytest.mark.parametrize("call", matrix_rows(range(2), 0))
@pytest.mark.parametrize("name", FAILING)
def test_a_step_that_fails_anywhere_loses_nothing(name, call, monkeypatch):
    """No memory for a state that is restored, saved, copied or parked; an error while filing or
    sampling: before it does what it should, or after."""
    owner, blocks = FAILING[name]
    engine = small_pool_engine("restore", blocks=blocks, max_requests=8)
    recorder = LogitsRecorder(engine)
    engine.generate([random_tokens(40)], greedy(2))
    requests = [
        engine.add_request(random_tokens(40), greedy(4)),
        engine.add_request(
            random_tokens(50, seed=1), greedy(30, return_log_probs=True), RequestOptions(n=3)
        ),
        engine.add_request([*random_tokens(50, seed=1)[:30], 3, 4], greedy(30)),
        engine.add_request([*random_tokens(40), 7, 8], greedy(30)),
        engine.add_request(
            random_tokens(30, seed=2),
            greedy(20, return_log_probs=True, skip_prompt_log_probs=False),
        ),
    ]
    calls, does = itertools.count(), getattr(owner, name)

    def failing(*arguments, **named):
        number = next(calls)
        result = does(*arguments, **named) if number % 2 else None
        if number == call:
            raise InjectedError
        return result if number % 2 else does(*arguments, **named)

    monkeypatch.setattr(owner, name, failing)
    failures, results = 0, []
    for _ in range(300):
        if not engine.has_work:
            break
        try:
            results += [output.result for output in engine.step() if output.result]
        except InjectedError:
            failures += 1
        engine.check_integrity()
        poison(engine)
    assert failures == 1
    recorder.check(MODEL)
    samples = [sample for request in requests for sample in request.samples]
    assert sorted(r.request_id for r in results) == sorted(s.request_id for s in samples)
    for request in requests:
        for sample in request.samples:
            assert sample.finished_at is not None
            assert sample.finish_reason == "length"
            check_answer(MODEL, sample)
    assert_idle(engine)


def test_the_cache_can_be_cleared_while_an_answered_request_runs_on():
    engine = tiny_engine()
    request = engine.add_request(random_tokens(40), greedy(3))
    while not request.done:
        engine.step()
    assert request.status is RequestStatus.CLOSING
    other = engine.add_request(random_tokens(9), greedy(3))
    with pytest.raises(RuntimeError, match="0 requests run and 1 wait"):
        engine.clear_cache()
    assert request.status is RequestStatus.CLOSING  # nothing has changed
    engine.cancel(other)
    engine.clear_cache()
    assert request.closed and engine.stats()["known_tokens"] == 0
    finish(engine, request)
    assert_idle(engine)


def test_samples_that_find_no_slot_wait_in_order_before_the_others():
    engine = tiny_engine(max_requests=4)
    others = [engine.add_request(random_tokens(30, seed=s), greedy(9)) for s in range(3)]
    request = engine.add_request(random_tokens(20, seed=8), greedy(9), RequestOptions(n=4))
    last = engine.add_request(random_tokens(20, seed=9), greedy(9))
    engine.step()
    assert list(engine.scheduler.waiting) == [*request.samples[1:], last]
    finish(engine, *others, *request.samples, last)


# Size --------------------------------------------------------------------------------------------


def test_requests_up_to_the_very_limits():
    engine = tiny_engine(max_sequence_length=64, max_tokens=512, max_requests=8)
    prompts = [random_tokens(length, seed=length) for length in (1, 63, 64, 32)]
    counts = (63, 1, 0, 32)
    results = engine.generate(prompts, [greedy(count) for count in counts])
    for prompt, count, result in zip(prompts, counts, results):
        assert len(result.token_ids) == count
        assert is_greedy(MODEL, prompt, result.token_ids)
    with pytest.raises(ValueError, match="65 tokens, max_sequence_length is 64"):
        engine.generate([random_tokens(65)], greedy(0))


def test_a_model_in_training_mode_is_not_asked():
    model = tiny_model.__wrapped__("MG*-", hidden_dropout=0.5)
    engine, prompt = tiny_engine(model), random_tokens(40)
    request = engine.add_request(prompt, greedy(4))
    model.train()
    digest = engine.cache.digest()
    with pytest.raises(RuntimeError, match=r"training mode.*model\.eval\(\)"):
        engine.step()
    assert engine.cache.digest() == digest
    model.eval()
    finish(engine, request)
    assert request.token_ids == greedy_tokens(model, prompt, 4)


def test_explain_tells_what_is_known_and_changes_nothing():
    engine = tiny_engine(MODEL)
    prompt = random_tokens(100)
    engine.generate([prompt], greedy(3))
    before = engine.stats(), engine.cache.digest()
    explanation = engine.explain([*prompt, 1, 2])
    assert explanation.match.skipped_tokens == 100
    assert "100 of 102 prompt tokens are skipped" in str(explanation)
    assert engine.explain(prompt, salt="another").match.skipped_tokens == 0
    assert (engine.stats(), engine.cache.digest()) == before
    with pytest.raises(ValueError, match=r"outside of the vocabulary"):
        engine.explain([10**9])
    with pytest.raises(TypeError, match="params must be SamplingParams, got str"):
        engine.explain(prompt, "a salt")


def test_a_decode_step_makes_as_many_calls_for_each_of_many_requests():
    """Of Python functions and of what they iterate over: nothing looks at all requests for each."""

    def calls_per_request(count: int) -> float:
        engine = tiny_engine(tiny_model("-"), max_requests=count, max_tokens=16 * count)
        for seed in range(count):
            engine.add_request(random_tokens(5, seed=seed), greedy(8))
        for _ in range(3):
            engine.step()
        assert len(engine.scheduler.running) == count
        profile = cProfile.Profile()
        profile.runcall(engine.step)
        return sum(entry.callcount for entry in profile.getstats()) / count

    assert calls_per_request(256) < 1.1 * calls_per_request(32)
