"""`make test-dynamo`: NVIDIA Dynamo's frontend before workers of ours, on loopback.

Its answers are those of `megatron-hybrid serve`, option by option; what its router and its reader
know of caches; and the ends of requests and of workers.
"""

import argparse
import asyncio
import json
import random
import re
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from dynamo.common.configuration.groups.kv_router_args import KvRouterArgGroup
from http_server import DEMO, demo_service, events, run_apart, running_server
from safetensors.torch import load_file, save_file
from span_collector import TRACEPARENT, span_collector
from waiting import LIMIT_S, wait_until

from benchmarks.dynamo_cluster import (
    BLIND_FLAGS,
    GUESSING_FLAGS,
    HYBRID_FLAGS,
    MODEL,
    Cluster,
    Program,
    cluster,
    free_port,
    run_chats,
    said,
)
from megatron_hybrid.dynamo.__main__ import command_parser
from megatron_hybrid.serving.kv_events import BlockEvents
from megatron_hybrid.serving.kv_publisher import KvPublisher

CACHE_MIB = 16
LEAST_GAIN = 8.0
"""Points of skipped tokens, of the router with events over one without."""
ROUNDS = 3
SIZES = {"num_chats": 9, "turns": 4, "tokens": 12}
SIZE = 16
"""Tokens of a block."""
EXAMPLES = Path(__file__).parents[2] / "examples" / "dynamo"
PROMPT = "Once upon a time there was a king who had three daughters, and the youngest of them"
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 0.9, "seed": 11}
ANSWER = {"prompt": PROMPT, "max_tokens": 12, **GREEDY}
LONG = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, **GREEDY}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}}
SCHEMA |= {"required": ["age"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}
OTHER = {"type": "function", "function": {"name": "g", "parameters": SCHEMA}}
TWO = {"tools": [*TOOLS["tools"], OTHER]}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "f"}}, "max_tokens": 200}
FORCED = {"tool_choice": "required", "max_tokens": 200}
ONCE = {"parallel_tool_calls": False}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
REGEX, GRAMMAR = "(yes|no), [0-9]{3}", 'root ::= "ab" [0-9]+ "c"'
TURNS = [*CHAT["messages"], {"role": "assistant", "content": "a fox"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"age": 3}'}}
CALLED = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "ok"},
]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
REASONED = {"chat_template_kwargs": {"enable_thinking": False}}


def guided(theirs: str, ours: str, value: object, **more: object) -> tuple[dict, dict]:
    """A guide by the frontend's field, and by that of `serve`."""
    return {f"guided_{theirs}": value, **more}, {"structured_outputs": {ours: value}, **more}


EQUAL = {
    # To the token. A pair: what Dynamo is asked, and what `serve` is.
    "completions": [
        {},
        SEEDED,
        {"n": 3, **SEEDED, "max_tokens": 40},
        {"best_of": 1},
        {"logprobs": 3, **SEEDED},
        {"logprobs": 0},
        {"logprobs": 1, "return_tokens_as_token_ids": True},
        {"stop": "the", "max_tokens": 40},
        {"stop": ["the", "king"], "max_tokens": 40, "include_stop_str_in_output": True},
        {"n": 3, "stop": [","], **SEEDED, "max_tokens": 40},
        {"stop_token_ids": [12], "max_tokens": 40},
        {"min_tokens": 30, "stop_token_ids": [12], "max_tokens": 40},
        ({"min_tokens": 30}, {"min_tokens": 12}),
        {"ignore_eos": True, "max_tokens": 60},
        {"prompt": [5, 6, 7, 8] * 500, "max_tokens": None},  # as many as there is room for
        {"presence_penalty": 0.7, "frequency_penalty": 0.9, "max_tokens": 30},
        {"repetition_penalty": 1.4, "max_tokens": 30},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.02, **SEEDED, "max_tokens": 30},
        {"top_k": -1, **SEEDED},
        {"temperature": 1e-6, "seed": 1},
        {"temperature": 0.9, "seed": -3},
        {"temperature": 0.9, "seed": 2**63 - 1},
        {"allowed_token_ids": [5, 6, 7]},
        guided("json", "json", SCHEMA, max_tokens=80),
        guided("regex", "regex", REGEX),
        guided("choice", "choice", ["a fox", "a wolf"]),
        guided("grammar", "grammar", GRAMMAR, max_tokens=8),
        {"prompt": [PROMPT, "The fox"]},
        {"prompt": [PROMPT, "The fox"], "n": 2, **SEEDED},
        {"prompt": [5, 6, 7, 8]},
        {"prompt": [[5, 6, 7, 8], [9, 10, 11]]},
        {"user": "somebody"},
        {"cache_salt": "tenant"},
        ({"nvext": {"agent_hints": {"priority": 2}}}, {"priority": -2}),
        {"skip_special_tokens": False, "max_tokens": 60},
        STREAM,
        {"n": 2, **SEEDED, **STREAM},
        {"logprobs": 2, **STREAM},
        {"stop": ["king", "the"], "max_tokens": 40, **STREAM},
        {"prompt": [PROMPT, "The fox"], **STREAM},
    ],
    "chat/completions": [
        {},
        SEEDED,
        {"n": 2, **SEEDED},
        {"logprobs": True, "top_logprobs": 2, **SEEDED},
        {"logprobs": True},
        {"response_format": FORM, "max_tokens": 80},
        {"response_format": FORM, "max_tokens": 80, **STREAM},
        {"response_format": {"type": "json_object"}, "max_tokens": 20},
        {"response_format": {"type": "text"}},
        guided("regex", "regex", REGEX),
        TOOLS,
        TOOLS | {"tool_choice": "none"},
        TOOLS | NAMED,
        TOOLS | FORCED | ONCE,
        (TOOLS | FORCED, TOOLS | FORCED | ONCE),
        TOOLS | FORCED | ONCE | STREAM,
        (TOOLS | FORCED | {"n": 2} | SEEDED, TOOLS | FORCED | ONCE | {"n": 2} | SEEDED),
        TWO | NAMED,
        TWO | FORCED | ONCE,
        {"stop": ["the"], "max_tokens": 40},
        {"stop": ["the"], "max_tokens": 40, **STREAM},
        {"stop_token_ids": [12], "max_tokens": 40},
        {"max_completion_tokens": 5, "max_tokens": None},
        {"max_completion_tokens": 5},
        {"min_tokens": 8},
        {"presence_penalty": 0.7, "frequency_penalty": 0.9, "max_tokens": 30},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.02, **SEEDED},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]},
        {"messages": [{"role": "developer", "content": "Be short."}, *CHAT["messages"]]},
        {"messages": [*TURNS, {"role": "user", "content": "and?"}]},
        TOOLS | {"messages": [*CHAT["messages"], *CALLED]},
        {"messages": TURNS, "add_generation_prompt": False, "continue_final_message": True},
        REASONED,
        {"reasoning_effort": "low"},
        {"cache_salt": "tenant"},
        {"metadata": {"a": "b"}, "store": False, "user": "u", "service_tier": "auto"},
        STREAM,
        {"n": 2, **SEEDED, **STREAM},
        {"logprobs": True, "top_logprobs": 2, **STREAM},
    ],
}
DROPPED = {
    # The frontend answers as if these were not there. `serve` uses them, or refuses them.
    "completions": [
        {"echo": True},
        {"suffix": "The end."},
        {"logit_bias": {"12": 50}},
        {"prompt_logprobs": 1},
    ],
    "chat/completions": [
        {"logit_bias": {"12": 50}},
        {"prediction": {"type": "content", "content": "x"}},
        {"modalities": ["text", "audio"]},
        {"top_logprobs": 2},
    ],
}
REFUSED = {
    # By the frontend alone.
    "completions": [
        *({"max_tokens": 0}, {"top_p": 0}, {"temperature": 3}, {"stop": []}, {"stop": ""}),
        *({"bad_words": ["the"]}, {"response_format": FORM, "max_tokens": 80}, {"priority": 2}),
        *({"structured_outputs": {"regex": REGEX}}, {"return_token_ids": True}),
        *({"truncate_prompt_tokens": 5}, {"request_id": "r"}, {"num_speculative_tokens": 0}),
        *({"cache_breakpoints": [4]}, {"add_special_tokens": False}, {"nonsense": 1}),
        *({"n": 2}, {"model": None}, {"user": ""}),
    ],
    "chat/completions": [
        *({"max_tokens": 0}, {"max_completion_tokens": 0}, {"echo": True}, {"tools": []}),
        *({"structured_outputs": {"regex": REGEX}}, {"messages": [{"role": "x", "content": "x"}]}),
    ],
    "messages": [{}],
    "chat/completions/render": [{}],
}
WRONG = {
    # Both refuse them.
    "completions": [
        *({"max_tokens": -1}, {"max_tokens": 5000}, {"max_tokens": 5000, **STREAM}),
        *({"presence_penalty": 3}, {"temperature": -1}, {"temperature": "hot"}, {"n": 0}),
        *({"n": "two"}, {"n": 100, **SEEDED}, {"seed": 2**64}, {"logprobs": 21}, {"best_of": 2}),
        *({"logit_bias": {"x": 1}}, {"prompt": ""}, {"prompt": [PROMPT, ""]}, {"prompt": None}),
        *({"prompt": [10**6]}, {"prompt": 300 * PROMPT}, {"model": "other"}),
        *({"stream_options": {}}, guided("regex", "regex", "(?=a)b")),
    ],
    "chat/completions": [
        *({"messages": []}, {"messages": "hi"}, {"tools": [{"type": "function"}]}),
        *(TOOLS | NAMED | {"tools": TWO["tools"][1:]}, {"thinking_token_budget": 3}),
        *({"messages": [{"role": "user", "content": [PICTURE]}]}, {"chat_template": "x"}),
        *({"logprobs": True, "top_logprobs": 21}, {"response_format": {"type": "xml"}}),
    ],
}
KINDS = [
    pytest.param(relation, path, fields, id=f"{relation}-{path}-{number}")
    for relation in ("EQUAL", "DROPPED", "REFUSED", "WRONG")
    for path, kinds in globals()[relation].items()
    for number, fields in enumerate(kinds)
]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="module")
def workers(made) -> list[Program]:
    return [made.worker("--cache-mib", str(CACHE_MIB)) for _ in range(2)]


@pytest.fixture(scope="module")
def frontend(made, workers) -> Program:
    frontend = made.frontend(*HYBRID_FLAGS)
    made.wait_until_ready(frontend, len(workers))
    return frontend


@pytest.fixture(scope="module")
def plain():
    sizes = {"cache_bytes": 64 << 20, "max_requests": 16, "max_sequence_length": 2048}
    with running_server(sizes) as server:
        yield server


def ask(program, path: str, body: dict) -> dict:
    answer = httpx.post(f"{program.url}/v1/{path}", json={"model": MODEL, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def asked(program, path: str, fields: dict) -> tuple[int, list]:
    """The status, and what an answer or a stream says; of a refusal nothing."""
    body = {"model": MODEL, **(ANSWER if path == "completions" else CHAT), **fields}
    body = {name: value for name, value in body.items() if name != "model" or value}
    answer = httpx.post(f"{program.url}/v1/{path}", json=body, timeout=60)
    if not body.get("stream") or answer.status_code != 200:
        found = answer.json() if answer.status_code == 200 else {}
        return answer.status_code, shown(found) if "choices" in found else []
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line[:7] == "data: {"]
    refused = [event["error"]["code"] for event in events if event.get("error")]
    return (refused[0], []) if refused else (200, shown(joined(events)))


def joined(events: list[dict]) -> dict:
    """The answer that a stream's events are the pieces of."""
    choices: dict[int, dict] = {}
    for piece in (piece for event in events for piece in event["choices"]):
        whole = choices.setdefault(piece["index"], {"index": piece["index"], "text": ""})
        delta = piece.get("delta", piece)
        whole["text"] += delta.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            (own,) = whole.setdefault("message", {"tool_calls": [{"function": {}}]})["tool_calls"]
            for name, value in call["function"].items():
                own["function"][name] = own["function"].get(name, "") + (value or "")
        whole["finish_reason"] = piece.get("finish_reason") or whole.get("finish_reason")
        logprobs = whole.setdefault("logprobs", {})
        for name, values in (piece.get("logprobs") or {}).items():
            logprobs[name] = (logprobs.get(name) or []) + (values or [])
    return {"choices": list(choices.values()), "usage": events[-1]["usage"]}


def shown(answer: dict) -> list:
    """What choices say: texts, calls, reasons, log-probabilities; and the counts of tokens."""
    found = []
    for choice in sorted(answer["choices"], key=lambda each: each["index"]):
        message, logprobs = choice.get("message", {}), choice.get("logprobs") or {}
        values = [
            [*pair] for pair in zip(logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()))
        ]
        tops = logprobs.get("top_logprobs") or ()
        # Dynamo adds the drawn token to the most likely ones of chats.
        for entry in logprobs.get("content") or ():
            values.append([entry["token"], entry["logprob"]])
            values += [
                [top["token"], top["logprob"]]
                for top in entry["top_logprobs"]
                if top["token"] != entry["token"]
            ]
        values += [list(pair) for top in tops for pair in sorted((top or {}).items())]
        found.append(
            [
                choice.get("text") or message.get("content") or "",
                [call["function"] for call in message.get("tool_calls") or ()],
                choice["finish_reason"],
                [[token, round(value, 3)] for token, value in values],
                choice.get("prompt_logprobs") is not None,
            ]
        )
    return [*found, [answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")]]


@pytest.mark.parametrize(("relation", "path", "fields"), KINDS)
def test_each_kind_of_request_is_answered_as_by_the_server(frontend, plain, relation, path, fields):
    """Or dropped, or refused, as docs/guides/many_machines.md has it."""
    theirs, ours = fields if isinstance(fields, tuple) else (fields, fields)
    found, expected = asked(frontend, path, theirs), asked(plain, path, ours)
    if relation == "EQUAL":
        assert found == expected and found[0] == 200
    elif relation == "DROPPED":
        assert found == asked(plain, path, {}) != expected
    else:
        assert 400 <= found[0] < 500
        assert expected[0] == 200 if relation == "REFUSED" else 400 <= expected[0] < 500


def test_the_frontend_drops_the_reason_of_a_stop_and_offsets_of_texts(frontend, plain):
    fields = ANSWER | {"stop": ["the"], "logprobs": 1, "max_tokens": 40}
    theirs, ours = (ask(each, "completions", fields)["choices"][0] for each in (frontend, plain))
    assert ours["stop_reason"] == "the" and "stop_reason" not in theirs
    assert ours["logprobs"]["text_offset"] and not theirs["logprobs"]["text_offset"]


def test_responses_are_those_of_the_server(frontend, plain):
    body = {"input": PROMPT, "max_output_tokens": 12, "temperature": 0}
    texts = [
        ask(each, "responses", body)["output"][0]["content"][0]["text"]
        for each in (frontend, plain)
    ]
    assert texts[0] == texts[1] != ""


def test_salts_divide_caches_and_priorities_are_taken(frontend):
    prompt = said(random.Random(1), 100)
    for salt in ("a", "b"):
        for skips in (False, True):
            body = ANSWER | {"prompt": prompt, "cache_salt": salt}
            body |= {"nvext": {"agent_hints": {"priority": 2}}}
            usage = ask(frontend, "completions", body)["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == skips


def test_refusals_say_why(frontend):
    refused = {"guided_regex": ("(?=a)b", "structured_outputs")}
    refused |= {"max_tokens": (5000, "exceed --context=2048: ask for at most")}
    for field, (value, text) in refused.items():
        body = {"model": MODEL, **ANSWER, field: value}
        answer = httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400 and text in answer.text


def running(workers) -> list[float]:
    """Requests that run on each worker."""
    return [worker.metric("vllm:num_requests_running") for worker in workers]


def test_a_client_that_goes_away_ends_its_request(frontend, workers):
    body = {"model": MODEL, **LONG, **SEEDED, "max_tokens": 1500, "n": 2, "stream": True}
    with httpx.stream("POST", f"{frontend.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # which would close the stream if nobody had it
        next(lines)
        wait_until(lambda: sum(running(workers)) == 2)
    wait_until(lambda: sum(running(workers)) == 0)


def test_health_and_metrics_are_those_of_the_engine(frontend, workers):
    for worker in workers:
        wait_until(lambda worker=worker: is_ready(worker))
        assert is_ready(worker, "engine/live")
        assert worker.metric("megatron_hybrid_pool_bytes") == CACHE_MIB << 20


def is_ready(program: Program, path: str = "health") -> bool:
    try:
        return httpx.get(f"{program.url}/{path}").status_code == 200
    except httpx.TransportError:
        return False


def test_the_flags_of_manifests_and_pages_are_there():
    (graph,) = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    frontend, worker = (
        each["podTemplate"]["spec"]["containers"][0] for each in graph["spec"]["components"]
    )
    assert command_parser().read(worker["args"]).tp == 2
    parser = argparse.ArgumentParser()
    KvRouterArgGroup().add_arguments(parser)
    known = parser.parse_known_args([*frontend["args"], *GUESSING_FLAGS, *BLIND_FLAGS])[0]
    assert not known.router_track_active_blocks and not known.use_kv_events and known.load_aware


def test_dynamo_s_reader_knows_what_can_be_resumed(made):
    """Its indexer, which reads the events of engines: also what came before it, by a replay."""
    service = demo_service({"cache_bytes": 8 << 20})
    engine, draw = service.engine, random.Random(2)
    prompts = [service.tokenizer.tokenize(said(draw, 150)) for _ in range(12)]
    prompts += [prompt[:100] + service.tokenizer.tokenize(said(draw, 60)) for prompt in prompts]
    port, name = free_port(), {"model_name": MODEL}
    indexer = made.start(["-m", "dynamo.indexer", "--port", str(port)], port)
    wait_until(lambda: is_ready(indexer))

    async def matched(http: httpx.AsyncClient, tokens: list[int]) -> int:
        answer = await http.post(f"{indexer.url}/query", json={"token_ids": tokens, **name})
        scores = answer.json()["scores"]
        return max([count for rank in scores.values() for count in rank.values()], default=0)

    async def check() -> int:
        endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        with KvPublisher(*endpoints) as publisher:
            publisher.begin(await engine.watch_cache(BlockEvents))
            for prompt in prompts[:4]:
                await engine.generate(prompt)
            async with httpx.AsyncClient() as http:
                body = {"instance_id": 1, "block_size": SIZE, **name}
                body |= {"endpoint": publisher.endpoint}
                body |= {"replay_endpoint": publisher.replay_endpoint}
                answer = await http.post(f"{indexer.url}/register", json=body)
                assert answer.status_code < 300, answer.text
                await asyncio.sleep(1.5)  # until it listens
                for prompt in prompts[4:]:
                    await engine.generate(prompt)
                await asyncio.sleep(0.5)
                skips = [(await engine.explain(p)).match.skipped_tokens for p in prompts]
                known = [await matched(http, prompt) for prompt in prompts]
                for prompt, count in zip(prompts, known):
                    # A block is told while a state at its end, or behind it, can be resumed.
                    shared = [min(common(prompt, p), skip) for p, skip in zip(prompts, skips)]
                    assert count == max(shared) // SIZE * SIZE
                return sum(known)

    try:
        total = run_apart(check())
    finally:
        run_apart(service.close())
    everything = sum(len(prompt) for prompt in prompts)
    assert 0.1 * everything < total < 0.9 * everything  # some is evicted


def common(a: list[int], b: list[int]) -> int:
    """Tokens that two prompts begin with."""
    return next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), len(a))


def test_with_a_broker_all_sockets_of_workers_listen_on_loopback(tmp_path):
    """And the router hears of their caches: it sends a prompt where it was before."""
    takes, gives = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    with cluster(tmp_path, DYN_ZMQ_BROKER_URL=f"xsub={takes} , xpub={gives}") as made:
        made.start([str(EXAMPLES / "broker.py"), takes, gives])
        workers = [made.worker() for _ in range(2)]
        frontend = made.frontend(*HYBRID_FLAGS)
        made.wait_until_ready(frontend, len(workers))
        for number in range(6):
            usage = ask(frontend, "completions", ANSWER)["usage"]["prompt_tokens_details"]
            assert number == 0 or usage["cached_tokens"] > 0
            time.sleep(0.5)  # until the router knows
        for worker in workers:
            ends = psutil.Process(worker.process.pid).net_connections("inet")
            assert {end.laddr.ip for end in ends if end.status == "LISTEN"} == {"127.0.0.1"}


def test_chats_skip_more_where_the_router_knows_hybrid_caches(made, frontend, workers):
    blind = made.frontend(*BLIND_FLAGS)
    made.wait_until_ready(blind, len(workers))
    gains = []
    for seed in range(ROUNDS):
        known, unknown = (
            asyncio.run(run_chats(each.url, 2 * seed + number, **SIZES)).skipped
            for number, each in enumerate((frontend, blind))
        )
        gains.append(known - unknown)
        print(f"skipped with events {known:.1f} %, without {unknown:.1f} %")
    blind.end()
    assert statistics.median(gains) >= LEAST_GAIN


class Stream:
    """Reads an answer in a thread.

    Attributes: text, times of its pieces.
    """

    def __init__(self, frontend: Program, body: dict):
        self.text, self.times = "", []
        self._body = {"model": MODEL, **body, "stream": True}
        self._url = frontend.url
        self.result = ThreadPoolExecutor(1).submit(self._read)

    def _read(self) -> str:
        for event in events(self._url, "/v1/completions", self._body):
            for choice in event["choices"]:
                self.text += choice["text"]
                self.times.append(time.perf_counter())
        return self.text


def signaled(frontend, workers, number) -> tuple[Program, list[Stream], float]:
    """Send a signal to the worker of two streams, a greedy and a seeded one."""
    streams = [Stream(frontend, LONG | how) for how in (GREEDY, SEEDED)]
    wait_until(lambda: all(len(stream.times) > 20 for stream in streams))
    (worker,) = [each for each, count in zip(workers, running(workers)) if count == 2]
    worker.process.send_signal(number)
    at = time.perf_counter()
    return worker, streams, at


@pytest.fixture(scope="module")
def texts(frontend) -> list[str]:
    """Of the two streams that no worker leaves."""
    bodies = [LONG | how for how in (GREEDY, SEEDED)]
    return [ask(frontend, "completions", body)["choices"][0]["text"] for body in bodies]


def test_streams_end_on_a_worker_that_drains(made, frontend, workers, texts):
    worker, streams, _ = signaled(frontend, workers, signal.SIGTERM)
    wait_until(lambda: not is_ready(worker))
    assert is_ready(worker, "engine/live")
    assert [stream.result.result(60) for stream in streams] == texts
    assert worker.process.wait(30) == 0
    assert "registers anew" not in worker.log.read_text()
    workers.remove(worker)


def test_streams_go_on_where_a_worker_is_killed(made, frontend, workers, texts):
    """On a worker of two ranks, which then loses one."""
    ask(frontend, "completions", ANSWER)  # so that the router sends the streams there
    ranks = made.worker("--cache-mib", str(CACHE_MIB), "--tp", "2")
    made.wait_until_ready(frontend, 2)
    worker, streams, at = signaled(frontend, workers, signal.SIGKILL)
    assert [stream.result.result(60) for stream in streams] == texts
    gaps = [(b - a, b) for s in streams for a, b in pairwise([at, *(t for t in s.times if t > at)])]
    print(f"from the kill until a stream goes on: {1000 * (max(gaps)[1] - at):.0f} ms")
    workers.remove(worker)
    children = psutil.Process(ranks.process.pid).children()
    next(each for each in children if each.environ().get("RANK") == "1").kill()
    assert ranks.process.wait(30) != 0
    assert "rank 1" in ranks.log.read_text()


def test_a_paused_worker_comes_back_with_what_its_cache_has(tmp_path):
    """After more seconds than its lease in discovery has. It ends where it cannot come back."""
    with cluster(tmp_path) as made:
        worker, frontend = made.worker("--cache-mib", str(CACHE_MIB)), made.frontend(*HYBRID_FLAGS)
        made.wait_until_ready(frontend, 1)
        body = {"prompt": 6 * PROMPT, "max_tokens": 4, **GREEDY}

        def cost() -> float:
            ask(frontend, "completions", body)
            return float(re.findall(r"logit\W*=\W*([0-9.]+)", plain_log(frontend))[-1])

        unknown, known = cost(), cost()
        assert unknown > known
        worker.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: made.workers_of(frontend) == 0)
        worker.process.send_signal(signal.SIGCONT)
        wait_until(lambda: made.workers_of(frontend) == 1)
        wait_until(lambda: cost() == known)  # when the blocks are published anew
        wait_until(lambda: is_ready(worker))
        shutil.rmtree(tmp_path / "discovery")
        wait_until(lambda: not is_ready(worker))
        assert worker.process.wait(LIMIT_S) == 2
        assert "start it again; and frontends, too" in worker.log.read_text()


def test_other_weights_wait_until_those_before_have_gone(tmp_path):
    """Of two that wait and come at the same moment one has the name, and the other one waits on."""
    with cluster(tmp_path) as made:
        old, frontend = made.worker("--cache-mib", str(CACHE_MIB)), made.frontend(*HYBRID_FLAGS)
        made.wait_until_ready(frontend, 1)
        new = []
        for factor in (1.05, 0.5):
            trained = tmp_path / str(factor)
            shutil.copytree(DEMO, trained)
            weights = load_file(trained / "model.safetensors")
            weights = {name: factor * each for name, each in weights.items()}
            save_file(weights, trained / "model.safetensors")
            new.append(made.worker("--cache-mib", str(CACHE_MIB), model=str(trained)))
        wait_until(lambda: all("has other weights: end" in plain_log(each) for each in new))
        wait_until(lambda: is_ready(old))
        assert not any(map(is_ready, new)) and is_ready(new[0], "engine/live")
        text = ask(frontend, "completions", ANSWER)["choices"][0]["text"]
        stream = Stream(frontend, LONG | GREEDY)
        wait_until(lambda: len(stream.times) > 20)
        for each in new:
            each.process.send_signal(signal.SIGSTOP)
        assert old.end() == 0
        assert stream.result.result(60).startswith(text)
        time.sleep(2)  # so that both look at discovery at once
        for each in new:
            each.process.send_signal(signal.SIGCONT)
        wait_until(lambda: asked(frontend, "completions", {})[0] == 200 and any(map(is_ready, new)))
        (waits,) = [each for each in new if not is_ready(each)]
        assert ask(frontend, "completions", ANSWER)["choices"][0]["text"] != text
        assert waits.end() == 0


def plain_log(program: Program) -> str:
    """Its log without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", program.log.read_text())


def test_a_request_through_the_frontend_has_one_trace(tmp_path):
    """That of its caller, or else one of the frontend's, whose spans the collector gets, too."""
    with span_collector() as collector:
        settings = {"OTEL_EXPORT_ENABLED": "1"}
        settings |= {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.endpoint}
        settings |= {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        with cluster(tmp_path, **settings) as made:
            made.worker("--cache-mib", str(CACHE_MIB), "--otlp-traces-endpoint", collector.endpoint)
            frontend = made.frontend(*HYBRID_FLAGS)
            made.wait_until_ready(frontend, 1)
            names = ("http-request", "handle_payload", "llm_request")
            for headers in ({"traceparent": TRACEPARENT}, {}):
                collector.spans.clear()
                body = {"model": MODEL, **ANSWER}
                httpx.post(f"{frontend.url}/v1/completions", json=body, headers=headers, timeout=60)
                wait_until(lambda: collector.spans.keys() >= {*names})
                first, worker, ours = (collector.spans[name] for name in names)
                assert first.trace_id == worker.trace_id == ours.trace_id
                assert ours.parent_span_id == worker.span_id
                assert first.parent_span_id.hex() == headers.get("traceparent", "")[36:52]
