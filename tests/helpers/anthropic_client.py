"""The server as the `anthropic` package sees it: `make test-clients`."""

import anthropic
import pytest
from http_server import running_server

PROMPT = [{"role": "user", "content": "Once upon a time there was a king who had three daughters"}]
TOOL = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Kyoto", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}


@pytest.fixture(scope="module")
def client():
    with running_server(api_keys=("secret",)) as server:
        yield anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


def create(client, **more):
    given = {
        "model": "demo",
        "max_tokens": 12,
        "messages": PROMPT,
        "extra_body": {"temperature": 0},
    }
    return client.messages.create(**{**given, **more})


def test_a_message_and_its_cache_usage(client):
    first = create(client)
    assert (first.role, first.stop_reason) == ("assistant", "max_tokens")
    assert first.usage.output_tokens == 12
    again = create(client)
    assert again.content == first.content and again.usage.input_tokens == 0
    counted = client.messages.count_tokens(model="demo", messages=PROMPT)
    assert counted.input_tokens == again.usage.cache_read_input_tokens


def test_a_stream_is_accumulated_to_the_same_message(client):
    whole = create(client)
    with client.messages.stream(
        model="demo", max_tokens=12, messages=PROMPT, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text and final.content[0].text == text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_forced_tool_is_used_and_its_result_goes_back(client):
    found = create(client, max_tokens=200, **FORCED)
    (use,) = found.content
    assert (found.stop_reason, use.name) == ("tool_use", "weather")
    assert use.input["city"] in ("Kyoto", "Oslo")
    with client.messages.stream(model="demo", max_tokens=200, messages=PROMPT, **FORCED) as stream:
        assert stream.get_final_message().content[0].input.keys() == {"city"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    turns = [
        *PROMPT,
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": [result]},
    ]
    assert create(client, messages=turns, tools=[TOOL]).usage.cache_read_input_tokens > 0


def test_errors_are_the_package_s(client):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        create(client, max_tokens=0)
    with pytest.raises(anthropic.NotFoundError):
        create(client, model="other")
    wrong = client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        create(wrong)
