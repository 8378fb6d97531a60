"""Steps that are launched before the tokens before them are known change nothing but the order
of the host's work."""

from collections import Counter
from unittest.mock import Mock

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from differential import InjectedError, failing_at_first
from extreme_sampling import is_alike
from reference import finish, greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.worker import model_runner
from megatron_hybrid.text.guide import Guide

KINDS = (
    {"top_k": 1},
    {"seed": 3, "return_log_probs": True, "top_n_logprobs": 2},
    {"seed": 5, "top_p": 0.95, "temperature": 0.2},
    {"seed": 1, "stop_token_ids": (5, 7, 9, 11, 13, 15), "num_tokens_to_generate": 40},
    {"seed": 1, "stop_token_ids": (5, 7, 9), "detokenize_stop_sequence": True},
    {"seed": 2, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 4},
    {"seed": 4, "bad_words_ids": ((8,), (4, 5)), "num_tokens_to_generate": 9},
    {"seed": 9, "stop_words": [*"abcdefghijklmnop"], "num_tokens_to_generate": 30},
    {"seed": 6, "num_tokens_to_generate": 0},
    {"seed": 7, "num_tokens_to_generate": 1},
    {"seed": 8},  # guided
)
PARAMS = [SamplingParams(**{"num_tokens_to_generate": 14, **kind}) for kind in KINDS]
PROMPTS = [
    random_tokens(length, seed=length) for length in (5, 33, 60, 17, 9, 48, 1, 20, 31, 12, 25)
]


def told(result) -> tuple:
    return (
        *(result.token_ids, result.text, result.log_probs, result.top_n_logprobs),
        *(result.finish_reason, result.stop_reason, result.prefix.skipped_tokens),
        [told(other) for other in result.other_samples],
    )


@pytest.mark.parametrize("pattern", ["MG*-W-", "KSUE"])
@pytest.mark.parametrize("mode", ["restore", "memory_only", "off"])
def test_answers_and_hits_are_the_same(monkeypatch, pattern, mode):
    """Stops, lengths, penalties, guides, log-probs, samples, tokens that are drawn again."""
    monkeypatch.setattr(model_runner, "NUM_CANDIDATES", 16)
    model, answers, ahead = tiny_model(pattern, vocab_size=300), [], 0
    for is_ahead in (False, True):
        engine = tiny_engine(
            model, byte_tokenizer(300), prefix_caching=mode, async_scheduling=is_ahead
        )
        answers.append([])
        prompts, options = PROMPTS, [RequestOptions(n=1 + 2 * (i == 1)) for i in range(11)]
        options[-1] = RequestOptions(guide=Guide.regex("[a-e]{3,9}f"))
        for _ in range(3):
            results = engine.generate(prompts, PARAMS, options)
            answers[-1] += map(told, results)
            prompts = [[*r.prompt_tokens, *r.token_ids, 3, 4] for r in results]
            engine.check_integrity()
        ahead = engine.stats()["steps_ahead"]
    for found, expected in zip(*answers, strict=True):
        assert is_alike(found, expected)
    assert ahead > 25


def test_the_next_step_is_launched_before_the_tokens_are_read(monkeypatch):
    engine, events = tiny_engine(tiny_model("M*"), async_scheduling=True), []
    runner = engine.runner
    for name in ("launch", "launch_ahead", "collect"):
        method = getattr(runner, name)

        def noted(*args, name=name, method=method):
            events.append(name)
            return method(*args)

        monkeypatch.setattr(runner, name, noted)
    engine.generate(random_tokens(9), greedy(6))
    assert events[:7] == ["launch", *["launch_ahead", "collect"] * 3]


def test_prompts_and_new_requests_wait_for_no_tokens():
    """Parts of long prompts, their first tokens, hits, and requests that come while others run."""
    engine = tiny_engine(tiny_model("MG*-"), async_scheduling=True, max_tokens=16, max_requests=4)
    requests, prompt = [], random_tokens(70)
    for number in range(60):
        if number % 5 == 0:
            own = [*prompt[: number + 10], *random_tokens(6, seed=number)]
            requests.append(engine.add_request(own, greedy(8)))
        engine.step()
    stats = engine.stats()
    assert stats["steps_ahead"] == stats["steps"] - 1  # all but the first
    assert sum(request.prefix.skipped_tokens > 0 for request in requests if request.done) > 5
    finish(engine)
    expected = tiny_engine(tiny_model("MG*-"), max_tokens=16).generate(
        [request.tokens[: request.num_prompt_tokens].tolist() for request in requests], greedy(8)
    )
    assert [r.token_ids for r in requests] == [r.token_ids for r in expected]


def test_a_row_without_finite_logits_ends_its_request_alone():
    model = tiny_model.__wrapped__("M*")
    with torch.no_grad():
        model.embedding.word_embeddings.weight[90:] = torch.nan
    plain, ahead = tiny_engine(model), tiny_engine(model, async_scheduling=True)
    draws = [SamplingParams(seed=i, temperature=3.0, num_tokens_to_generate=40) for i in range(6)]
    prompts = [random_tokens(7, seed=i) for i in range(6)]
    prompts = [[token % 50 for token in prompt] for prompt in prompts]
    found, expected = (engine.generate(prompts, draws) for engine in (ahead, plain))
    assert [(r.token_ids, r.error) for r in found] == [(r.token_ids, r.error) for r in expected]
    ends = Counter(result.finish_reason for result in found)
    assert ends["error"] and ahead.stats()["steps_ahead"] > 5


@pytest.mark.parametrize("call", ["cancel", "suspend", "update", "unsaid", "clear", "save"])
def test_calls_between_steps_see_all_tokens(call, tmp_path):
    """What was launched ahead is in the answers before a call changes what it read."""
    model = tiny_model.__wrapped__("MG*-")
    expected = [r.token_ids for r in tiny_engine(model).generate(PROMPTS[:3], greedy(20))]
    engine = tiny_engine(model, async_scheduling=True)
    requests = [engine.add_request(prompt, greedy(20)) for prompt in PROMPTS[:3]]
    for _ in range(8):
        engine.step()
    before = requests[0].num_generated
    if call == "cancel":
        engine.cancel(requests[2])
        assert requests[2].result().token_ids == expected[2][: before + 1]
    elif call == "suspend":
        engine.suspend(keep_cache="host")
        engine.resume()
    elif call == "update":
        engine.update_weights()
    elif call == "unsaid":
        with torch.no_grad():
            model.embedding.word_embeddings.weight.mul_(1.0)
        engine.step()
    elif call == "save":
        engine.save_cache(tmp_path / "cache")
    else:
        with pytest.raises(RuntimeError, match="3 requests run"):
            engine.clear_cache()
    assert requests[0].num_generated == before + 1 + (call == "unsaid")
    finish(engine)
    for request, tokens in zip(requests[: 2 + (call != "cancel")], expected):
        assert request.result().token_ids == tokens
    assert engine.stats()["steps_ahead"] > 12
    engine.check_integrity()


@pytest.mark.parametrize(("num_candidates", "least"), [(4, 39), (68, 30)])
def test_tokens_that_are_drawn_again_hold_nobody_back(monkeypatch, num_candidates, least):
    """A request without a row in a step has one in the next, though others go on; where all steps
    draw again, none is launched ahead."""
    monkeypatch.setattr(model_runner, "NUM_CANDIDATES", num_candidates)
    engine = tiny_engine(tiny_model("M*"), async_scheduling=True)
    other = engine.add_request(random_tokens(9), greedy(60))
    wide = SamplingParams(seed=3, top_p=0.9, num_tokens_to_generate=60)
    request = engine.add_request(random_tokens(8, seed=1), wide)
    for _ in range(40):
        engine.step()
    assert request.num_generated >= least and other.num_generated == 40
    assert (engine.stats()["steps_ahead"] > 5) == (num_candidates == 68)


def test_a_request_beyond_the_budget_takes_the_room_of_one_that_ends():
    engine = tiny_engine(tiny_model("M*"), async_scheduling=True, max_tokens=2)
    lengths = (6, 60, 20)
    requests = [engine.add_request([i], greedy(n)) for i, n in enumerate(lengths)]
    for _ in range(14):
        engine.step()
    assert [request.num_generated for request in requests] == [6, 14, 7]


@pytest.mark.parametrize("way", ["cancel", "drop", "interrupt", "clear", "close"])
def test_a_launched_step_that_fails_stops_no_call(way, monkeypatch):
    engine = tiny_engine(tiny_model("M*"), async_scheduling=True)
    stream = engine.stream(random_tokens(9), greedy(30))
    other = engine.add_request(random_tokens(8), greedy(30))
    for _ in range(6):
        next(stream)
    request, runner = other, engine.runner
    monkeypatch.setattr(runner, "collect", failing_at_first(runner.collect, InjectedError()))
    if way == "cancel":
        engine.cancel(request)
    elif way == "drop":
        request = stream.request
        del stream
        with pytest.raises(InjectedError):
            engine.step()
    elif way == "close":
        engine.close()
    elif way == "clear":
        with pytest.raises(RuntimeError, match="2 wait"):
            engine.clear_cache()
    else:
        monkeypatch.setattr(engine, "step", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(random_tokens(7), greedy(30))
        monkeypatch.undo()
    while engine.has_work:
        engine.step()
    assert request.finish_reason == ("length" if way in ("interrupt", "clear") else "cancelled")
    engine.check_integrity()


@pytest.mark.parametrize("num_tokens", [7, 30])
def test_requests_that_are_ended_have_all_outputs_in_order(num_tokens):
    """Also those of the step that was launched ahead, which may have been their last."""
    engine = tiny_engine(tiny_model("M*"), async_scheduling=True)
    request = engine.add_request(random_tokens(9), greedy(num_tokens))
    outputs = [output for _ in range(6) for output in engine.step()]
    outputs += engine.live.end([request])
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == request.token_ids == outputs[-1].result.token_ids and len(tokens) == 7
    assert sum(output.result is not None for output in outputs) == 1
    assert request.finish_reason == ("length" if num_tokens == 7 else "cancelled")
