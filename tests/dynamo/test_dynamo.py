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
from http_server import DEMO, demo_service, run_apart, running_server
from safetensors.torch import load_file, save_file
from waiting import wait_until

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
from benchmarks.dynamo_cluster import (
    SIZES as WORKER_SIZES,
)
from megatron_hybrid.dynamo.__main__ import read_options
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
COMPLETIONS = {
    # What is asked of both; or of Dynamo, and of the server.
    "greedy": {},
    "samples": {"n": 3, "temperature": 0.8, "seed": 3, "max_tokens": 40},
    "log-probabilities": {"logprobs": 3, **SEEDED},
    "a stop string": {"stop": ["the"], "max_tokens": 40},
    "a stop string that stays": {
        **{"stop": ["the", "king"], "max_tokens": 40, "include_stop_str_in_output": True}
    },
    "a stop token": {"stop_token_ids": [12], "max_tokens": 40},
    "stop strings of samples": {"n": 3, "stop": [","], **SEEDED, "max_tokens": 40},
    "the least tokens": {"min_tokens": 30, "stop_token_ids": [12], "max_tokens": 40},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.9, "max_tokens": 30},
    "a penalty of the prompt, too": {"repetition_penalty": 1.4, "max_tokens": 30},
    "rows": {"top_k": 5, "top_p": 0.8, "min_p": 0.02, **SEEDED, "max_tokens": 30},
    "a regex": (
        {"guided_regex": "(yes|no), [0-9]{3}"},
        {"structured_outputs": {"regex": "(yes|no), [0-9]{3}"}},
    ),
    "choices": (
        {"guided_choice": ["a fox", "a wolf"]},
        {"structured_outputs": {"choice": ["a fox", "a wolf"]}},
    ),
    "a grammar": (
        {"guided_grammar": 'root ::= "ab" [0-9]+ "c"', "max_tokens": 8},
        {"structured_outputs": {"grammar": 'root ::= "ab" [0-9]+ "c"'}, "max_tokens": 8},
    ),
    "several prompts": {"prompt": [PROMPT, "The fox"]},
    "token ids": {"prompt": [5, 6, 7, 8]},
}
CHATS = {
    "greedy": {},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2, **SEEDED},
    "a JSON schema": {"response_format": FORM, "max_tokens": 80},
    "a JSON object": {"response_format": {"type": "json_object"}, "max_tokens": 20},
    "samples": {"n": 2, **SEEDED},
}


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


def shown(answer: dict) -> list[tuple]:
    """What choices say: texts, reasons, log-probabilities."""
    found = []
    for choice in answer["choices"]:
        message = choice.get("message", {})
        logprobs = choice.get("logprobs") or {}
        values = logprobs.get("token_logprobs")
        if (content := logprobs.get("content")) is not None:
            values = [entry["logprob"] for entry in content]
            # Dynamo adds the drawn token to the most likely ones.
            values += [
                top["logprob"]
                for entry in content
                for top in entry["top_logprobs"]
                if top["token"] != entry["token"]
            ]
        text = choice.get("text") or message.get("content")
        rounded = values and [round(value, 3) for value in values]
        found.append((choice["index"], text, choice["finish_reason"], rounded))
    return sorted(found, key=lambda each: each[0])


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions_are_those_of_the_server(frontend, plain, name):
    asked = COMPLETIONS[name]
    theirs, ours = asked if isinstance(asked, tuple) else (asked, asked)
    found = ask(frontend, "completions", ANSWER | theirs)
    expected = ask(plain, "completions", ANSWER | ours)
    assert shown(found) == shown(expected)
    for count in ("prompt_tokens", "completion_tokens"):
        if "a stop token" not in name:  # Dynamo may count what it does not show
            assert found["usage"][count] == expected["usage"][count]


@pytest.mark.parametrize("name", CHATS)
def test_chats_are_those_of_the_server(frontend, plain, name):
    found, expected = (
        ask(each, "chat/completions", CHAT | CHATS[name]) for each in (frontend, plain)
    )
    assert shown(found) == shown(expected)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_calls_of_tools_are_read_and_forced(frontend, plain, choice):
    """Without a word after them. `serve` is asked for one call."""
    body = CHAT | TOOLS | {"tool_choice": choice, "max_tokens": 300}
    (found,) = ask(frontend, "chat/completions", body)["choices"]
    one = {"parallel_tool_calls": False}
    (expected,) = ask(plain, "chat/completions", body | one)["choices"]
    (call,), (right,) = (each["message"]["tool_calls"] for each in (found, expected))
    assert call["function"] == right["function"]
    assert found["finish_reason"] == expected["finish_reason"] == "tool_calls"
    assert not found["message"].get("content")
    assert json.loads(call["function"]["arguments"])["age"] <= 99


def test_salts_divide_caches_and_priorities_are_taken(frontend):
    prompt = said(random.Random(1), 100)
    for salt in ("a", "b"):
        for skips in (False, True):
            body = ANSWER | {"prompt": prompt, "cache_salt": salt}
            body |= {"nvext": {"agent_hints": {"priority": 2}}}
            usage = ask(frontend, "completions", body)["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == skips


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"max_tokens": 5000}, "exceed --context=2048: ask for at most"),
        ({"guided_regex": "(?=a)b"}, "structured_outputs"),
    ],
)
def test_refusals_say_why(frontend, body, text):
    answer = httpx.post(
        f"{frontend.url}/v1/completions", json={"model": MODEL, **ANSWER, **body}, timeout=60
    )
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
        assert httpx.get(f"{worker.url}/health").json()["status"] == "ready"
        assert worker.metric("megatron_hybrid_pool_bytes") == CACHE_MIB << 20


def test_the_flags_of_manifests_and_pages_are_there():
    (graph,) = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    frontend, worker = (
        each["podTemplate"]["spec"]["containers"][0] for each in graph["spec"]["components"]
    )
    assert read_options(worker["args"]).tp == 2
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
    wait_until(lambda: answers(f"{indexer.url}/health"))

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


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


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
        self._url = f"{frontend.url}/v1/completions"
        self.result = ThreadPoolExecutor(1).submit(self._read)

    def _read(self) -> str:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
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


def length(pair: tuple[float, float]) -> float:
    return pair[1] - pair[0]


@pytest.fixture(scope="module")
def texts(frontend) -> list[str]:
    """Of the two streams that no worker leaves."""
    bodies = [LONG | how for how in (GREEDY, SEEDED)]
    return [ask(frontend, "completions", body)["choices"][0]["text"] for body in bodies]


def test_streams_end_on_a_worker_that_drains(made, frontend, workers, texts):
    worker, streams, _ = signaled(frontend, workers, signal.SIGTERM)
    assert [stream.result.result(60) for stream in streams] == texts
    assert worker.process.wait(30) == 0
    workers.remove(worker)


def test_streams_go_on_where_a_worker_is_killed(made, frontend, workers, texts):
    """On a worker of two ranks, which then loses one."""
    ask(frontend, "completions", ANSWER)  # so that the router sends the streams there
    ranks = made.worker("--cache-mib", str(CACHE_MIB), "--tp", "2")
    made.wait_until_ready(frontend, 2)
    worker, streams, at = signaled(frontend, workers, signal.SIGKILL)
    assert [stream.result.result(60) for stream in streams] == texts
    on = [max(pairwise([at, *(t for t in s.times if t > at)]), key=length)[1] for s in streams]
    print(f"from the kill until the streams go on: {1000 * (max(on) - at):.0f} ms")
    workers.remove(worker)
    children = psutil.Process(ranks.process.pid).children()
    next(each for each in children if each.environ().get("RANK") == "1").kill()
    assert ranks.process.wait(30) != 0
    assert "rank 1" in ranks.log.read_text()


def test_a_paused_worker_comes_back_with_what_its_cache_has(tmp_path):
    """After more seconds than its lease in discovery has."""
    with cluster(tmp_path) as made:
        worker, frontend = made.worker("--cache-mib", str(CACHE_MIB)), made.frontend(*HYBRID_FLAGS)
        made.wait_until_ready(frontend, 1)
        body = {"prompt": 6 * PROMPT, "max_tokens": 4, **GREEDY}
        for _ in range(2):
            ask(frontend, "completions", body)
        worker.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: made.workers_of(frontend) == 0)
        worker.process.send_signal(signal.SIGCONT)
        wait_until(lambda: made.workers_of(frontend) == 1)
        time.sleep(3)  # for the blocks that are published anew
        ask(frontend, "completions", body)
        costs = re.findall(r"logit\W*=\W*([0-9.]+)", plain_log(frontend))
        assert float(costs[0]) > float(costs[1]) == float(costs[2])
        assert worker.end() == 0


def test_other_weights_wait_until_those_before_have_gone(tmp_path):
    trained = tmp_path / "trained"
    shutil.copytree(DEMO, trained)
    weights = load_file(trained / "model.safetensors")
    save_file({name: 1.05 * each for name, each in weights.items()}, trained / "model.safetensors")
    with cluster(tmp_path) as made:
        old, frontend = made.worker("--cache-mib", str(CACHE_MIB)), made.frontend(*HYBRID_FLAGS)
        made.wait_until_ready(frontend, 1)
        port = free_port()
        command = ["-m", "megatron_hybrid.dynamo.__main__", str(trained)]
        command += ["--served-model-name", MODEL, *WORKER_SIZES, "--cache-mib", str(CACHE_MIB)]
        made.start(command, port, DYN_SYSTEM_PORT=str(port))
        wait_until(lambda: "Rejected incompatible workers" in plain_log(frontend))
        text = ask(frontend, "completions", ANSWER)["choices"][0]["text"]
        stream = Stream(frontend, LONG | GREEDY)
        wait_until(lambda: len(stream.times) > 20)
        assert old.end() == 0
        assert stream.result.result(60).startswith(text)
        wait_until(lambda: is_served(frontend))
        assert ask(frontend, "completions", ANSWER)["choices"][0]["text"] != text


def is_served(frontend: Program) -> bool:
    body = {"model": MODEL, **ANSWER}
    return httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=60).is_success


def plain_log(program: Program) -> str:
    """Its log without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", program.log.read_text())
