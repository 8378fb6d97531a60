"""The server as the `openai` package sees it."""

import math
from typing import Literal

import openai
import pydantic
import pytest

from megatron_hybrid.inference.sampling_params import SamplingParams

PROMPT = "Once upon a time there was a king who had three daughters, and the youngest of them"


@pytest.fixture(scope="module")
def greedy_text(server):
    """What the engine itself says."""
    params = SamplingParams(temperature=0, num_tokens_to_generate=16)
    tokens = server.service.tokenizer.tokenize(PROMPT)
    return server.told("generate", tokens, params).text


def complete(client, **fields):
    given = {"model": "demo", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    return client.completions.create(**{**given, **fields})


def chat(client, **fields):
    messages = [{"role": "user", "content": PROMPT}]
    given = {"model": "demo", "messages": messages, "max_tokens": 16, "temperature": 0}
    return client.chat.completions.create(**{**given, **fields})


def test_a_completion_is_the_engine_s_answer(client, greedy_text):
    found = complete(client, extra_body={"colour": "red"})  # nobody knows that field
    assert [choice.text for choice in found.choices] == [greedy_text]
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 16
    assert found.usage.total_tokens == found.usage.prompt_tokens + 16


def test_a_stream_has_the_whole_text_and_ends_with_the_usage(client, greedy_text):
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    *said, last = chunks
    assert "".join(chunk.choices[0].text for chunk in said) == greedy_text
    ends = [chunk.choices[0].finish_reason for chunk in said]
    assert ends == [None] * (len(ends) - 1) + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 16
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_a_stream_of_samples_has_the_texts_of_whole_answers(client):
    fields = {"prompt": [PROMPT, "The wolf"], "n": 2, "temperature": 1.0, "seed": 3}
    texts = dict.fromkeys(range(4), "")
    ends = []
    for chunk in complete(client, stream=True, **fields):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends += [choice.index] * (choice.finish_reason is not None)
    whole = complete(client, **fields)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert sorted(ends) == [0, 1, 2, 3] and texts[0] != texts[1]
    assert whole.usage.completion_tokens == 64


def test_penalties_and_biases_reach_the_engine(client, server, greedy_text):
    tokens = server.service.tokenizer.tokenize(greedy_text, add_special_tokens=False)
    assert complete(client, logit_bias={str(tokens[0]): -100}).choices[0].text != greedy_text
    repeated = complete(client, max_tokens=40).choices[0].text.split()
    penalised = complete(client, max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0)
    words = penalised.choices[0].text.split()
    assert len(set(words)) / len(words) > len(set(repeated)) / len(repeated)


def test_log_probs_of_chats_in_whole_and_in_streams(client):
    whole = chat(client, logprobs=True, top_logprobs=2).choices[0]
    entries = whole.logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries).decode() == whole.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    chunks = chat(client, logprobs=True, top_logprobs=2, stream=True)
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.token for e in streamed] == [e.token for e in entries]
    for one, other in zip(streamed, entries):
        assert math.isclose(one.logprob, other.logprob, abs_tol=1e-4)


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "demo" and client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


class Animal(pydantic.BaseModel):
    name: Literal["fox", "owl"]
    legs: int = pydantic.Field(ge=2, le=4)


def test_an_answer_is_parsed_into_a_model(client):
    messages = [{"role": "user", "content": PROMPT}]
    found = client.chat.completions.parse(
        model="demo", messages=messages, response_format=Animal, max_tokens=200
    )
    assert isinstance(found.choices[0].message.parsed, Animal)
    again = client.responses.parse(
        model="demo", input=PROMPT, text_format=Animal, max_output_tokens=200
    )
    assert isinstance(again.output_parsed, Animal)
