"""What inputs cost before they are answered or refused: each grows with its bytes, and no faster.

`python tests/functional/serving/test_costs.py` measures the table of docs/guides/operate.md.
"""

import asyncio
import gc
import json
import math
import re
import time
import tracemalloc
from pathlib import Path

import pytest
from http_server import demo_service, run_apart

from megatron_hybrid.serving.app import create_app

GUIDE = Path(__file__).parents[3] / "docs/guides/operate.md"
SMALL, LARGE = 50_000, 200_000
NOISE_SECONDS, ROUNDS = 0.05, 5
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "hi"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
FLAT = {"type": "function", "name": "f"}
TIME = "Time: 12:30:10\nA.\n"


def chat(content="hi", role="user", **fields):
    return CHAT, {"messages": [{"role": role, "content": content}, USER], "max_tokens": 1, **fields}


def responses(given="a", **fields):
    return RESPONSES, {"input": given, "max_output_tokens": 1, **fields}


def tool_result(blocks):
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": blocks}
    messages = [
        USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    return MESSAGES, {"messages": messages, "max_tokens": 1}


def calls(count):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "tool_calls": [call] * count}
    return CHAT, {"messages": [USER, said], "max_tokens": 1}


CASES = {
    "a text": lambda size: chat("hello world, it is " * (size // 19)),
    "lines of the system": lambda size: chat(TIME * (size // 20), "system"),
    "messages": lambda size: (CHAT, {"messages": [USER] * (size // 34), "max_tokens": 1}),
    "items of a response": lambda size: responses([USER] * (size // 34)),
    "parts of a content": lambda size: chat([{"type": "text", "text": "a"}] * (size // 30)),
    "calls of a message": lambda size: calls(size // 85),
    "images": lambda size: tool_result([{"type": "image", "source": {"data": "A" * size}}]),
    "blocks": lambda size: tool_result([{"type": "image"}] * (size // 19)),
    "prompts": lambda size: ("/v1/completions", {"prompt": ["a"] * (size // 5)}),
    "token ids": lambda size: ("/v1/completions", {"prompt": [300] * (size // 5)}),
    "/tokenize": lambda size: ("/tokenize", {"prompt": "a b" * (size // 3)}),
    "/detokenize": lambda size: ("/detokenize", {"tokens": [300] * (size // 5)}),
    "tools": lambda size: chat(tools=[FUNCTION] * (size // 52)),
    "tools in namespaces": lambda size: responses(
        tools=[{"type": "namespace", "name": "a", "tools": [FLAT] * (size // 35)}]
    ),
    "logit_bias": lambda size: chat(logit_bias={str(i): 1 for i in range(size // 10)}),
    "stop": lambda size: chat(stop=["a"] * (size // 5)),
    "bad_words": lambda size: chat(bad_words=["a"] * (size // 5)),
    "stop_token_ids": lambda size: chat(stop_token_ids=[1] * (size // 3)),
    "allowed_token_ids": lambda size: chat(allowed_token_ids=[1.0] * (size // 5)),
    "cache_breakpoints": lambda size: chat(cache_breakpoints=[1] * (size // 3)),
    "chat_template_kwargs": lambda size: chat(
        chat_template_kwargs={f"k{i}": None for i in range(size // 14)}
    ),
    "documents": lambda size: chat(documents=[{"a": "b"}] * (size // 12)),
    "a guide": lambda size: chat(
        structured_outputs={"json": {"enum": [f"{i}" for i in range(size // 9)]}}
    ),
    "unknown fields": lambda size: chat(**{f"k{i}": None for i in range(size // 14)}),
    "nested lists": lambda size: chat(unknown=[[[]]] * (size // 8)),
}
"""Inputs of the table -> requests of about so many bytes."""


@pytest.fixture(scope="module")
def app():
    service = demo_service({"max_sequence_length": 8192})
    yield create_app(service)
    run_apart(service.close())


def ask(app, path: str, body: bytes) -> int:
    """The status of a request."""

    async def run() -> int:
        sent, parts, never = [], [{"type": "http.request", "body": body}], asyncio.Event()

        async def receive():
            return parts.pop() if parts else await never.wait()

        async def send(message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
        scope["headers"] = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        await app(scope, receive, send)
        return sent[0]["status"]

    return asyncio.run(run())


def seconds(app, path: str, body: bytes) -> float:
    """CPU seconds of this process for a request, without collections of all that other tests have
    left."""
    gc.disable()
    try:
        began = time.process_time()
        assert ask(app, path, body) in (200, 400)
        return time.process_time() - began
    finally:
        gc.enable()


def peak_bytes(app, path: str, body: bytes) -> int:
    """The most that Python has allocated for a request at a time."""
    tracemalloc.start()
    try:
        ask(app, path, body)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def request(name: str, size: int) -> tuple[str, bytes]:
    path, body = CASES[name](size)
    return path, json.dumps(body).encode()


def table() -> dict[str, float]:
    """The inputs of the guide's table, and the bytes for each byte of them."""
    part = GUIDE.read_text().partition("## What a request may cost\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|.*\| ([\d.]+) \|$", part, re.MULTILINE)
    return {name.strip("`"): float(number) for name, number in rows}


def test_the_guide_lists_each_input():
    assert table().keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_cost_of_an_input_grows_with_its_bytes(app, name):
    small, large = request(name, SMALL), request(name, LARGE)
    ask(app, *small)
    few = many = math.inf
    for _ in range(ROUNDS):  # a busy machine costs CPU seconds, too: the least of both tell
        few, many = min(few, seconds(app, *small)), min(many, seconds(app, *large))
        if many < (most := 2 * len(large[1]) / len(small[1]) * few + NOISE_SECONDS):
            break
    assert many < most
    for path, body in (small, large):
        assert peak_bytes(app, path, body) < 1.5 * table()[name] * len(body) + (1 << 19)


if __name__ == "__main__":
    service = demo_service({"max_sequence_length": 8192})
    served = create_app(service)
    for name in CASES:
        costs = []
        for size in (SMALL, LARGE, 1_000_000):
            path, body = request(name, size)
            ask(served, path, body)
            took = min(seconds(served, path, body) for _ in range(ROUNDS))
            costs.append((took * 1e9 / len(body), peak_bytes(served, path, body) / len(body)))
        print(f"{name}: {max(c[0] for c in costs):.0f} ns, {max(c[1] for c in costs):.0f} bytes")
    run_apart(service.close())
