"""Guided answers: what a guide allows, token by token, whatever cache, batch, preemption and failed
steps do."""

import asyncio
import gc
import pickle
import re
import threading
from functools import partial

import pytest
from differential import InjectedError, failing_forward
from matrix import matrix_rows
from reference import finish, full_logits, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.async_engine import AsyncEngine
from megatron_hybrid.inference.requests.builder import RequestBuilder
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.text.guide import Guide

WORDS = (b"ab", b'{"', b'":', b"yes", b"no ", b"\xc3\xa9t", b"12", b", ")
PIECES = [*(bytes([byte]) for byte in range(256)), b"", *WORDS]
VOCAB_SIZE = 272  # padded
MODEL = tiny_model("M*-", vocab_size=VOCAB_SIZE)
PROMPT = random_tokens(20)
WORD = Guide.regex("([a-c]{2}|été|yes|no )( [0-9]{1,3}){2,4}")


class Tokenizer:
    """Bytes, some words, and ids without a text."""

    eod = 256
    token_bytes = PIECES

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, ids) -> str:
        return b"".join(PIECES[i] for i in ids).decode("utf-8", errors="replace")


def engine_of(**fields):
    return tiny_engine(MODEL, Tokenizer(), **fields)


def sampled(**fields) -> SamplingParams:
    return SamplingParams(**{"num_tokens_to_generate": 60, "seed": 3, **fields})


def of_regexes(*patterns: str) -> list[RequestOptions]:
    return [RequestOptions(guide=Guide.regex(pattern)) for pattern in patterns]


def test_greedy_is_the_argmax_of_the_tokens_that_are_allowed():
    texts = [b"yes sir", b"yesterday", b"nothing", b"no 12, 12", b"abab", b"aab"]
    guide = Guide.choices([text.decode() for text in texts])
    for seed in range(6):
        prompt = random_tokens(12, seed=seed)
        expected, answer = [], b""
        while True:
            row = full_logits(MODEL, [*prompt, *expected])[-1]
            allowed = [
                token
                for token, piece in enumerate(PIECES)
                if piece and any(text.startswith(answer + piece) for text in texts)
            ]
            if not allowed:
                break
            expected.append(max(allowed, key=lambda token: row[token].item()))
            answer += PIECES[expected[-1]]
        (result,) = engine_of().generate([prompt], sampled(top_k=1), RequestOptions(guide=guide))
        assert result.token_ids == expected and result.finish_reason == "stop"
        assert result.text.encode() == answer


@pytest.mark.parametrize(
    "pattern", [r"[a-f]{3}\d", r"(yes|no ){1,3}!?", r"\w{2,4}(, \w{2}){0,2}", r"(.|\n){5}é"]
)
def test_answers_match_a_regex(pattern):
    engine = engine_of()
    prompts = [random_tokens(9, seed=seed) for seed in range(4)]
    results = engine.generate(prompts, sampled(), RequestOptions(guide=Guide.regex(pattern)))
    for result in results:
        assert result.finish_reason == "stop"
        assert re.fullmatch(pattern, result.text, re.DOTALL | re.ASCII)
    assert len({result.text for result in results}) > 1


def test_without_a_stop_token_the_last_token_of_the_vocabulary_is_not_drawn():
    model = tiny_model("M*-", vocab_size=288)  # its last id is the last bit of the last word
    params = sampled(termination_id=-1, num_tokens_to_generate=20)
    results = tiny_engine(model, Tokenizer()).generate(
        [PROMPT] * 4, params, RequestOptions(guide=Guide.regex("e+"))
    )
    assert {result.finish_reason for result in results} == {"length"}
    assert {token for result in results for token in result.token_ids} == {ord("e")}


def test_a_cut_answer_is_the_beginning_of_an_allowed_one():
    (result,) = engine_of().generate(
        [PROMPT], sampled(num_tokens_to_generate=3), RequestOptions(guide=WORD)
    )
    assert result.finish_reason == "length"
    (whole,) = engine_of().generate([PROMPT], sampled(), RequestOptions(guide=WORD))
    assert whole.token_ids[:3] == result.token_ids


# What must not change an answer ------------------------------------------------------------------


def answers_of(result) -> list[list[int]]:
    return [sample.token_ids for sample in result.samples]


@pytest.fixture(scope="module")
def expected():
    """Three samples, each alone and without a cache."""
    engine = engine_of(prefix_caching="off")
    samples = answers_of(engine.generate([PROMPT], sampled(), RequestOptions(guide=WORD, n=3))[0])
    assert len(set(map(tuple, samples))) == 3
    return samples


@pytest.mark.parametrize("mode", matrix_rows(["off", "memory_only", "restore"], "restore"))
def test_answers_are_the_same_in_chunks_from_the_cache_and_in_a_crowd(mode, expected):
    engine = engine_of(prefix_caching=mode, max_tokens=7)
    others = [random_tokens(length, seed=length) for length in (5, 31)]
    for _ in range(2):  # in the second round from the cache
        results = engine.generate(
            [*others, PROMPT],
            sampled(),
            [None, RequestOptions(guide=Guide.regex("[a-z]*")), RequestOptions(guide=WORD, n=3)],
        )
        assert answers_of(results[2]) == expected
    if mode == "restore":
        assert results[2].prefix.skipped_tokens >= len(PROMPT) - 1


def test_answers_are_the_same_after_failed_steps_and_new_weights(expected):
    engine = engine_of()
    request = engine.add_request(PROMPT, sampled(), RequestOptions(guide=WORD, n=3))
    for count in range(200):
        if request.closed and all(sample.closed for sample in request.samples):
            break
        if count % 3 == 2:
            with failing_forward(engine), pytest.raises(InjectedError):
                engine.step()
        if count == 4:
            engine.update_weights()
        engine.step()
    assert [sample.token_ids for sample in request.samples] == expected


def test_another_process_makes_the_same_answers_of_the_spec(expected):
    first, other = engine_of(), engine_of()
    samples = first.request_builder.build(PROMPT, sampled(), RequestOptions(n=3, guide=WORD))
    spec = pickle.loads(pickle.dumps(samples[0].spec))
    request, *_ = other.request_builder.make(spec)
    other.scheduler.add(request)
    finish(other)
    assert [sample.token_ids for sample in request.samples] == expected


# Ends --------------------------------------------------------------------------------------------


def test_a_stop_token_ends_an_answer_only_where_the_guide_may_end():
    engine = engine_of()
    likely = sampled(logit_bias={256: 100}, top_k=1)
    (result,) = engine.generate([PROMPT], likely, RequestOptions(guide=Guide.regex("a{3}b*")))
    assert (result.text, result.finish_reason) == ("aaa", "stop")
    (result,) = engine.generate([PROMPT], likely, RequestOptions(guide=Guide.regex("(yes)?"), n=1))
    assert (result.text, result.finish_reason) == ("", "stop")
    params = sampled(logit_bias={256: 100}, top_k=1, ignore_termination=True)
    (result,) = engine.generate([PROMPT], params, RequestOptions(guide=Guide.regex("a{3}b?")))
    assert (result.text, result.finish_reason) == ("aaab", "stop")


@pytest.mark.parametrize("min_tokens", [0, 9])
def test_a_stop_token_that_the_guide_needs_is_text_until_the_answer_may_end(min_tokens):
    b, c = ord("b"), ord("c")
    params = sampled(stop_token_ids=[b, c], logit_bias={b: 100, c: 90}, min_tokens=min_tokens)
    results = engine_of().generate([PROMPT] * 3, params, of_regexes("[0-9]bc", "[bd]{2}x", "bcb*"))
    digit, other, open_end = [result.text for result in results]
    assert re.fullmatch("[0-9]bc", digit) and other == "ddx"
    assert re.fullmatch("bcb*", open_end)
    assert {result.finish_reason for result in results} == {"stop"}


def test_min_tokens_hold_until_the_guide_is_over():
    params = sampled(logit_bias={256: 100}, min_tokens=5)
    results = engine_of().generate([PROMPT] * 3, params, of_regexes("a{2}b*", "a{2}", ""))
    assert [len(result.token_ids) for result in results] == [5, 2, 0]
    assert {result.finish_reason for result in results} == {"stop"}


def test_an_answer_that_the_tokenizer_cannot_go_on_with_ends_with_an_error():
    tokenizer = Tokenizer()
    tokenizer.token_bytes = [b"a", b"b"]
    engine = tiny_engine(MODEL, tokenizer)
    stuck, other = engine.generate([PROMPT] * 2, sampled(), of_regexes("aé", "ab"))
    assert stuck.finish_reason == "error" and "relax it" in stuck.error
    assert other.token_ids == [0, 1]


# The door ----------------------------------------------------------------------------------------


def test_a_bad_guide_changes_nothing():
    engine = engine_of()
    with pytest.raises(ValueError, match="regex cannot be used"):
        engine.add_request(PROMPT, options=RequestOptions(guide=Guide.regex("(a")))
    assert engine.request_builder.next_id == 0 and not engine.has_work
    with pytest.raises(TypeError, match="needs a tokenizer with token_bytes, and NoneType has"):
        tiny_engine(MODEL).add_request(PROMPT, options=RequestOptions(guide=WORD))


async def test_an_async_engine_compiles_off_its_thread(monkeypatch, expected):
    threads, check = [], RequestBuilder.check_guide

    def checked(self, guide):
        threads.append(threading.current_thread().name)
        check(self, guide)

    monkeypatch.setattr(RequestBuilder, "check_guide", checked)
    async with AsyncEngine(MODEL, Tokenizer(), engine_of().config) as engine:
        generate = partial(engine.generate, PROMPT, sampled())
        results = await asyncio.gather(generate(RequestOptions(guide=WORD, n=3)), generate())
        stream = engine.stream(PROMPT, sampled(), RequestOptions(guide=WORD))
        streamed = [token async for output in stream for token in output.token_ids]
        with pytest.raises(ValueError, match="cannot be used"):
            await generate(RequestOptions(guide=Guide.regex("(a")))
        with pytest.raises(ValueError, match="cannot be used"):
            await anext(engine.stream(PROMPT, options=RequestOptions(guide=Guide.regex("(a"))))
    assert answers_of(results[0]) == expected and streamed == expected[0]
    assert any("async-engine" not in name for name in threads)


async def test_a_stream_with_a_bad_guide_that_nobody_reads_logs_nothing():
    logged, loop = [], asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: logged.append(context["message"]))
    async with AsyncEngine(MODEL, Tokenizer(), engine_of().config) as engine:
        stream = engine.stream(PROMPT, options=RequestOptions(guide=Guide.regex("(")))
        for read in (stream.queued, partial(anext, stream)):
            with pytest.raises(ValueError, match="the guide's regex cannot be used"):
                await read()
        unread = engine.stream(PROMPT, options=RequestOptions(guide=Guide.regex("(a")))
        while not unread._added.done():
            await asyncio.sleep(0.01)
        del unread, stream, read
        gc.collect()
        await asyncio.sleep(0.01)
    assert logged == []
