"""The server under HTTP itself: keys, limits, clients that go away, its end."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import httpx
import msgpack
import psutil
import pytest
import zmq
from http_server import demo_service, running_server, set_config
from matrix import matrix_rows
from prometheus_client.parser import text_string_to_metric_families
from waiting import LIMIT_S, wait_until

from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.step_loop import StepLoop
from megatron_hybrid.serving import admission
from megatron_hybrid.serving.admission import STALL_SECONDS, Ticket
from megatron_hybrid.serving.http import slow_clients
from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.text.guide import GuideCompiler

EXAMPLES = Path(__file__).parents[3] / "examples"
LONG = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with running_server(
        max_waiting=0,
        max_body_bytes=100_000,
        cors_origins=("https://chat.example",),
        root_path="/llm",
    ) as server:
        yield server


def running(server):
    stats = server.told("stats")
    return stats["requests_running"] + stats["requests_waiting"]


def test_tokens_and_back(server):
    prompt = {"prompt": "A naïve fox 🦊"}
    found = server.call("/tokenize", {**prompt, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert server.call("/detokenize", {"tokens": found["tokens"]}).json() == prompt
    rendered = server.call("/v1/completions/render", prompt).json()
    assert rendered == [{"token_ids": found["tokens"]}]
    messages = [{"role": "user", "content": "hello"}]
    chat = server.call("/v1/chat/completions/render", {"messages": messages}).json()
    assert chat["token_ids"] == server.call("/tokenize", {"messages": messages}).json()["tokens"]


def test_request_ids_go_both_ways(server):
    assert server.call("/health").headers["x-request-id"]
    given = server.call("/v1/models", headers={"X-Request-Id": "mine-7"})
    assert given.headers["x-request-id"] == "mine-7"
    evil = server.call("/v1/models", headers={"X-Request-Id": "a b" * 99})
    assert evil.headers["x-request-id"] != "a b" * 99


def test_a_foreign_page_cannot_reset_the_cache(server):
    own = server.url.removeprefix("http://")
    for headers, remedy in (
        ({"Host": "evil.example", "Origin": "http://evil.example"}, "--allowed-host"),
        ({"Origin": "http://evil.example"}, "--cors-origin http://evil.example"),
    ):
        answer = server.call("/cache/reset", {}, headers=headers)
        assert answer.status_code == 403 and remedy in answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers
    for headers in ({}, {"Origin": server.url, "Host": own}, {"Origin": "https://chat.example"}):
        answer = server.call("/cache/reset", {}, headers=headers)
        assert answer.json() == {"reset": True}
    asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(server.url + "/v1/chat/completions", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"


def test_a_proxy_s_path_and_the_load(server):
    for path in ("/load", "/llm/load"):
        assert server.call(path).json() == {"server_load": 0}
    assert server.call("/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert server.call("/v1/nothing").json()["error"]["type"] == "not_found_error"


LARGE = json.dumps({"prompt": "x" * 200_000}).encode()


@pytest.mark.parametrize(
    ("kind", "parts", "status", "text"),
    [
        ("application/json", b'{"prompt": ', 400, "read as JSON"),
        ("text/plain", b'{"prompt": ', 400, "send Content-Type"),
        ("application/json", LARGE, 413, "100000 bytes"),
        ("application/json", (LARGE[:50_000], LARGE[50_000:]), 413, "100000 bytes"),
    ],
    ids=["no JSON", "another type", "too large", "too large in chunks"],
)
def test_a_body_that_is_no_json_or_over_the_limit_is_refused(server, kind, parts, status, text):
    headers, content = {"content-type": kind}, parts if isinstance(parts, bytes) else iter(parts)
    url = server.url + "/v1/completions"
    answer = httpx.post(url, content=content, headers=headers, timeout=LIMIT_S)
    assert answer.status_code == status and text in answer.json()["error"]["message"]


def test_bodies_of_one_key_that_come_at_a_time_are_bounded(keyed, monkeypatch):
    set_config(monkeypatch, keyed, max_body_bytes=1000)
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer alice\r\n"
    head += b"Content-Length: 900\r\n\r\n"
    with ExitStack() as undo:
        clients = [socket.create_connection(keyed.address) for _ in range(18)]
        for client in clients:
            undo.enter_context(client)
            client.sendall(head + b"x" * 899)
        (refused, *_), _, _ = select.select(clients, [], [], LIMIT_S)
        answer = refused.recv(1000)
        assert answer.startswith(b"HTTP/1.1 429") and b"retry-after: 1" in answer
        for _ in range(20):  # of those that are read none counts any more
            answer = keyed.call("/tokenize", {"prompt": "a" * 900}, "bob")
            assert answer.status_code == 200


def connect(server, body):
    """A connection with a request of which nothing is read."""
    body = json.dumps(body).encode()
    connection = socket.create_connection(server.address)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.fixture(scope="module")
def single():
    """A server that runs one request at a time."""
    with running_server({"max_requests": 1}) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request_also_while_it_waits(single, stream):
    first = connect(single, {**LONG, "stream": stream})
    wait_until(lambda: running(single) == 1)
    waiting = connect(single, {**LONG, "stream": stream})
    wait_until(lambda: running(single) == 2)
    waiting.close()
    wait_until(lambda: running(single) == 1)
    assert single.told("stats")["requests_running"] == 1
    first.close()
    wait_until(lambda: running(single) == 0)
    single.told("check_integrity")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_can_be_aborted_by_its_id(server, stream):
    body = {**LONG, "stream": stream, "request_id": f"long-{stream}"}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(server.call, "/v1/completions", body)
        wait_until(lambda: running(server) == 1)
        assert server.call("/abort", {"request_id": f"long-{stream}"}).json() == {"aborted": True}
    assert "aborted" in answer.result().text
    assert server.call("/abort", {"request_id": "nobody"}).json() == {"aborted": False}
    wait_until(lambda: running(server) == 0)


def test_every_metric_of_the_dashboard_is_scraped(server):
    for stream in (False, True):
        body = {"prompt": "Once upon", "max_tokens": 3, "ignore_eos": True, "stream": stream}
        assert server.call("/v1/completions", body).status_code == 200
    families = list(text_string_to_metric_families(server.call("/metrics").text))
    values = {sample.name: sample.value for family in families for sample in family.samples}
    labels = [sample.labels for family in families for sample in family.samples]
    assert {"route": "/v1/completions", "status": "200"} in labels
    panels = json.loads((EXAMPLES / "grafana.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name for each in expressions for name in re.findall(r"megatron_hybrid_\w+", each)}
    assert not named - values.keys()
    for name in ("generation_tokens_total", "time_to_first_token_seconds_bucket"):
        assert f"megatron_hybrid_{name}" in named and values[f"megatron_hybrid_{name}"] > 0


@pytest.fixture(scope="module")
def keyed():
    with running_server(api_keys=("alice", "bob"), admin_keys=("root",)) as server:
        yield server


def test_keys_open_the_api_and_have_prefixes_of_their_own(keyed):
    body = {"prompt": "A secret prompt of one tenant alone, " * 4, "max_tokens": 1}

    def cached(key, **fields):
        answer = keyed.call("/v1/completions", {**body, **fields}, key)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert keyed.call("/health").status_code == 200
    for headers in ({}, {"Authorization": "Bearer eve"}, {"Authorization": "alice"}):
        answer = keyed.call("/v1/completions", body, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
    assert cached("alice") == 0 and cached("alice") > 0
    assert cached("bob") == 0
    assert cached("alice", cache_salt="other") == 0
    # bob's guess has counted as one that another salt knows: only the operator may know it
    assert keyed.call("/cache/history", key="root").json()["lost_tokens_salt"][-1] > 0
    assert 'reason="no_shared_prefix"' in keyed.call("/metrics").text
    assert 'reason="salt"' not in keyed.call("/metrics").text
    for key, status in (("alice", 403), ("root", 200)):
        assert keyed.call("/cache/reset", {}, key).status_code == status


def test_a_prompt_is_explained_as_a_request_with_the_key_would_find_it(keyed):
    prompt = {"prompt": "A prompt that each key has asked or has not"}

    def ask(path, key, **fields):
        return keyed.call(path, {**prompt, **fields}, key)

    def skipped(**fields):
        return ask("/cache/explain", "root", **fields).json()["skipped_tokens"]

    ask("/v1/completions", "alice", cache_salt="a", max_tokens=1)
    assert skipped(api_key="alice", cache_salt="a") > 0
    for other in ({}, {"cache_salt": "a"}, {"api_key": "alice"}, {"api_key": "bob"}):
        assert skipped(**other) == 0
    ask("/v1/completions", "root", max_tokens=1)
    assert skipped() > 0 and skipped(api_key="bob") == 0
    assert ask("/cache/explain", "bob", api_key="bob").status_code == 403
    for unknown in ("", "eve", "\u00e9"):
        refused = ask("/cache/explain", "root", api_key=unknown)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "api_key"


def test_a_key_has_only_so_many_requests_at_a_time(keyed, monkeypatch):
    config = replace(keyed.service.config, max_requests_per_key=1)
    monkeypatch.setattr(keyed.service.admission, "config", config)
    body, statuses = {"prompt": "Once", "max_tokens": 1}, []
    with keyed.service.admission.admitted("other", "alice"):
        for key in ("alice", "bob"):
            answer = keyed.call("/v1/completions", body, key)
            statuses.append((answer.status_code, answer.headers.get("retry-after")))
    assert statuses == [(429, "1"), (200, None)]


def test_each_sample_of_each_prompt_counts_before_it_is_tokenized(server, monkeypatch):
    """The server takes eight at a time, and none waits."""
    ask = {"prompt": ["Once"] * 3, "n": 3, "max_tokens": 1}
    error = server.call("/v1/completions", ask).json()["error"]
    assert error["param"] == "prompt" and "have 8 at a time" in error["message"]
    assert len(server.call("/v1/completions", {**ask, "n": 2}).json()["choices"]) == 6
    tokenized = mock.Mock()
    monkeypatch.setattr(server.service.tokenizer, "tokenize", tokenized)
    with server.service.admission.admitted("other", "", num_samples=3):
        answer = server.call("/v1/completions", {**ask, "n": 2})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert "at capacity (8 run or wait)" in answer.json()["error"]["message"]
    assert not tokenized.called


def received(server, *sent: bytes) -> bytes:
    """What comes until the server ends the connection, or nothing."""
    with socket.create_connection(server.address, timeout=LIMIT_S) as connection:
        for part in sent:
            connection.sendall(part)
        try:
            return b"".join(iter(lambda: connection.recv(1000), b""))
        except ConnectionResetError:
            return b""


def test_headers_and_bodies_that_do_not_arrive_in_time_are_dropped(server, monkeypatch):
    monkeypatch.setattr(slow_clients, "HEADER_SECONDS", 0.1)
    monkeypatch.setattr(slow_clients, "BODY_SECONDS", 0.1)
    assert received(server) == b""
    assert received(server, b"GET /version HTTP/1.1\r\nHost: a\r\n") == b""
    headers = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    late = received(server, b"POST /v1/completions HTTP/1.1\r\n", headers, b"{")
    assert late.startswith(b"HTTP/1.1 408") and b"send it faster" in late


@pytest.mark.parametrize(
    "sent",
    [
        b"A: b\r\n" * 128,
        b"A: " + b"b" * (64 << 10) + b"\r\n",
        b"A: " + b"b" * (64 << 10),  # it never ends
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * 128,
    ],
    ids=["many", "long", "endless", "trailers"],
)
def test_headers_of_more_than_a_proxy_s_are_refused(server, sent):
    start = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    path = b"GET /" + b"a" * (64 << 10) + b" HTTP/1.1\r\n\r\n"
    for each in (start + sent + b"\r\n", path):
        with socket.create_connection(server.address, timeout=LIMIT_S) as connection:
            connection.sendall(each)
            assert connection.recv(1000).startswith(b"HTTP/1.1 431")
    assert received(server, start + b"Connection: close\r\n" + b"A: b\r\n" * 126 + b"\r\n") != b""


async def test_a_plain_chat_ends_while_guides_of_clients_that_have_left_wait(server, monkeypatch):
    """The first guide takes for ever."""
    gate, compiled, compile_guide = threading.Event(), [], GuideCompiler.compile

    def wait(compiler, guide):
        gate.wait(LIMIT_S)
        compiled.append(guide.source)
        return compile_guide(compiler, guide)

    monkeypatch.setattr(GuideCompiler, "compile", wait)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

    async with httpx.AsyncClient(base_url=server.url, timeout=0.5) as client:
        for number in range(7):
            guide = {"structured_outputs": {"regex": f"{number}+"}}
            with pytest.raises(httpx.TimeoutException):
                await client.post("/v1/chat/completions", json=chat | guide, timeout=0.1)
    assert server.call("/v1/chat/completions", chat).status_code == 200
    wait_until(lambda: server.service.admission.load == 0)
    gate.set()
    last = {"structured_outputs": {"regex": "last"}}
    assert server.call("/v1/chat/completions", chat | last).status_code == 200
    assert set(compiled) == {"0+", "last"}  # those between have left, so none compiles them


def test_a_request_that_takes_too_long_ends(server, monkeypatch):
    set_config(monkeypatch, server, request_seconds=0.3)
    answer = server.call("/v1/completions", LONG)
    assert answer.status_code == 504 and "0.3 s" in answer.json()["error"]["message"]
    lines = server.call("/v1/completions", {**LONG, "stream": True}).text.split("\n\n")
    assert "0.3 s" in lines[-3] and lines[-2] == "data: [DONE]"
    wait_until(lambda: running(server) == 0)


@pytest.mark.parametrize("n", matrix_rows([1, 2], 2))
@pytest.mark.parametrize("stream", matrix_rows([False, True], True))
def test_a_request_that_waits_too_long_in_the_queue_is_told_to_come_again(stream, n):
    options = {"max_requests": n}
    with running_server(options, queue_seconds=0.0) as server, ThreadPoolExecutor(1) as thread:
        body = {**LONG, "prompt": [LONG["prompt"], "And then"], "max_tokens": 30, "n": n}
        first = thread.submit(server.call, "/v1/completions", body)
        wait_until(lambda: running(server) == 2)
        late = {**LONG, "stream": stream, "n": n}
        answer = server.call("/v1/completions", late)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert "has not begun" in answer.json()["error"]["message"]
        # Its second prompt waited for the first one: the request had begun.
        assert first.result().json()["usage"]["completion_tokens"] == 60 * n
        stats = server.told("stats")
        assert stats["leases"] == stats["requests_waiting"] == 0
        server.told("check_integrity")


def test_a_stream_of_several_prompts_begins_with_the_first(single, monkeypatch):
    set_config(monkeypatch, single, queue_seconds=0.0)
    body = {"prompt": ["Once", "And then"] * 3, "max_tokens": 3, "ignore_eos": True}
    text = single.call("/v1/completions", {**body, "stream": True}).text
    assert text.count('"finish_reason":"length"') == 6 and "error" not in text
    # What cannot be served is refused before the answer begins.
    late = {**body, "prompt": [[5, 6], [7], [8], [5] * 2000], "stream": True}
    refused = single.call("/v1/completions", late)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_the_time_of_a_request_is_that_of_all_its_prompts():
    service = demo_service(request_seconds=1000.0)
    ticket = Ticket("late", "")
    params = SamplingParams(num_tokens_to_generate=3)
    streams = service.streams(["Once", "And then"], params, RequestOptions())
    await service.wait_for_first_output(ticket, streams)
    first, second = streams
    assert [outputs async for outputs in service.outputs(ticket, first)]
    ticket.began -= 2000
    with pytest.raises(ApiError, match="more than 1000"):
        [outputs async for outputs in service.outputs(ticket, second)]
    await service.close()


def test_a_server_that_drains_says_so_and_takes_nothing_new(server, monkeypatch):
    monkeypatch.setattr(server.service.admission, "is_draining", True)
    assert server.call("/health").status_code == server.call("/ready").status_code == 503
    assert server.call("/live").status_code == 200
    answer = server.call("/v1/completions", LONG)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"


def test_health_tells_that_no_request_goes_on_and_when_one_does_again(server, monkeypatch):
    blocked, told, clock = threading.Event(), [], SimpleNamespace(ahead=0.0)
    step = StepLoop.step
    monkeypatch.setattr(StepLoop, "step", lambda self: blocked.wait(LIMIT_S) and step(self))
    now = SimpleNamespace(perf_counter=lambda: time.perf_counter() + clock.ahead)
    monkeypatch.setattr(admission, "time", now)

    def is_stalled():
        clock.ahead += STALL_SECONDS  # however late the server notices the last step
        told.append(server.call("/health"))
        return told[-1].status_code == 503

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(server.call, "/v1/completions", {**LONG, "max_tokens": 2})
        try:
            wait_until(is_stalled)
        finally:
            blocked.set()
        assert answer.result().status_code == 200
    assert re.fullmatch(r"no request has gone on for \d+ s, and 1 wait", told[-1].text)
    assert server.call("/health").status_code == 200


def test_sigterm_answers_who_is_there_saves_the_cache_and_exits(tmp_path):
    command = [sys.executable, "-m", "megatron_hybrid", "serve", "--port", "0"]
    command += ["--shutdown-timeout", "600", "--cache-dir"]  # also on a busy machine
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    events = f"ipc://{tmp_path}/events"
    process = subprocess.Popen(
        [*command, str(tmp_path), "--kv-events-endpoint", events],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    lines, port = [], None
    while port is None:
        lines.append(json.loads(process.stderr.readline()))
        if "running on" in lines[-1].get("message", ""):
            port = int(lines[-1]["message"].split(":")[2].split()[0])
    own = psutil.Process(process.pid).net_connections()
    assert [each.laddr for each in own if each.status == "LISTEN"] == [("127.0.0.1", port)]
    assert any(" tokens, or " in line.get("message", "") for line in lines)
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = {**LONG, "max_tokens": 60, "stream": True}
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.subscribe("")
        reader.connect(events)
        with httpx.stream("POST", url, json=body, timeout=LIMIT_S) as stream:
            chunks = stream.iter_lines()
            next(chunks)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in chunks if line]
        told = []
        while not told or told[-1]["type"] != "AllBlocksCleared":
            assert reader.poll(60_000), told
            told += msgpack.unpackb(reader.recv_multipart()[2])[1]
    assert [event["type"] for event in told[-2:]] == ["BlockStored", "AllBlocksCleared"]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    found = [json.loads(line) for line in errors.splitlines()]
    (request,) = [line for line in found if line.get("path") == "/v1/completions"]
    assert request["completion_tokens"] == 60 and request["prompt_tokens"] > 0
    assert LONG["prompt"] not in errors
    assert (tmp_path / "rank-0-of-1" / "pages.bin").stat().st_size > 0
