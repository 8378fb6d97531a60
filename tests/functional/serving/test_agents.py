"""Agents as they are: twenty turns in the shape of each client's requests, written after what their
sources send, reuse what stood in the turn before."""

import json
from itertools import pairwise

import pytest
from http_server import running_server
from model_answers import result_of

from megatron_hybrid.serving.http.changes import HEADER, with_steady_start
from megatron_hybrid.serving.parsers.choice import style_of
from megatron_hybrid.serving.protocols.answers import Answer
from megatron_hybrid.serving.protocols.fields import ChatFields
from megatron_hybrid.serving.protocols.messages import MessageFields
from megatron_hybrid.serving.protocols.request_mapping import chat_prompt
from megatron_hybrid.serving.protocols.responses import ResponseAnswer, ResponseFields

NUM_TURNS = 20
ABOUT = "You are an agent that edits files. Read a file before you write it, and be brief. " * 36
SHELL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
IMAGE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def clock(turn):
    return f"2026-11-29 {8 + turn // 60:02}:{turn * 7 % 60:02}:{turn * 13 % 60:02}"


def post(server, path, body):
    """Status, JSON and headers of an answer."""
    answer = server.call(path, body)
    return answer.status_code, answer.json(), answer.headers


def result(index, kind="text", image="image_url"):
    """The parts of a tool's result, of which one has an image."""
    return [{"type": kind, "text": f"Part {index} is fine."}, {"type": image}][: 1 + (index == 1)]


def chat_history(turn):
    """Messages with a call and its result each, as OpenAI's clients send them."""
    messages = [{"role": "user", "content": "Mend the file."}]
    for index in range(turn):
        call = {"name": "shell", "arguments": json.dumps({"command": f"cat part{index}"})}
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"call_{index}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call_{index}", "content": result(index)},
        ]
    return messages


def chat(system, turn, **more):
    tool = {"type": "function", "function": {"name": "shell", "parameters": SHELL}}
    messages = [{"role": "system", "content": system}, *chat_history(turn)]
    return "/v1/chat/completions", {"messages": messages, "tools": [tool], "max_tokens": 1, **more}


def claude_code(turn):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Mend the file."}]}]
    for index in range(turn):
        id = f"toolu_{index}"
        use = {"type": "tool_use", "id": id, "name": "Bash", "input": {"command": f"cat {index}"}}
        said = [{"type": "text", "text": f"Part {index} is fine."}]
        if index == 3:
            said += [{"type": "image", "source": IMAGE}]
            said += [{"type": "tool_reference", "tool_name": "Grep"}]
        thought = {"type": "redacted_thinking", "data": "AAAA"}
        result = {"type": "tool_result", "tool_use_id": id, "content": said}
        messages += [{"role": "assistant", "content": [thought, use]}]
        messages += [{"role": "user", "content": [result]}]
    billing = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cch={turn * 7919:05x};"
    return "/v1/messages?beta=true", {
        "max_tokens": 1,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": ABOUT, "cache_control": {"type": "ephemeral"}},
        ],
        "messages": messages,
        "tools": [
            {"name": "Bash", "description": "Runs a command.", "input_schema": SHELL},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "mcp_toolset", "mcp_server_name": "docs"},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": f"user_{turn}"},
    }


def codex(turn):
    said = [{"type": "input_text", "text": "Mend the file."}]
    items = [{"type": "message", "role": "user", "content": said}]
    for index in range(turn):
        id = f"call_{index}"
        items.append({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"})
        if index % 2:
            call = {"type": "custom_tool_call", "name": "apply_patch", "input": f"*** {index}"}
        else:
            call = {"type": "function_call", "name": "js", "namespace": "mcp__repl"}
            call["arguments"] = json.dumps({"command": f"cat {index}"})
        items += [{**call, "call_id": id}]
        said = result(index, "input_text", "input_image")
        items += [{"type": f"{call['type']}_output", "call_id": id, "output": said}]
        items += [{"type": "web_search_call", "status": "completed", "action": {}}]
    function = {"type": "function", "name": "js", "parameters": SHELL, "strict": False}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
    return "/v1/responses", {
        "instructions": ABOUT,
        "input": items,
        "max_output_tokens": 1,
        "tools": [
            {**function, "name": "shell"},
            {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": grammar},
            {"type": "namespace", "name": "mcp__repl", "description": "A.", "tools": [function]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a-thread",
        "text": {"verbosity": "low"},
        "client_metadata": {"turn": str(turn)},
    }


def open_webui(turn):
    return chat(f"Current date and time: {clock(turn)}\n{ABOUT}", turn, metadata={})


def libre_chat(turn):
    return chat(f"{ABOUT}\nThe current time is {clock(turn)} UTC", turn, user="a")


def opencode(turn):
    env = f"<env>\n  Working directory: /a\n  Today's date: Sun Nov 29 2026\n</env>\n{ABOUT}"
    return chat(env, turn, stream_options=None, reasoning_effort="medium")


def continue_dev(turn):
    return chat(f"Request-Id: {turn:08x}-aaaa\n{ABOUT}", turn, parallel_tool_calls=False)


def cline(turn):
    messages = [{"role": "system", "content": ABOUT}]
    for index in range(turn + 1):
        time = f"<environment_details>\nCurrent Time\n{clock(index)}\n</environment_details>"
        parts = [{"type": "text", "text": text} for text in (f"Part {index}.", time)]
        messages += [{"role": "user", "content": parts}]
        messages += [{"role": "assistant", "content": f"<read_file>{index}</read_file>"}]
    return "/v1/chat/completions", {"messages": messages[:-1], "max_tokens": 1}


def aider(turn):
    messages = [{"role": "system", "content": ABOUT}]
    for index in range(turn + 1):
        messages += [{"role": "user", "content": f"Mend part {index}."}]
        messages += [{"role": "assistant", "content": "Ok."}]
    return "/v1/chat/completions", {"messages": messages[:-1], "max_tokens": 1, "temperature": 0}


CLIENTS = (claude_code, codex, open_webui, libre_chat, opencode, continue_dev, cline, aider)


def counts(usage):
    """Tokens of the prompt, and those that were skipped."""
    if (skipped := usage.get("cache_read_input_tokens")) is not None:
        return usage["input_tokens"] + skipped, skipped
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return usage.get("prompt_tokens") or usage["input_tokens"], details["cached_tokens"]


@pytest.fixture(scope="module")
def server():
    with running_server({"max_sequence_length": 4096}) as running:
        yield running


def rendered(tokenizer, path, body):
    """The tokens of a request's prompt."""
    kinds = {"/v1/messages?beta=true": MessageFields, "/v1/responses": ResponseFields}
    fields = kinds.get(path, ChatFields)(**body)
    chat = fields if isinstance(fields, ChatFields) else fields.to_chat()
    return chat_prompt(tokenizer, chat, False).tokens


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_each_turn_begins_with_the_turn_before(server, client):
    """But for the beginning of the answer, and lines that moved to the end."""
    prompts = [rendered(server.service.tokenizer, *client(turn)) for turn in range(NUM_TURNS)]
    for before, prompt in pairwise(prompts):
        same = next((i for i, (a, b) in enumerate(zip(before, prompt)) if a != b), len(before))
        assert same >= 0.95 * len(before), (same, len(before))


@pytest.mark.parametrize("client", [claude_code, libre_chat], ids=lambda client: client.__name__)
def test_each_turn_skips_what_stood_in_the_turn_before(server, client):
    post(server, "/cache/reset", {})
    before = 0
    for turn in range(0, NUM_TURNS, 4):
        status, body, _ = post(server, *client(turn))
        assert status == 200, body
        prompt, skipped = counts(body["usage"])
        assert skipped >= 0.95 * before, (turn, before, skipped, prompt)
        before = prompt


def test_what_is_left_out_is_said(server):
    _, _, headers = post(server, *claude_code(4))
    for said in ("billing line", "web_search", "mcp_toolset", "redacted_th", "image", "context_m"):
        assert said in headers[HEADER]
    _, _, headers = post(server, *codex(2))
    image = "left out an image of a tool's result"
    for said in ("tool web_search", "verbosity", "search_call", "encrypted", "grammar", image):
        assert said in headers[HEADER]
    assert post(server, *opencode(2))[2][HEADER] == image
    path, body = claude_code(0)
    choice = {"type": "tool", "name": "web_search"}
    text = post(server, path, {**body, "tool_choice": choice})[1]["error"]["message"]
    assert str(choice) in text and "this server left out the tool web_search" in text
    assert HEADER not in post(server, *aider(2))[2]
    _, body = open_webui(0)
    messages = {"messages": body["messages"]}
    _, told, _ = post(server, "/cache/explain", messages)
    assert "moved a line" in told["changes"][0] and told["changes"][0] in told["text"]
    for path in ("/tokenize", "/v1/chat/completions/render"):
        assert "moved a line" in post(server, path, messages)[2][HEADER]
    path, body = claude_code(0)
    assert "left out" in post(server, f"{path}/count_tokens", body)[2][HEADER]


def test_a_limit_above_what_is_left_is_refused_in_the_client_s_words(server):
    path, body = claude_code(1)
    status, told, _ = post(server, path, {**body, "max_tokens": 32_000})
    _, count, _ = post(server, "/v1/messages/count_tokens", body)
    numbers = f"{count['input_tokens']} + 32000 > 4096"
    text = f"input length and `max_tokens` exceed context limit: {numbers}, "
    assert status == 400 and told["error"]["message"].startswith(text)
    assert told["error"]["type"] == "invalid_request_error"
    long = {**body, "messages": [{"role": "user", "content": ABOUT * 80}]}
    _, told, _ = post(server, path, long)
    assert told["error"]["message"].startswith("prompt is too long: at least ")
    assert told["error"]["message"].endswith(" tokens > 4096 maximum")
    for path, body in (codex(1), open_webui(1)):
        name = "max_output_tokens" if "input" in body else "max_tokens"
        status, told, _ = post(server, path, {**body, name: 32_000})
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 4096 tokens" in told["error"]["message"]
        assert told["error"]["param"] == name


def test_a_limit_is_lowered_and_lines_stay_by_options():
    options = {"lowers_max_tokens": True, "keeps_changing_lines": True}
    with running_server({"max_sequence_length": 64}, **options) as server:
        body = {"messages": [{"role": "system", "content": f"Now: {clock(0)}"}], "max_tokens": 9999}
        body["messages"].append({"role": "user", "content": "Hi"})
        status, answer, headers = post(server, "/v1/chat/completions", body)
        assert status == 200 and answer["usage"]["total_tokens"] <= 64
        assert "lowered max_tokens from 9999" in headers[HEADER] and "moved" not in headers[HEADER]


@pytest.mark.parametrize(
    ("line", "moves"),
    [
        ("Current time: 12:34:56", True),
        ("- Now: Sunday, November 29, 2026 at 2:10 PM UTC", True),
        ("2026-11-29T02:10:11Z", True),
        ("The time is 02:11 (Europe/Berlin)", True),
        ("Request-Id: 00000001-aaaa", True),
        ("CURRENT_DATETIME: 11/29/2026, 4:05:06 PM", True),
        ("<current_time>2026-11-29 04:05</current_time>", True),
        ("Current Time: Sun Nov 29 2026 04:05:06 GMT+0000 (Coordinated Universal Time)", True),
        ("Time: 4:05:06 PM (Europe/Berlin)", True),
        ("Today's date: 2026-11-29", False),
        ("Deadline: 2026-12-01 17:00", False),
        ("Previous: 09:30\nCurrent time: 10:30\nNext: 11:30", False),
        ("Assume today is 2020-03-01 12:00", False),
        ("The current time is always 12:00.", False),
        ("Local time: 09:00 - 17:00", False),
        ("2026-11-29T02:10:11-05:00", True),
        ("Time: 9:00 AM (UTC)", False),
        ("Request ID: required", False),
        ("Always answer with\nRequest ID: 3fa85f64-5717-4562-b3fc-2c963f66afa6", False),
        ("Message-ID: {{ message_id }}", False),
        ("x-anthropic-billing-header: is a header that Claude Code sends", False),
        ("```\nCurrent time: 12:34:56\n```", False),
        ("~~~~ text\n~~~\nCurrent time: 12:34:56\n~~~~", False),
        ("```\n~~~\n```\nCurrent time: 12:34:56", True),
        ("Use ```code``` here\nCurrent time: 12:34:56", True),
        ("\n    Current time: 12:34:56", False),
        ("Environment:\n    Current time: 12:34:56", True),
        ("It is 19:20. You answer questions.", False),
        ("For example:\n  Current time: 12:30\n  Answer: noon", False),
        ("Current: 3:16", False),
        ("The time is 12:30 now.", True),
        ("It is currently 2:10 PM", True),
        ("See https://localhost:8000/time", False),
    ],
)
def test_a_line_of_nothing_but_a_time_moves(line, moves):
    given = [{"role": "system", "content": f"A\n{line}\nB"}, {"role": "user", "content": "C"}]
    found, changes = with_steady_start(given)
    assert (found != given) == moves == bool(changes)
    moving = line.rpartition("\n")[2]
    assert moving in found[1]["content"] if moves else line in found[0]["content"]
    parts = [{"type": "text", "text": text, "cache_control": {}} for text in ("A", f"{line}\nB")]
    found, _ = with_steady_start([{"role": "system", "content": parts}, given[1]])
    assert (moving in found[1]["content"]) == moves and found[0]["content"][0] == parts[0]
    assert (found[0]["content"][1] != parts[1]) == moves and "cache_control" in parts[1]


def test_a_line_that_cannot_move_stays_and_a_billing_line_goes():
    billing = "x-anthropic-billing-header: cc_version=2.1.3.abc; cch=1f3a;"
    text = "You help.\nCurrent time: 12:34"
    messages = [
        {"role": "system", "content": f"{billing}\n{text}"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "{"},
    ]
    found, (change,) = with_steady_start(messages)
    assert found == [{"role": "system", "content": text}, *messages[1:]]
    assert "billing line" in change
    long = {"role": "system", "content": [{"type": "text", "text": f"{billing}\n" * 20_000}]}
    assert with_steady_start([long, *messages]) == ([long, *messages], [])


def test_a_custom_tool_and_a_namespace_come_back_as_they_were_named():
    fields = ResponseFields(**codex(0)[1])
    for name, given, item in (
        ("apply_patch", {"input": "***"}, {"type": "custom_tool_call", "input": "***"}),
        ("mcp__repl__js", {"a": 1}, {"type": "function_call", "namespace": "mcp__repl"}),
    ):
        call = json.dumps({"name": name, "arguments": given})
        style = style_of("", "hermes", "none")
        answer = ResponseAnswer(Answer(None, fields.to_chat(), "resp", "demo", style), fields)
        body = answer.whole([result_of(f"<tool_call>{call}</tool_call>", "stop")])
        (found,) = body["output"]
        assert item.items() <= found.items()
        assert found["name"] == ("js" if "namespace" in item else name)
