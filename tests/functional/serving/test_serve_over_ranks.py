"""`megatron-hybrid serve` over two ranks answers as over one, on every route, and ends whole."""

import os
import shutil
import signal
import socket
import time
from contextlib import suppress
from functools import wraps
from unittest import mock

import httpx
import psutil
import pytest
import remote_rollouts
import torch
from commands import Command, Launched, free_port
from http_server import DEMO, events, running_server
from matrix import matrix_rows
from reference import greedy, random_tokens, tiny_engine, tiny_model
from waiting import LIMIT_S, wait_until

from megatron_hybrid import cli
from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.checkpoints.model_tensors import own_tensors
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.live_requests import LiveRequests

RANKS = 2
PROMPT = "Once upon a time there was a king who had three daughters, and the youngest of them"
ANSWER = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
LONG = {**ANSWER, "max_tokens": 250, "stream": True}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}}
SCHEMA |= {"required": ["age"], "additionalProperties": False}
GUIDED = {
    "a JSON schema": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    },
    "a regex": {"structured_outputs": {"regex": "(yes|no), [0-9]{3}"}},
    "a tool": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "tool_choice": "required",
        "max_tokens": 70,
    },
}
MODEL = dict(vocab_size=3072, mamba_num_groups=2, mamba_state_dim=128)
MODEL |= dict(num_moe_experts=4, moe_router_topk=4)
BODIES = {
    # Of every route that takes one, in this order.
    "/v1/completions": {**ANSWER, "logprobs": 2, "n": 2, "temperature": 0.8, "seed": 3},
    "/v1/chat/completions": {**CHAT, "stop": ["e"]},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 8, "temperature": 0},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/tokenize": {"prompt": PROMPT},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/completions/render": {"prompt": PROMPT},
    "/v1/chat/completions/render": {"messages": CHAT["messages"]},
    "/abort": {"request_id": "nobody"},
    "/cache/explain": {"prompt": PROMPT},
    "/ping": {},
    "/invocations": {"prompt": PROMPT, "max_tokens": 4, "temperature": 0},
    "/cache/save": {},
    "/cache/reset": {},
}
OF_ONE_ANSWER = ("id", "created", "created_at", "completed_at", "description", "request_id", "edge")


def checked_serve(arguments):
    """`megatron-hybrid`, whose ranks are compared in each step. The last one fails when it is told
    of a request with the salt "fire"."""
    told, checked = LiveRequests.follow_add, InferenceConfig.__post_init__

    @wraps(told)  # ranks know it by its name
    def add(engine, spec):
        if spec.options.salt == "fire":
            raise OSError("a part of the machine is on fire")
        told(engine, spec)

    def check(config):
        object.__setattr__(config, "verify_ranks", True)
        checked(config)

    with (
        mock.patch.object(LiveRequests, "follow_add", add),
        mock.patch.object(InferenceConfig, "__post_init__", check),
    ):
        return cli.main(arguments)


class Ranks:
    """A server over two ranks.

    Args:
        layout: option of the command.
        folder: of the model.
        made: an empty folder.
    """

    def __init__(self, layout, folder, made):
        port = free_port()
        self.made, self.url = made, f"http://127.0.0.1:{port}"
        sizes = ["--cache-mib", "1", "--host-cache-mib", "8", "--context", "512"]
        arguments = ["serve", str(folder), layout, "2", *sizes, "--port", str(port)]
        arguments += ["--cache-dir", str(made / "cache")]
        arguments += ["--served-model-name", "demo", "--max-requests", "8", "--device", "cpu"]
        arguments += ["--take-weights"]
        self.command = Command(arguments, made / "printed", RANKS, checked_serve)
        self.command.wait_until(lambda: health(self.url)[0] == 200)


def health(url):
    """Status and text of /health; 0: nobody answers."""
    try:
        found = httpx.get(f"{url}/health", timeout=LIMIT_S)
    except httpx.TransportError:
        return 0, ""
    return found.status_code, found.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with recurrent states, attention and experts, and the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("served")
    save_checkpoint(tiny_model("M*GE", **MODEL), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


@pytest.fixture(scope="module", params=matrix_rows(["--tp", "--pp", "--ep"], "--tp"))
def ranks(request, folder, tmp_path_factory):
    ranks = Ranks(request.param, folder, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.command.send(signal.SIGKILL)


@pytest.fixture(scope="module")
def one(folder, ranks):
    """A server of its own for each layout: caches are compared, too."""
    fields = {"cache_bytes": 1 << 20, "host_cache_bytes": 8 << 20, "max_sequence_length": 512}
    fields["cache_dir"] = ranks.made / "one"
    with running_server(fields, folder=folder) as server:
        yield server.url


def of_both(ranks, one, path, body=None):
    """The answers of both servers, without what no two answers have in common."""
    method = "GET" if body is None else "POST"
    found = [
        httpx.request(method, url + path, json=body, timeout=LIMIT_S) for url in (ranks.url, one)
    ]
    assert found[0].status_code == found[1].status_code, (path, found[0].text, found[1].text)
    return [_plain(each.json()) if "json" in each.headers["content-type"] else "" for each in found]


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if key not in OF_ONE_ANSWER}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def test_every_route_answers_as_over_one_rank(ranks, one):
    described = httpx.get(f"{one}/openapi.json", timeout=LIMIT_S).json()["paths"]
    assert {path for path, methods in described.items() if "post" in methods} == set(BODIES)
    for path, body in BODIES.items():
        own, other = of_both(ranks, one, path, body)
        assert own == other, path
    for path, methods in described.items():
        if "get" not in methods or path in ("/metrics", "/cache/history", "/v1/models/{name}"):
            continue
        own, other = of_both(ranks, one, path)
        if path == "/cache/tree":
            own, other = ((each["starts"], each["ends"]) for each in (own, other))
        elif path == "/requests":
            keys = ("prompt_tokens", "generated_tokens", "skipped_tokens", "status")
            own, other = (
                [{key: row[key] for key in keys} for row in found["requests"]]
                for found in (own, other)
            )
        assert own == other, path
    history, _ = of_both(ranks, one, "/cache/history")
    assert len(history["time"]) > 0
    assert "megatron_hybrid_rank_bytes" in httpx.get(f"{ranks.url}/metrics", timeout=LIMIT_S).text


def test_streams_are_those_of_one_rank_also_where_clients_leave(ranks, one):
    next(events(ranks.url, "/v1/completions", LONG))  # the generator ends, and its connection
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{ranks.url}/v1/completions", json={**LONG, "stream": False}, timeout=0.1)
    body = {**ANSWER, "prompt": [PROMPT, PROMPT[:40], "Another one"], "stream": True}
    own, other = (
        [_plain(each) for each in events(url, "/v1/completions", body)] for url in (ranks.url, one)
    )
    assert sorted(own, key=str) == sorted(other, key=str)
    wait_until(lambda: httpx.get(f"{ranks.url}/load", timeout=LIMIT_S).json() == {"server_load": 0})


@pytest.mark.parametrize("name", matrix_rows(GUIDED, "a regex"))
def test_guided_answers_are_those_of_one_rank(ranks, one, name):
    own, other = of_both(
        ranks, one, "/v1/chat/completions", {**CHAT, "max_tokens": 16} | GUIDED[name]
    )
    assert own == other
    message = own["choices"][0]["message"]
    assert message["content"] or message["tool_calls"][0]["function"]["name"] == "f"


def test_prompts_come_back_from_host_memory(ranks, one):
    prompts = [f"{start}. {PROMPT}, who was {start * 37} years old" for start in range(24)]
    of_both(ranks, one, "/v1/completions", {**ANSWER, "prompt": prompts, "max_tokens": 1})
    again = {**ANSWER, "prompt": prompts[0]}
    explained, _ = of_both(ranks, one, "/cache/explain", {"prompt": prompts[0]})
    assert "host" in explained["text"]
    own, other = of_both(ranks, one, "/v1/completions", again)
    assert own["usage"]["prefix"]["fetched_tokens"] > 0
    assert own["choices"] == other["choices"]


@pytest.mark.matrix  # of two servers of one rank: test_remote_rollouts.py
def test_every_rank_takes_the_weights_of_a_trainer(ranks):
    """Also while an answer is drawn; and gives back its memory, and takes it again."""
    model = tiny_model("M*GE", 1, **MODEL)
    prompt = random_tokens(40, vocab_size=3072)
    params = greedy(8, return_log_probs=True, skip_prompt_log_probs=True, ignore_termination=True)
    with tiny_engine(model) as engine:
        expected = engine.generate([prompt], params)[0]
    trainer = remote_rollouts.Workers([ranks.url])
    drawn, ids = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}, {"return_token_ids": True}
    (before,) = trainer.generate([prompt], 1, **drawn)
    trainer.connect("127.0.0.1", free_port())
    running = events(ranks.url, "/v1/completions", {**LONG, "max_tokens": 80} | ids)
    parts = [next(running)]
    trainer.send((name, tensor.detach()) for name, tensor in own_tensors(model).items())
    parts += running
    epochs = [part["choices"][0]["weight_epoch"] for part in parts]
    assert epochs[0] == 0 and epochs[-1] == 1 and epochs == sorted(epochs)
    for _ in range(2):
        (rollout,) = trainer.generate([prompt], 1, **drawn)
        assert rollout.answer == expected.token_ids != before.answer
        assert rollout.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
        httpx.post(f"{ranks.url}/sleep?mode=keep", timeout=LIMIT_S).raise_for_status()
        assert httpx.get(f"{ranks.url}/is_sleeping", timeout=LIMIT_S).json() == {
            "is_sleeping": True
        }
        httpx.post(f"{ranks.url}/wake_up", timeout=LIMIT_S).raise_for_status()
    with pytest.raises(RuntimeError, match=r"answers 400.*no tensor wrong"):
        trainer.send([("wrong", torch.zeros(2))])
    assert trainer.generate([prompt], 1, **drawn)[0].answer == expected.token_ids
    trainer.close()


def test_the_end_of_a_rank_is_that_of_the_server(ranks, request):
    """Also where no launcher ends the others."""
    layout, seen = request.node.callspec.params["ranks"], []
    name, command = f"rank 1 on {socket.gethostname()}", ranks.command
    for event in events(ranks.url, "/v1/completions", LONG):
        if not seen:
            if layout == "--tp":
                command.send(signal.SIGKILL, [1])
            elif layout == "--pp":
                body = {**ANSWER, "cache_salt": "fire"}
                refused = httpx.post(f"{ranks.url}/v1/completions", json=body, timeout=LIMIT_S)
                assert refused.status_code == 503 and "is on fire" in refused.text
            else:
                command.send(signal.SIGTERM)
        seen.append(event)
    while command.is_alive():
        status, text = health(ranks.url)
        assert layout == "--ep" or status != 503 or name in text
        time.sleep(0.01)
    statuses = command.wait()
    if layout == "--ep":
        assert seen[-1]["choices"][0]["finish_reason"] == "length" and statuses == [0, 0]
        for rank in range(RANKS):
            saved = ranks.made / f"cache/rank-{rank}-of-2/pages.bin"
            assert saved.stat().st_size > 0
        return
    assert name in seen[-1]["error"]["message"]
    assert statuses == ([1, -signal.SIGKILL] if layout == "--tp" else [1, 2])
    assert f"megatron-hybrid: the server has ended, as {name}" in command.err(0)
    assert layout == "--tp" or "is on fire" in command.err(1)


# By the command's own launcher ------------------------------------------------------------------


@pytest.fixture
def launched(folder, tmp_path):
    """The command, the URL of its server, and the processes of its ranks."""
    port = free_port()
    options = ["--tp", "2", "--port", str(port), "--context", "512", "--cache-mib", "8"]
    url = f"http://127.0.0.1:{port}"
    command = Launched(["-m", "megatron_hybrid", "serve", str(folder), *options], tmp_path / "all")
    processes = []
    try:
        command.wait_until(lambda: health(url)[0] == 200)
        processes = psutil.Process(command.pid).children(recursive=True)
        yield command, url, processes
    finally:
        command.send(signal.SIGKILL)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.matrix
@pytest.mark.parametrize("end", ["the first rank", "the launcher"])
def test_ranks_of_the_launcher_end_together(launched, end):
    command, url, processes = launched
    ranks = {each.environ()["RANK"]: each for each in psutil.Process(command.pid).children()}
    first = ranks["0"]
    assert len(ranks) == RANKS
    for process in (psutil.Process(command.pid), *processes):
        found = {each.laddr.ip for each in process.net_connections()}
        assert found <= {"127.0.0.1", "::ffff:127.0.0.1"}
    seen = []
    try:
        for event in events(url, "/v1/completions", LONG):
            if not seen:
                os.kill(first.pid if end == "the first rank" else command.pid, signal.SIGKILL)
            seen.append(event)
    except httpx.RemoteProtocolError:
        assert end == "the first rank"
    (status,) = command.wait()
    _, left = psutil.wait_procs(processes, LIMIT_S)
    assert not left
    if end == "the first rank":
        assert status == 1
        assert f"rank 0 (process {first.pid}) was ended by SIGKILL" in command.err()
    else:
        assert seen[-1]["choices"][0]["finish_reason"] == "length"
