"""Answers and chunks are what the `openai` package's types say."""

import json
from math import inf

import pytest
from http_server import DEMO
from model_answers import CALL, TOOLS, output_of, result_of, said_in
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from megatron_hybrid.serving.parsers.choice import style_of
from megatron_hybrid.serving.protocols.answers import Answer, GrowingChoice
from megatron_hybrid.serving.protocols.fields import ChatFields, CompletionFields
from megatron_hybrid.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(DEMO)


def answer_of(**options):
    messages = [{"role": "user", "content": "?"}]
    fields = ChatFields(messages=messages, tools=TOOLS, **options)
    return Answer(TOKENIZER, fields, "chatcmpl-1", "demo", style_of("<think>"))


def test_a_tool_call_is_openai_s():
    text = f"<think>well</think>Let me see.\n{CALL}"
    found = answer_of().whole([result_of(text, "stop")])
    choice = ChatCompletion.model_validate(found).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert call.function.arguments == '{"city": "Łódź", "days": 3}'
    assert choice.message.content == "Let me see." and choice.message.reasoning == "well"
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
    assert found["usage"]["prefix"]["miss_reason"] == "state_evicted"


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [("no call", "stop", "stop"), (CALL, "length", "length"), (CALL, "stop", "tool_calls")],
)
def test_the_finish_reason_tells_of_calls(text, reason, expected):
    (choice,) = answer_of().whole([result_of(text, reason)])["choices"]
    assert choice["finish_reason"] == expected


@pytest.mark.parametrize("is_chat", [True, False])
def test_log_probabilities_are_finite(is_chat):
    """Where a token cannot be drawn, its own is minus infinity."""
    answer = answer_of(logprobs=True, top_logprobs=1)
    if not is_chat:
        fields = CompletionFields(prompt="?", logprobs=1)
        answer = Answer(TOKENIZER, fields, "cmpl-1", "demo")
    values = [-inf if is_chat else None, -0.5]
    found = answer.logprobs([5, 6], values, [{7: -inf}, {8: -1.0}], 0)
    assert "Infinity" not in json.dumps(found) and "-9999.0" in json.dumps(found)


def test_without_a_choice_of_tools_calls_are_content():
    (choice,) = answer_of(tool_choice="none").whole([result_of(CALL, "stop")])["choices"]
    assert choice["message"]["content"] == CALL and "tool_calls" not in choice["message"]


def test_a_stream_has_the_same_parts():
    text = f"<think>well</think>Let me see.\n{CALL}"
    choice = GrowingChoice(answer_of(), 0, 0)
    chunks = []
    for letter in text:
        chunks += said_in(choice.add(output_of(letter)))
    chunks += said_in(choice.add(output_of("", "stop")))
    choices = [ChatCompletionChunk.model_validate(chunk).choices[0] for chunk in chunks]
    deltas = [choice.delta for choice in choices]
    assert deltas[0].role == "assistant"
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "well"
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    call, *others = [call for delta in deltas for call in delta.tool_calls or ()]
    assert call.index == 0 and call.function.name == "weather" and call.id.startswith("call_")
    assert {(other.index, other.id, other.function.name) for other in others} == {(0, None, None)}
    arguments = "".join(each.function.arguments for each in (call, *others))
    assert json.loads(arguments) == {"city": "Łódź", "days": 3}
    assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
