"""RequestOptions: one place for what is asked of a request, and checks before anything changes."""

import dataclasses

import pytest
from reference import greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.requests.options import RequestOptions

NAMES = {field.name for field in dataclasses.fields(RequestOptions)}
PROMPT = random_tokens(20)


def test_all_ranks_compare_every_option_by_name():
    builder = tiny_engine(tiny_model("M-")).request_builder
    given = {"salt": "a", "cache_breakpoints": (7,), "n": 2, "priority": 3, "tenant": "b"}
    spec = builder.build(PROMPT, greedy(4), RequestOptions(**given))[0].spec
    values = spec.values()
    assert {f"options.{name}" for name in NAMES} <= values.keys() and "options" not in values
    assert {name: values[f"options.{name}"] for name in given} == given


def test_a_caller_cannot_change_the_options_of_a_queued_request():
    positions = [7, 9]
    options = RequestOptions(cache_breakpoints=positions)
    request = tiny_engine(tiny_model("M-")).add_request(PROMPT, greedy(4), options)
    positions[:] = [0]
    assert request.options.cache_breakpoints == (7, 9)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.n = 2
