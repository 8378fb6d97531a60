"""Where parameters of a request come from, the caller, the model, then us; what ranks compare."""

from dataclasses import fields

import pytest
from reference import greedy, greedy_tokens, random_tokens, tiny_engine, tiny_model
from scripted import ByteTokenizer

from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams

MODEL = tiny_model("M*")
PROMPT = random_tokens(20)


def engine_of(generation_config=None, **sizes):
    tokenizer = ByteTokenizer()
    tokenizer.end_tokens = ()
    if generation_config is not None:
        tokenizer.generation_config = generation_config
    return tiny_engine(MODEL, tokenizer, **sizes)


def test_a_request_that_says_nothing_is_answered_as_the_model_says():
    engine = engine_of({"do_sample": False, "max_new_tokens": 7})
    expected = greedy_tokens(MODEL, PROMPT, 7)
    for params in (None, SamplingParams()):
        assert engine.generate([PROMPT], params)[0].token_ids == expected
    assert engine.generate([PROMPT])[0].finish_reason == "length"
    assert engine.add_request(PROMPT, SamplingParams(num_tokens_to_generate=3)).params.top_k == 1


def test_a_length_that_nobody_asked_for_ends_where_the_sequence_does():
    engine = engine_of({"max_new_tokens": 4096}, max_sequence_length=64)
    (result,) = engine.generate([PROMPT])
    assert len(result.token_ids) == 64 - len(PROMPT)
    with pytest.raises(ValueError, match="num_tokens_to_generate=45 exceed max_sequence_length=64"):
        engine.generate([PROMPT], SamplingParams(num_tokens_to_generate=45))
    with pytest.raises(ValueError, match="64 tokens, max_sequence_length is 64: shorten"):
        engine.generate([random_tokens(64)])


def test_a_model_with_bad_values_makes_no_engine():
    with pytest.raises(ValueError, match=r"generation_config\.json of the model has top_p='much'"):
        engine_of({"top_p": "much"})


def test_all_ranks_compare_every_option_by_name():
    given = {"salt": "a", "cache_breakpoints": (7,), "n": 2, "priority": 3, "tenant": "b"}
    built = engine_of().request_builder.build(PROMPT, greedy(4), RequestOptions(**given))
    values = built[0].spec.values()
    names = {f"options.{field.name}" for field in fields(RequestOptions)}
    assert names <= values.keys() and "options" not in values
    assert {name: values[f"options.{name}"] for name in given} == given
