"""Bad input gets one clear error at the door, changes nothing and stops nobody."""

import re
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from reference import VOCAB_SIZE, finish, greedy, is_greedy, random_tokens, tiny_engine, tiny_model
from scripted import ByteTokenizer

from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams

MODEL = tiny_model()
PROMPT = random_tokens(20)


def with_options(**fields) -> dict:
    return dict(options=RequestOptions(**fields))


BAD_PROMPTS = [
    ([], ValueError, "prompt is empty.*at least one token"),
    (None, TypeError, "str or a sequence of token ids.*NoneType"),
    ("hello", TypeError, "needs a tokenizer.*pass ids"),
    ([1.0, 2.0], TypeError, "int token ids.*float"),
    ([[1, 2], [3, 4]], TypeError, "flat sequence of int token ids"),
    ([1, 2.0], TypeError, "elements of type float, int"),
    ([1, True], TypeError, "elements of type bool, int"),
    ({1: 2}, TypeError, "str or a sequence of token ids.*dict"),
    (iter([1, 2]), TypeError, "str or a sequence of token ids"),
    (np.ma.array([1, 2], mask=[0, 1]), TypeError, r"no masked tokens: pass prompt.compressed\(\)"),
    ([1, 2**70], ValueError, f"token {2**70} at position 1"),
    (np.array([2**64 - 1], np.uint64), ValueError, f"token {2**64 - 1} at position 0"),
    (random_tokens(1025), ValueError, "1025 tokens, max_sequence_length is 1024: shorten"),
]
BAD_FIELDS_OF_REQUESTS = [
    (
        dict(params=greedy(1005)),
        ValueError,
        "20 prompt tokens.*num_tokens_to_generate=1005.*max_sequence_length=1024.*at most 1004",
    ),
    (
        dict(prompt=random_tokens(900), params=greedy(100)),
        ValueError,
        "1000 tokens does not fit in cache_bytes=.*raise cache_bytes.*num_tokens_to_generate=100",
    ),
    (dict(params={}), TypeError, "SamplingParams.*dict"),
    (
        dict(params=greedy(4, stop_words=("x",))),
        ValueError,
        "stop_words need a tokenizer.*stop_token_ids",
    ),
    (with_options(n=9), ValueError, "n is 9; .* at most max_requests=8"),
    (
        with_options(cache_breakpoints=[5, 21]),
        ValueError,
        "cache_breakpoints has 21; it must be at most 20",
    ),
    (dict(options={"salt": "a"}), TypeError, "options must be RequestOptions, got dict"),
]
"""Arguments of add_request, the error, and what its message must name."""
BAD_REQUESTS = [(dict(prompt=prompt), *told) for prompt, *told in BAD_PROMPTS]


@pytest.fixture(scope="module")
def engine():
    """An engine in the middle of an answer, with a pool that 1,000 tokens do not fit in."""
    engine = tiny_engine(MODEL, cache_bytes=200 << 10)
    assert engine.cache.fits(300, 512) and not engine.cache.fits(1000, 512)
    engine.generate([PROMPT], greedy(4))
    engine.add_request(random_tokens(50, seed=1), greedy(200))
    for _ in range(3):
        engine.step()
    return engine


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_REQUESTS + BAD_FIELDS_OF_REQUESTS)
def test_bad_request_is_refused_and_changes_nothing(engine, arguments, error, message):
    stats, digest = engine.stats(), engine.cache.digest()
    with pytest.raises(error) as caught:
        engine.add_request(**{"prompt": PROMPT, **arguments})
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)
    assert engine.stats() == stats
    assert engine.cache.digest() == digest
    engine.check_integrity()
    # The others go on, and what was cached is still there.
    running = engine.scheduler.running[0]
    before = running.num_generated
    engine.step()
    assert running.num_generated == before + 1
    tokens = np.asarray([*PROMPT, 1], dtype=np.int32)
    assert engine.cache.match(tokens).skipped_tokens >= len(PROMPT)


@pytest.mark.parametrize("token", [-(2**63), -VOCAB_SIZE, -2, -1, VOCAB_SIZE, 2**31, 2**64])
def test_no_id_outside_of_the_vocabulary_passes_the_builder(token):
    tokenizer = ByteTokenizer()
    builder = tiny_engine(MODEL, tokenizer).request_builder

    def stop_ids(prompt=PROMPT, **fields) -> frozenset:
        return builder.build(prompt, greedy(4, **fields), None)[0].stop_ids

    refused = rf"{token}( .*is outside of the vocabulary \[0, |; it must be a whole number )"
    for fields in (dict(stop_token_ids=(5, token)), dict(logit_bias={5: 1, token: 1})):
        for more in ({}, {"ignore_termination": True}, {"termination_id": -1}):
            with pytest.raises(ValueError, match=refused):
                stop_ids(**fields, **more)
    with pytest.raises(ValueError, match=f"token {token} at position 1 is outside"):
        stop_ids([5, token])
    tokenizer.bos = token
    with pytest.raises(ValueError, match=f"token {token} at position 0 is outside"):
        stop_ids("a", add_BOS=True)
    tokenizer.end_tokens = (7, token)
    if token == -1:  # none
        assert stop_ids(termination_id=-1) == frozenset() and stop_ids() == {7}
        return
    with pytest.raises(ValueError, match=refused):
        stop_ids(termination_id=token)
    for more in ({}, {"stop_token_ids": (5,)}):
        with pytest.raises(ValueError, match=rf"end token {token} is outside .*set termination_id"):
            stop_ids(**more)
    assert stop_ids(termination_id=7) == {7} and stop_ids(ignore_termination=True) == frozenset()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(prompts=None), "sequence of prompts, got NoneType"),
        (dict(prompts=np.array(5)), "sequence of prompts, got ndarray"),
        (dict(prompts=iter([PROMPT])), "sequence of prompts, got list_iterator"),
        (dict(prompts=[None]), "prompt 0: .*NoneType"),
        (dict(prompts=[PROMPT], options={"n": 2}), "options is .*, of type dict: give RequestOpt"),
        (dict(prompts=[PROMPT], options=["a"]), "prompt 0: options must be RequestOptions.* str"),
        (dict(prompts=[PROMPT], params={"top_k": 1}), "params is .*, of type dict: give Sampling"),
        (dict(prompts=[PROMPT], params=["x"]), "prompt 0: params must be SamplingParams, got str"),
    ],
)
def test_generate_refuses_wrong_types(engine, arguments, message):
    stats, digest = engine.stats(), engine.cache.digest()
    with pytest.raises(TypeError, match=message):
        engine.generate(**arguments)
    assert (engine.stats(), engine.cache.digest()) == (stats, digest)


def test_one_bad_prompt_of_many_is_named_and_none_is_queued(engine):
    queued = len(engine.scheduler.waiting)
    with pytest.raises(ValueError, match="prompt 2: token 97 at position 1"):
        engine.generate([PROMPT, PROMPT, [1, 97]], greedy(2))
    with pytest.raises(ValueError, match="options has 3 entries for 2 prompts"):
        engine.generate([PROMPT, PROMPT], greedy(2), [RequestOptions()] * 3)
    with pytest.raises(TypeError, match="request must be what add_request returned, got NoneType"):
        engine.cancel(None)
    assert len(engine.scheduler.waiting) == queued


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (("demo",), TypeError, r"model must be one of build_hybrid_model.*got str"),
        ((MODEL, "gpt2"), TypeError, r"tokenizer must be .*detokenize\(\), or None; got str"),
        ((MODEL, None, {}), TypeError, "config must be an InferenceConfig, got dict"),
        (
            (MODEL, None, InferenceConfig(cache_bytes=100)),
            ValueError,
            r"cache_bytes=100 holds 0 pages.*raise cache_bytes to",
        ),
    ],
    ids=["model", "tokenizer", "config", "pool"],
)
def test_what_no_engine_can_be_made_of_is_told(given, error, message):
    with pytest.raises(error, match=message):
        DynamicInferenceEngine(*given)


@pytest.mark.parametrize(
    "prompt",
    [PROMPT, tuple(PROMPT), np.asarray(PROMPT), np.asarray(PROMPT, np.uint8), torch.tensor(PROMPT)],
    ids=["list", "tuple", "int64", "uint8", "tensor"],
)
def test_any_flat_sequence_of_ints_is_a_prompt(prompt):
    result = tiny_engine(MODEL).generate([prompt], greedy(3))[0]
    assert result.prompt_tokens == PROMPT
    assert is_greedy(MODEL, PROMPT, result.token_ids)


@pytest.mark.parametrize(
    "prompts",
    [np.asarray(PROMPT), torch.tensor(PROMPT), torch.tensor([PROMPT]), np.asarray([PROMPT])],
    ids=["array", "tensor", "2-d tensor", "2-d array"],
)
def test_one_prompt_or_rows_of_prompts(prompts):
    (result,) = tiny_engine(MODEL).generate(prompts, greedy(3))
    assert result.prompt_tokens == PROMPT


BAD_FIELDS = {
    SamplingParams: [
        (dict(temperature=np.bool_(True)), "temperature.*True"),
        (dict(stop_words=["a", "\ud800"]), r"stop word has \\ud800, half of a character"),
        (dict(min_tokens=5, num_tokens_to_generate=4), "min_tokens=5 exceeds .*=4: raise"),
        (dict(top_n_logprobs=2), "top_n_logprobs needs return_log_probs"),
    ],
    RequestOptions: [
        (dict(guide="a"), "guide is 'a'; it must be a Guide"),
        (dict(cache_breakpoints=[5] * 4097), "it must be a list with a length at most 4096"),
        (dict(cache_breakpoints=np.array(5)), "cache_breakpoints is 5; it must be a list"),
        (dict(cache_breakpoints=np.ma.array([2, 3], mask=[0, 1])), "no masked positions"),
    ],
    InferenceConfig: [
        (dict(block_size_tokens=24), "block_size_tokens is 24; use 16, 32, 64, 128 or 256"),
        (dict(host_cache_bytes=-1), "host_cache_bytes is -1; .* from 0 to"),
        (dict(kv_cache_dtype=torch.int8), "kv_cache_dtype is torch.int8"),
    ],
}


@pytest.mark.parametrize("kind", BAD_FIELDS)
def test_bad_fields(kind):
    for fields, message in BAD_FIELDS[kind]:
        with pytest.raises(ValueError, match=message):
            kind(**fields)


def test_what_is_changed_after_the_request_was_added_does_not_reach_it():
    engine = tiny_engine(MODEL)
    params, positions = greedy(3), [7, 9]
    options = RequestOptions(cache_breakpoints=positions)
    request = engine.add_request(PROMPT, params, options)
    params.num_tokens_to_generate, positions[:] = 300, [0]
    assert request.options.cache_breakpoints == (7, 9)
    with pytest.raises(FrozenInstanceError):
        options.n = 2
    finish(engine, request)
    assert request.num_generated == 3
    params.top_k = -1
    with pytest.raises(ValueError, match="top_k"):
        engine.add_request(PROMPT, params)


def test_numbers_of_numpy_are_numbers():
    config = InferenceConfig(max_requests=np.int64(8), random_seed=np.int32(3))
    assert (type(config.max_requests), type(config.random_seed)) == (int, int)
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=np.uint8(1),
        stop_token_ids=[np.int8(2)],
    )
    assert params == SamplingParams(temperature=0.5, top_k=3, seed=1, stop_token_ids=(2,))
    result = tiny_engine(MODEL, random_seed=np.int64(1)).generate(
        [PROMPT], params, RequestOptions(cache_breakpoints=torch.tensor([5, 8]))
    )[0]
    assert len(result.token_ids) <= 30


def test_half_of_a_character_is_no_text():
    """Whatever the tokenizer would make of it."""
    engine = tiny_engine(MODEL, ByteTokenizer())
    with pytest.raises(ValueError, match=r"prompt 1: the prompt has \\ud800, half of a character"):
        engine.generate(["a", "a\ud800"], greedy(2))
    assert not engine.has_work
