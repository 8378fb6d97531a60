"""A trainer in another process than the servers that draw its rollouts."""

import asyncio
import shutil
from dataclasses import replace
from unittest import mock

import httpx
import pytest
import remote_rollouts
import torch
from commands import free_port
from http_server import DEMO, events, running_server
from rank_processes import rank_context
from reference import is_greedy, random_tokens, tiny_engine, tiny_model
from waiting import LIMIT_S

from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.checkpoints.model_tensors import own_tensors
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.serving.app import create_app

FIELDS = dict(vocab_size=3072, mamba_num_groups=2)
ENGINE = {"cache_bytes": 4 << 20, "max_requests": 8, "max_sequence_length": 512}
PROMPTS = [random_tokens(60, seed=seed, vocab_size=3072) for seed in range(2)]
DRAWN = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "ignore_eos": True}
LONG = {"prompt": PROMPTS[0], "max_tokens": 120, "temperature": 0, "ignore_eos": True}
LONG |= {"stream": True, "return_token_ids": True}
SAMPLES = 2
SAMPLED = {**DRAWN, "prompt": PROMPTS[0], "n": SAMPLES, "return_token_ids": True}


def model_of(seed):
    return tiny_model("M*-", seed, **FIELDS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of the old weights and of the new ones."""
    folders = [tmp_path_factory.mktemp(name) for name in ("old", "new")]
    for seed, folder in enumerate(folders):
        save_checkpoint(model_of(seed), folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, folder)
    return folders


def serve(folder, pipe):
    torch.set_num_threads(1)
    with running_server(ENGINE, folder=folder, takes_weights=True) as server:
        pipe.send(server.url)
        pipe.recv()


@pytest.fixture
def workers(folders):
    """URLs of two servers, each in a process of its own."""
    context = rank_context()
    pipes, processes = [], []
    for _ in range(2):
        pipe, other = context.Pipe()
        processes.append(context.Process(target=serve, args=(folders[0], other)))
        processes[-1].start()
        pipes.append(pipe)
    yield [pipe.recv() for pipe in pipes]
    for pipe, process in zip(pipes, processes):
        pipe.send("end")
        process.join(LIMIT_S)
        assert process.exitcode == 0


def expected_of(model):
    """Tokens and log-probabilities of each answer to each prompt."""
    params = SamplingParams(
        temperature=1.0,
        seed=3,
        num_tokens_to_generate=6,
        ignore_termination=True,
        return_log_probs=True,
        skip_prompt_log_probs=True,
    )
    with tiny_engine(model, **ENGINE) as engine:
        results = [
            engine.generate([prompt], params, RequestOptions(n=SAMPLES))[0] for prompt in PROMPTS
        ]
    return [[(s.token_ids, s.log_probs) for s in result.samples] for result in results]


def answers_of(url):
    """The same, of a server; skipped tokens; epochs."""
    rows, skipped, epochs = [], [], []
    for prompt in PROMPTS:
        body = {**SAMPLED, "prompt": prompt, "logprobs": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S).json()
        choices = answer["choices"]
        rows.append([(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in choices])
        skipped.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        epochs += [c["weight_epochs"] for c in choices]
    return rows, skipped, epochs


def test_a_trainer_in_another_process_sends_weights_to_two_workers(
    workers, folders, monkeypatch, capsys
):
    old, new = model_of(0), model_of(1)
    expected = {0: expected_of(old), 1: expected_of(new)}
    for url in workers:
        assert answers_of(url) == (expected[0], [0, 0], [[[0, 0]]] * 4)
        assert answers_of(url)[1] == [60, 60]
    trainer = remote_rollouts.Workers(workers)
    monkeypatch.setattr(remote_rollouts, "PART_BYTES", 100_000)  # several parts
    trainer.connect("127.0.0.1", free_port())
    streams = [events(url, "/v1/completions", LONG) for url in workers]
    begun = [next(each) for each in streams]
    trainer.send(((name, t.detach()) for name, t in own_tensors(new).items()), "first")
    for url, first, rest in zip(workers, begun, streams):
        # A running answer goes on, with the new weights, and no byte of the old ones.
        parts = [event["choices"][0] for event in (first, *rest)]
        tokens = [token for part in parts for token in part["token_ids"]]
        drawn_by = [part["weight_epoch"] for part in parts for _ in part["token_ids"]]
        start = drawn_by.index(1)
        assert drawn_by == sorted(drawn_by) and start > 0 and len(tokens) == 120
        assert is_greedy(old, PROMPTS[0], tokens[:start])
        assert is_greedy(new, PROMPTS[0] + tokens[:start], tokens[start:])
        # Others are those of a model that was built with them, to the bit.
        rows, skipped, epochs = answers_of(url)
        assert rows == expected[1] and epochs == [[[1, 0]]] * 4
        assert skipped[1] == 0  # the first prompt was computed for the stream
        info = httpx.get(f"{url}/weight_info", timeout=LIMIT_S).json()
        assert info == {"weight_version": "first", "weight_epoch": 1, "unfinished": None}
    rollouts = trainer.generate(PROMPTS, SAMPLES, **DRAWN)
    assert [(r.answer, r.log_probs) for r in rollouts] == [*expected[1][0], *expected[1][1]]
    # A mistake is told, and the next update goes through.
    with pytest.raises(RuntimeError, match=r"answers 400.*no tensor wrong"):
        trainer.send([("wrong", torch.zeros(2))])
    trainer.send(own_tensors(old).items())
    for url in workers:
        assert answers_of(url) == (expected[0], [0, 0], [[[2, 0]]] * 4)
    trainer.close()
    # The example's own loop, which makes a group anew.
    port = str(free_port())
    options = ["--model", str(folders[0]), "--port", port, "--updates", "1"]
    remote_rollouts.main([*workers, *options])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and all(float(line.split()[-1]) < 1e-4 for line in lines)


# Routes -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(folders):
    with running_server(
        ENGINE, folder=folders[0], takes_weights=True, api_keys=("one",), admin_keys=("root",)
    ) as server:
        yield server


def call(server, method, path, key="root", **options):
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.request(method, server.url + path, headers=headers, timeout=LIMIT_S, **options)


NOBODY = {
    "master_address": "no.such.host.invalid",
    "master_port": 1,
    "rank_offset": 1,
    "world_size": 2,
}
ROUTES = {
    # In an order in which each can be called; after each, what `/is_paused` and `/is_sleeping` say.
    ("POST", "/pause"): ({"status": "paused"}, True, False),
    ("POST", "/resume"): ({"status": "resumed"}, False, False),
    ("POST", "/pause?mode=keep"): ({"status": "paused"}, True, False),
    ("POST", "/sleep?level=0&mode=wait"): ({"status": "paused"}, True, False),
    ("POST", "/sleep?level=2"): ({"status": "sleeping"}, True, True),
    ("POST", "/wake_up?tags=weights"): ({"status": "sleeping"}, True, True),
    ("POST", "/start_weight_update"): ({"message": "Weight update started"}, True, True),
    ("POST", "/update_weights"): ({"message": "Weights updated"}, True, True),
    ("POST", "/finish_weight_update"): (
        {"message": "Weight update finished", "weight_epoch": 1},
        True,
        True,
    ),
    ("POST", "/wake_up?tags=kv_cache"): ({"status": "awake"}, False, False),
    ("GET", "/get_world_size"): ({"world_size": 1}, False, False),
    ("GET", "/weight_info"): (
        {"weight_version": None, "weight_epoch": 1, "unfinished": None},
        False,
        False,
    ),
}


def test_the_routes_of_a_trainer_answer_as_those_of_vllm(server, folders):
    for (method, path), (expected, paused, sleeping) in ROUTES.items():
        body = {"update_info": {"path": str(folders[1])}} if path == "/update_weights" else None
        answer = call(server, method, path, json=body)
        assert (answer.status_code, answer.json()) == (200, expected), path
        assert call(server, "GET", "/is_paused").json() == {"is_paused": paused}, path
        assert call(server, "GET", "/is_sleeping").json() == {"is_sleeping": sleeping}, path
    answer = call(server, "POST", "/v1/completions", "one", json=SAMPLED).json()
    tokens = [choice["token_ids"] for choice in answer["choices"]]
    assert tokens == [tokens for tokens, _ in expected_of(model_of(1))[0]]


def test_after_a_failed_update_requests_are_refused_until_one_is_whole(server, folders):
    def update(*paths):
        call(server, "POST", "/start_weight_update")
        for path in paths:
            info = {"update_info": {"path": str(path)}}
            answer = call(server, "POST", "/update_weights", json=info)
        return answer

    def ask():
        return call(server, "POST", "/v1/completions", "one", json=SAMPLED)

    assert update("/nowhere").status_code == 400  # of which nothing was written
    assert ask().status_code == 200
    assert update(folders[1], "/nowhere").status_code == 400
    answer = ask()
    message = answer.json()["error"]["message"]
    assert answer.status_code == 503 and "'/nowhere'" in message and "once more" in message
    info = call(server, "GET", "/weight_info").json()
    assert info["weight_version"] is None and info["unfinished"] == message
    assert update(folders[1]).status_code == 200
    assert call(server, "POST", "/finish_weight_update").status_code == 200
    tokens = [choice["token_ids"] for choice in ask().json()["choices"]]
    assert tokens == [tokens for tokens, _ in expected_of(model_of(1))[0]]


async def test_a_pause_ends_answers_with_what_they_have(server):
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "temperature": 0}
    forms = {
        "/v1/completions": {**LONG, "stream": False},
        "/v1/messages": chat,
        "/v1/responses": {"input": "a", "max_output_tokens": 400, "temperature": 0},
        "/v1/chat/completions": chat,
    }
    engine, headers = server.service.engine, {"Authorization": "Bearer one"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=LIMIT_S) as client:
        asked = [asyncio.create_task(client.post(path, json=forms[path])) for path in forms]
        while (await engine.stats())["requests_running"] < len(asked):
            assert not any(each.done() for each in asked)
            await asyncio.sleep(0.001)
        await engine.pause_generation()
        answers = dict(zip(forms, [(await each).json() for each in asked]))
        await engine.resume_generation()
    choice = answers["/v1/completions"]["choices"][0]
    assert choice["finish_reason"] == "abort" and 0 < len(choice["token_ids"]) < 120
    assert answers["/v1/chat/completions"]["choices"][0]["finish_reason"] == "abort"
    assert answers["/v1/messages"]["stop_reason"] == "pause_turn"
    assert answers["/v1/responses"]["status"] == "incomplete"
    assert answers["/v1/responses"]["incomplete_details"] == {"reason": "aborted"}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/pause?mode=stop", None, 400, "mode: "),
        ("/sleep?level=3", None, 400, "level: "),
        ("/wake_up?tags=all", None, 400, "tags"),
        ("/update_weights", {"update_info": {}}, 409, "needs an update"),
        ("/update_weights", {}, 400, "update_info: "),
        ("/update_weights", {"update_info": [3]}, 400, "update_info: "),
        ("/finish_weight_update", None, 409, "needs an update"),
        ("/init_weight_transfer_engine", {"init_info": {}}, 400, "init_info lacks master_address"),
        ("/init_weight_transfer_engine", {"init_info": NOBODY}, 502, "'weights' at no.such.host"),
    ],
)
def test_what_cannot_be_is_refused(server, path, body, status, message):
    answer = call(server, "POST", path, json=body)
    assert answer.status_code == status and message in answer.json()["error"]["message"]


def test_the_routes_of_a_trainer_are_the_operators_and_are_off_unless_asked_for(server):
    paths = {path.partition("?")[0] for _, path in ROUTES} | {"/init_weight_transfer_engine"}
    for path in paths:
        method = "GET" if path in ("/get_world_size", "/weight_info") else "POST"
        assert call(server, method, path, "one").status_code == 403, path
    described = call(server, "GET", "/openapi.json").json()["paths"]
    assert paths <= described.keys()
    for path in paths:
        for operation in described[path].values():
            assert "application/json" in operation["responses"]["200"]["content"]
    service = server.service
    with mock.patch.object(service, "config", replace(service.config, takes_weights=False)):
        assert not paths & create_app(service).openapi()["paths"].keys()
