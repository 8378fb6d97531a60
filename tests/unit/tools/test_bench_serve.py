"""The load generator on a server that answers by a script: what is counted, however it comes."""

import asyncio
import json
import math
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
from waiting import LIMIT_S

from megatron_hybrid import cli
from megatron_hybrid.tools.bench_serve import (
    WIDTH,
    Call,
    Outcome,
    Run,
    Server,
    arrivals,
    read_calls,
    render,
    run,
    summarize,
)

OK = b"HTTP/1.1 200 OK\r\n"
MODELS = json.dumps({"data": [{"id": "scripted"}]}).encode()


class ScriptedServer:
    """A server in a thread.

    Args:
        script: body of a request -> the pieces of the answer, each written by itself; at None the
            server waits until the client has gone.
        hold: answers begin when so many requests have come.

    Attributes:
        bodies: of the requests, in their order.
        most_active: requests at a time.
    """

    def __init__(self, script, hold=1):
        self._script, self._hold = script, hold
        self.bodies, self.heads = [], []
        self._active = self.most_active = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait()

    async def _serve(self):
        self._loop = asyncio.get_running_loop()
        self._end, self._held = asyncio.Event(), asyncio.Event()
        async with await asyncio.start_server(self._answer, sock=self._listener):
            self._ready.set()
            await self._end.wait()

    def stop(self):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    async def _answer(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            if head.startswith(b"GET /v1/models"):
                writer.write(OK + b"Content-Length: %d\r\n\r\n" % len(MODELS) + MODELS)
                return
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            body = json.loads(await reader.readexactly(int(length)))
            self.bodies.append(body)
            self._active += 1
            self.most_active = max(self.most_active, self._active)
            if len(self.bodies) >= self._hold:
                self._held.set()
            await self._held.wait()
            await asyncio.sleep(0.01)  # in which a request too many would come
            pieces = self._script(body)
            self._active -= 1
            for piece in pieces:
                if piece is None:
                    await reader.read()
                    return
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        finally:
            writer.close()


@contextmanager
def scripted(script, hold=1):
    server = ScriptedServer(script, hold)
    try:
        yield server
    finally:
        server.stop()


def event(value):
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def text(said, reason=None):
    return event({"choices": [{"index": 0, "text": said, "finish_reason": reason}], "usage": None})


def usage(prompt=10, cached=4, output=3, **fields):
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": {**counts, **fields}}) + b"data: [DONE]\n\n"


THREE_TOKENS = text("Ein ") + text("süßer ") + text("Brei 🦊", "length")
STREAM = THREE_TOKENS + usage(prefix={"miss_reason": "no_shared_prefix"})


def chunked(stream, size):
    """The body in chunks of this size."""
    parts = [stream[start : start + size] for start in range(0, len(stream), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])


def answer(stream):
    return [OK + b"Transfer-Encoding: chunked\r\n\r\n", chunked(stream, len(stream))]


def calls(count, sessions=None):
    body = [json.dumps({"prompt": str(i)}).encode() for i in range(count)]
    sessions = sessions or range(count)
    return [Call("/v1/completions", body[i], session, None) for i, session in enumerate(sessions)]


def measured(server, count=1, limit=None, sessions=None):
    return run(Server(server.url), calls(count, sessions), [0.0] * count, limit)


def write(tmp_path, *rows):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# Streams ----------------------------------------------------------------------------------------

CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
LAYOUTS = {
    "whole": [CHUNKED, chunked(STREAM, len(STREAM))],
    "an event a chunk": [
        CHUNKED,
        *(b"%x;x=y\r\n%s\n\n\r\n" % (len(e) + 2, e) for e in STREAM.split(b"\n\n")[:-1]),
        b"0\r\n\r\n",
    ],
    "no chunks": [OK + b"Content-Length: %d\r\n\r\n" % len(STREAM), STREAM],
    "to the end": [OK + b"\r\n", STREAM],
    "other lines": [OK + b"\r\n", b": comment\r\n" + STREAM.replace(b"\n", b"\r\n")],
    "no spaces": [OK + b"\r\n", STREAM.replace(b"data: ", b"data:")],
    **{f"chunks of {size}": [CHUNKED, chunked(STREAM, size)] for size in (1, 2, 3, 7, 64)},
    "single bytes": [bytes([byte]) for byte in CHUNKED + chunked(STREAM, 50)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_means_the_same_however_it_is_cut(layout):
    with scripted(lambda body: LAYOUTS[layout]) as server:
        (found,) = measured(server).outcomes
    assert (found.status, found.error) == (200, None)
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (10, 4, 3)
    assert found.miss_reason == "no_shared_prefix"
    assert len(found.itl_ms) == 2 and found.ttft_ms > 0
    assert found.ttft_ms + sum(found.itl_ms) <= found.e2e_ms


def test_only_events_that_show_tokens_are_timed():
    deltas = [{"role": "assistant", "content": ""}, {}, {"reasoning": "a"}, {"content": "b"}]
    stream = b"".join(event({"choices": [{"delta": delta}]}) for delta in deltas)
    stream += event({"choices": [{"delta": {}, "finish_reason": "stop"}]}) + usage()
    with scripted(lambda body: answer(stream)) as server:
        (found,) = measured(server).outcomes
    assert len(found.itl_ms) == 2  # reasoning, content, and the stop token


def test_counts_that_a_server_does_not_give_are_zero():
    counts = {"prompt_tokens": 7, "completion_tokens": 0, "prompt_tokens_details": None}
    stream = event({"choices": [], "usage": counts})
    with scripted(lambda body: answer(stream)) as server:
        (found,) = measured(server).outcomes
    assert (found.error, found.prompt_tokens, found.cached_tokens) == (None, 7, 0)
    assert found.ttft_ms is None


# Failures ---------------------------------------------------------------------------------------

BUSY = json.dumps({"error": {"message": "320 requests run or wait", "type": "busy"}}).encode()
FAILURES = {
    "503": (
        [b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(BUSY), BUSY],
        ("503", "320 requests run or wait"),
    ),
    "no JSON": ([b"HTTP/1.1 502 Bad Gateway\r\n\r\nno upstream"], ("502", "no upstream")),
    "an event": (
        answer(text("a") + event({"error": {"message": "out of memory"}})),
        ("broken stream", "out of memory"),
    ),
    "cut off": (answer(STREAM)[:1], ("broken stream", "the connection ended before the answer")),
    "cut off in a chunk": (
        [CHUNKED, chunked(STREAM, 64)[:100]],
        ("broken stream", "the connection ended before the answer"),
    ),
    "no usage": (answer(THREE_TOKENS), ("broken stream", "the stream ended without `usage`")),
    "an event that is no JSON": (answer(b"data: {\n\n"), ("broken stream", "JSONDecodeError: ")),
    "an event that is no object": (answer(b"data: 1\n\n"), ("broken stream", "TypeError: ")),
    "no HTTP": ([b"SSH-2.0-OpenSSH\r\n"], ("no answer", "which is no HTTP")),
    "nothing": ([], ("no answer", "the connection ended before the answer did")),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_counted_and_the_others_go_on(name):
    pieces, (kind, message) = FAILURES[name]
    with scripted(lambda body: pieces if body["prompt"] == "1" else answer(STREAM)) as server:
        found = summarize(measured(server, count=3))
    assert (found["ok"], found["failed"]) == (2, {kind: 1})
    assert message in found["first_error"]
    assert (found["prompt_tokens"], found["output_tokens"]) == (20, 6)
    shown = render(found)
    assert f"2 requests ok, 1 failed (1 {kind})" in shown and "first error: " in shown


def test_a_server_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    (found,) = run(Server(url), calls(1), [0.0], None).outcomes
    assert found.failure == "no answer" and "ConnectionRefusedError" in found.error
    with pytest.raises(ValueError, match=rf"{url} does not answer .*start the server first"):
        Server(url).first_model()
    for url in ("127.0.0.1:8000", "ftp://x", "http://"):
        with pytest.raises(ValueError, match=r"give a URL such as http://127\.0\.0\.1:8000"):
            Server(url)


# Order and load ---------------------------------------------------------------------------------


def prompts(server):
    return [int(body["prompt"]) for body in server.bodies]


@pytest.mark.parametrize("limit", [1, 3, 8, None])
def test_as_many_requests_run_as_are_allowed(limit):
    with scripted(lambda body: answer(STREAM), hold=limit or 12) as server:
        found = measured(server, 12, limit)
    assert server.most_active == (limit or 12)
    assert [each.index for each in sorted_rows(found)] == sorted(prompts(server))
    assert len(found.outcomes) == 12


def sorted_rows(found):
    return sorted(found.outcomes, key=lambda each: each.index)


def test_one_at_a_time_is_the_order_of_the_file():
    with scripted(lambda body: answer(STREAM)) as server:
        measured(server, 9, 1, sessions="aabacbcaa")
    assert prompts(server) == list(range(9))


def test_a_turn_waits_for_the_one_before_and_others_pass_it():
    with scripted(lambda body: answer(STREAM), hold=3) as server:
        found = measured(server, 6, 3, sessions="aaabbc")
    assert set(prompts(server)[:3]) == {0, 3, 5}
    rows = sorted_rows(found)
    for before, after in ((0, 1), (1, 2), (3, 4)):
        end = rows[before].start_s + rows[before].e2e_ms / 1e3
        assert rows[after].start_s >= end


def test_poisson_arrivals_follow_from_the_seed():
    times = arrivals(calls(4000), 20.0, seed=7)
    assert times == arrivals(calls(4000), 20.0, seed=7) != arrivals(calls(4000), 20.0, seed=8)
    gaps = np.diff(times, prepend=0)
    assert gaps.min() > 0
    assert np.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert np.std(gaps) == pytest.approx(1 / 20, rel=0.05)  # of exponential ones
    assert arrivals(calls(3), math.inf) == [0.0] * 3


def test_requests_begin_at_their_times():
    with scripted(lambda body: answer(STREAM)) as server:
        found = run(Server(server.url), calls(3), [0.0, 0.03, 0.06], None)
    for row, start in zip(sorted_rows(found), [0.0, 0.03, 0.06]):
        assert row.start_s >= start


def test_recorded_arrivals(tmp_path):
    rows = [{"prompt": "a", "arrival": 5}, {"prompt": "b", "arrival": 7.5}]
    recorded = read_calls(write(tmp_path, *rows), "m")
    assert arrivals(recorded, None) == [0.0, 2.5]
    untimed = read_calls(write(tmp_path, *rows, {"prompt": "c"}), "m")
    with pytest.raises(ValueError, match="1 of 3 lines have no `arrival`"):
        arrivals(untimed, None)


# The workload -----------------------------------------------------------------------------------


def bodies(path, **options):
    return [(call.path, json.loads(call.body)) for call in read_calls(path, "m", **options)]


def test_what_is_sent(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    path = write(
        tmp_path,
        {"prompt": "text", "max_tokens": 5, "cache_salt": "s"},
        {"tokens": [7, 300], "output": [1, 2, 3]},
        {"messages": chat, "tools": tools, "output": "known as text"},
        {"prompt": chat},
    )
    shared = {"model": "m", "temperature": 0.0, "stream": True}
    shared["stream_options"] = {"include_usage": True}
    assert bodies(path, output_len=40) == [
        ("/v1/completions", {**shared, "prompt": "text", "max_tokens": 5, "cache_salt": "s"}),
        ("/v1/completions", {**shared, "prompt": [7, 300], "max_tokens": 3}),
        (
            "/v1/chat/completions",
            {**shared, "messages": chat, "tools": tools, "max_tokens": 40},
        ),
        ("/v1/chat/completions", {**shared, "messages": chat, "max_tokens": 40}),
    ]
    found = bodies(path, limit=2, ignore_eos=True, temperature=0.5, vocab_size=256)
    assert [body["prompt"] for _, body in found] == ["text", [7, 44]]
    assert all(body["ignore_eos"] and body["temperature"] == 0.5 for _, body in found)


@pytest.mark.parametrize("row", [{"prompt": 1}, {"tokens": [1, -2]}, {"tokens": [[1]]}, {"x": 1}])
def test_a_bad_line_is_named(tmp_path, row):
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2: "):
        read_calls(write(tmp_path, {"prompt": "a"}, row), "m")


# The report -------------------------------------------------------------------------------------


def some_outcomes():
    rng = np.random.default_rng(3)
    reasons = [None, "no_shared_prefix", "state_evicted"]
    found = []
    for index in range(200):
        itl = rng.exponential(9, rng.integers(0, 30)).tolist()
        prompt = int(rng.integers(1, 3000))
        times = float(rng.exponential(50)), itl, float(rng.exponential(900))
        counts = prompt, int(rng.integers(0, prompt + 1)), len(itl) + 1, reasons[index % 3]
        found.append(Outcome(index, 0.0, 200, None, *times, *counts))
    return found


def test_the_report_s_arithmetic():
    ok = some_outcomes()
    wrong = [Outcome(200, 0.0, 503, "busy", e2e_ms=7e6), Outcome(201, 0.0, None, "refused")]
    found = summarize(Run(205, [*ok[:9], *wrong, *ok[9:]], seconds=12.5, cpu_seconds=2.5))
    assert (found["requests"], found["ok"], found["unfinished"]) == (202, 200, 3)
    assert found["failed"] == {"503": 1, "no answer": 1} and found["first_error"] == "busy"
    prompt, cached, output = (
        np.sum([getattr(each, name) for each in ok])
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    assert (found["prompt_tokens"], found["cached_tokens"]) == (prompt, cached)
    assert found["skip_rate"] == pytest.approx(cached / prompt)
    rates = [found[f"{name}_per_s"] for name in ("requests", "prompt_tokens", "output_tokens")]
    assert rates == pytest.approx([200 / 12.5, prompt / 12.5, output / 12.5])
    assert found["client_cpu"] == pytest.approx(0.2)
    total = sum(each.e2e_ms for each in [*ok, *wrong])
    assert found["mean_concurrency"] == pytest.approx(total / 12_500)
    for key, values in {
        "ttft_ms": [each.ttft_ms for each in ok],
        "itl_ms": np.concatenate([each.itl_ms for each in ok]),
        "e2e_ms": [each.e2e_ms for each in ok],
    }.items():
        for percent in (50, 90, 99):
            assert found[key][f"p{percent}"] == pytest.approx(np.percentile(values, percent))
    assert found["miss_reasons"] == {"none": 67, "no_shared_prefix": 67, "state_evicted": 66}


@pytest.mark.parametrize("ok", [0, 1, 200])
def test_the_report_fits_80_columns(ok):
    outcomes = [*some_outcomes()[:ok], Outcome(0, 0.0, 200, "x" * 500), Outcome(0, 0.0, 503, "")]
    for each in outcomes[:ok]:
        each.prompt_tokens *= 1_000_000
    shown = render(summarize(Run(10**6, outcomes, seconds=1e-3)))
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert not any(line.endswith(" ") for line in shown.splitlines())


# The command ------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    path, out = write(tmp_path, *({"prompt": str(i)} for i in range(5))), tmp_path / "out.json"
    arguments = ["bench-serve", path, "--num-prompts", "4", "--json", str(out), "--base-url"]
    with scripted(lambda body: answer(STREAM)) as server:
        assert cli.main([*arguments, f"{server.url}/v1"]) == 0
        assert {body["model"] for body in server.bodies} == {"scripted"}
        assert all(b"\r\nAuthorization: Bearer sesame\r\n" in head for head in server.heads)
    shown, values = capsys.readouterr().out, json.loads(out.read_text())
    assert "4 requests ok, 0 failed" in shown and "40.0 %" in shown
    assert values["output_tokens"] == sum(row["completion_tokens"] for row in values["rows"]) == 12
    assert [row["index"] for row in values["rows"]] == [0, 1, 2, 3]
    assert all(len(row["itl_ms"]) == 2 for row in values["rows"])


def test_64_requests_run_by_default(tmp_path):
    path = write(tmp_path, *({"prompt": str(i)} for i in range(80)))
    with scripted(lambda body: answer(STREAM), hold=64) as server:
        assert cli.main(["bench-serve", path, "--base-url", server.url]) == 0
    assert server.most_active == 64


def test_ctrl_c_prints_what_was_measured(tmp_path, capsys, interrupts):
    def script(body):
        if body["prompt"] == "2":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            return [CHUNKED, None]
        return answer(STREAM)

    path, out = write(tmp_path, *({"prompt": str(i)} for i in range(5))), tmp_path / "out.json"
    with scripted(script) as server:
        arguments = ["bench-serve", path, "--base-url", server.url, "--max-concurrency", "1"]
        assert cli.main([*arguments, "--json", str(out)]) == 130
    assert "2 requests ok, 0 failed, 3 unfinished" in capsys.readouterr().out
    assert Counter(row["error"] for row in json.loads(out.read_text())["rows"]) == {None: 2}


def test_the_load_generator_needs_no_torch():
    code = "import sys, megatron_hybrid.tools.bench_serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
