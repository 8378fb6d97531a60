"""/v1/messages: bodies become chats, answers become blocks, whole and as events."""

import json
from dataclasses import replace

import pytest
from http_server import DEMO
from model_answers import CALL, TOOLS, output_of, result_of

from megatron_hybrid.serving.app import rename_error_fields
from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.parsers.choice import style_of
from megatron_hybrid.serving.protocols.answers import Answer
from megatron_hybrid.serving.protocols.messages import MessageAnswer, MessageFields
from megatron_hybrid.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(DEMO)
USER = {"role": "user", "content": "?"}
CUSTOM = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]


def fields_of(**more):
    return MessageFields(**{"max_tokens": 9, "messages": [USER], "tools": CUSTOM, **more})


def answer():
    chat = fields_of().to_chat()
    return MessageAnswer(Answer(TOKENIZER, chat, "msg_1", "demo", style_of("<think>")))


def events_of(text, reason, stop_reason=None):
    growing, found = answer(), b""
    for letter in text:
        found += growing.add(output_of(letter))
    result = result_of(text, reason)
    result.stop_reason = stop_reason
    found += growing.add(replace(output_of("", reason), result=result))
    found += b"".join(map(growing.encode, growing.last([result.prefix], 2)))
    return [json.loads(e.partition(b"data: ")[2]) for e in found.split(b"\n\n")[:-1]]


TEXT = f"<think>well</think>Let me see.\n{CALL}"


def test_an_answer_is_blocks_and_its_prefix_is_cache_usage():
    found = answer().whole([result_of(TEXT, "stop")])
    thinking, text, use = found["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "well")
    assert (text["type"], text["text"]) == ("text", "Let me see.")
    assert (use["type"], use["name"], use["id"][:6]) == ("tool_use", "weather", "toolu_")
    assert use["input"] == {"city": "Łódź", "days": 3}
    assert (found["stop_reason"], found["stop_sequence"]) == ("tool_use", None)
    usage = found["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (4, 6)
    assert usage["output_tokens_details"]["thinking_tokens"] == len(TOKENIZER.tokenize("well"))


@pytest.mark.parametrize(
    ("reason", "stopped_by", "expected"),
    [
        ("length", None, "max_tokens"),
        ("stop", None, "end_turn"),
        ("stop", 7, "end_turn"),
        ("stop", "END", "stop_sequence"),
    ],
)
def test_why_an_answer_ended(reason, stopped_by, expected):
    result = result_of("Hi", reason)
    result.stop_reason = stopped_by
    found = answer().whole([result])
    assert found["stop_reason"] == expected
    assert found["stop_sequence"] == (stopped_by if expected == "stop_sequence" else None)


def test_a_stream_builds_the_same_message():
    whole = answer().whole([result_of(TEXT, "stop")])
    start, *events, end, stop = events_of(TEXT, "stop")
    assert (start["type"], end["type"], stop["type"]) == (
        "message_start",
        "message_delta",
        "message_stop",
    )
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == 4
    blocks = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"input": ""})
            continue
        assert event["index"] == len(blocks) - 1
        _kind, *said = event.get("delta", {"type": "stop"}).items()
        for name, text in said:
            name = "input" if name == "partial_json" else name
            blocks[-1][name] += text
    for block in blocks:
        given = block.pop("input")
        if block["type"] == "tool_use":
            block["input"] = json.loads(given)
    for block in (*blocks, *whole["content"]):
        block.pop("id", None)
    assert blocks == whole["content"]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"] == whole["usage"]


def test_turns_of_blocks_are_a_chat():
    said = [
        {"type": "thinking", "thinking": "hm", "signature": "mh1"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
    ]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": [{"type": "text", "text": "rain"}],
        },
        {"type": "text", "text": "And now?"},
    ]
    system = [{"type": "text", "text": t, "cache_control": {"type": "ephemeral"}} for t in "ab"]
    messages = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": results}]
    chat = fields_of(system=system, messages=messages).to_chat()
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert chat.messages == [
        {"role": "system", "content": "a\nb"},
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning": "hm",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": "And now?"},
    ]
    assert chat.shown_tools == TOOLS and chat.max_completion_tokens == 9


def test_blocks_of_tools_that_run_elsewhere_are_left_out():
    kinds = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "advisor_tool_result")
    kinds += ("bash_code_execution_tool_result", "web_search_tool_result", "new_tool_result")
    said = [{"type": kind, "tool_use_id": "a", "content": [], "input": {}} for kind in kinds]
    found = {"type": "search_result", "title": "T", "source": "S"}
    found["content"] = [{"type": "text", "text": "rain"}]
    result = {"type": "tool_result", "tool_use_id": "b", "content": [found]}
    messages = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    chat = fields_of(messages=messages).to_chat()
    assert chat.messages[1:] == [
        {"role": "assistant", "content": ""},
        {"role": "tool", "tool_call_id": "b", "content": "T (S)\nrain"},
    ]
    assert chat.changes == [f"left out a block {kind}" for kind in kinds]


def test_wishes_become_those_of_a_chat():
    chat = fields_of(
        tool_choice={"type": "tool", "name": "time", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 5},
        stop_sequences=["END"],
        output_config={"effort": "low"},
    ).to_chat()
    assert [tool.name for tool in chat.required_tools] == ["time"]
    assert not chat.parallel_tool_calls and chat.thinking_token_budget == 5
    assert chat.variables["enable_thinking"] and chat.stops == ["END"]
    assert fields_of(tool_choice={"type": "any"}).to_chat().tool_choice == "required"
    assert not fields_of(thinking={"type": "disabled"}).to_chat().variables["thinking"]
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert fields_of(output_config={"format": form}).to_chat().response_format.type == "json_schema"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": [{"role": "tool", "content": "?"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
    ],
)
def test_what_no_chat_has_is_refused_by_its_field(more, param):
    fields = fields_of(**more)
    with pytest.raises(ApiError) as raised, rename_error_fields(fields):
        fields.to_chat()
    assert (raised.value.status, raised.value.param) == (400, param)
    body = raised.value.body_of("/v1/messages")
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
