"""What takes long runs beside the event loop, so that no stream waits for it."""

import asyncio
import threading
from functools import wraps

import pytest
from http_server import demo_service

from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.serving import app, prepared_request
from megatron_hybrid.serving.http import json_response
from megatron_hybrid.serving.protocols.answers import Answer
from megatron_hybrid.serving.protocols.responses import ResponseAnswer, ResponseFields
from megatron_hybrid.text.guide import GuideCompiler
from megatron_hybrid.text.tokenizer import Tokenizer

TAKE_LONG = [
    *((Tokenizer, name) for name in ("tokenize", "detokenize", "chat_prompt")),
    (app, "prepare"),
    (prepared_request, "guide_of"),
    (json_response, "encode_json"),
    (Answer, "whole"),
    (ResponseAnswer, "whole"),
    (ResponseFields, "to_chat"),
    (GuideCompiler, "compile"),
    *((DynamicInferenceEngine, name) for name in ("add_request", "step")),
]
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GUIDED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.fixture
def threads(monkeypatch):
    """Threads of each call that takes long, by its name."""
    found = {}

    def watch(owner, name):
        call = getattr(owner, name)

        @wraps(call)
        def watched(*args, **kwargs):
            found.setdefault(name, set()).add(threading.get_ident())
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in TAKE_LONG:
        watch(owner, name)
    return found


def requests():
    limit = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    for stream in (False, True):
        kind = {**limit, "stream": stream}
        yield "/v1/completions", {"prompt": ["Once", "And then"], **kind, "logprobs": 5}
        yield "/v1/chat/completions", {**CHAT, **kind, "logprobs": True, "top_logprobs": 5}
        yield "/v1/responses", {"input": "hello", "max_output_tokens": 4, "stream": stream}
    yield "/v1/chat/completions", {**CHAT, **limit, "response_format": GUIDED}
    yield "/v1/chat/completions", {**CHAT, **limit, "tools": [TOOL], "tool_choice": "required"}
    yield "/v1/completions", {"prompt": "Once", "max_tokens": 2, "echo": True, "logprobs": 1}
    yield "/tokenize", {"prompt": "Once", "return_token_strs": True}
    yield "/tokenize", CHAT
    yield "/detokenize", {"tokens": [300, 301]}
    yield "/v1/completions/render", {"prompt": "Once"}
    yield "/v1/completions/render", {"prompt": [300] * 20_000}
    yield "/v1/chat/completions/render", CHAT
    yield "/cache/explain", {"prompt": "Once"}


def test_what_takes_long_runs_beside_the_event_loop(server, threads, monkeypatch):
    monkeypatch.setattr(json_response, "FEW_TOKENS", 0)
    for path, body in requests():
        answer = server.call(path, body)
        assert answer.status_code == 200 and '"error":{' not in answer.text, answer.text
    assert server.call("/metrics").status_code == 200
    assert not {name for name, idents in threads.items() if server.thread.ident in idents}
    assert set(threads) == {name for _, name in TAKE_LONG}


def test_answers_of_few_tokens_alone_are_encoded_in_the_event_loop(server, threads, monkeypatch):
    monkeypatch.setattr(json_response, "FEW_TOKENS", 50)
    body = {"prompt": "Once", "max_tokens": 20, "ignore_eos": True}
    for more, is_beside in (({}, False), ({"logprobs": 2}, True), ({"n": 3}, True)):
        threads.clear()
        server.call("/v1/completions", {**body, **more})
        assert (server.thread.ident not in threads["encode_json"]) == is_beside, more


def test_the_names_of_tokens_are_there_before_the_first_request():
    service = demo_service()
    try:
        assert "token_bytes" in vars(service.tokenizer)
    finally:
        asyncio.run(service.close())
