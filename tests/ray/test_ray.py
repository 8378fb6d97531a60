"""`make test-ray`: `serve run` of the example's YAML file, with replicas of one rank and of two."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from http_server import events, running_server
from prometheus_client.parser import text_string_to_metric_families
from span_collector import CALLER, TRACEPARENT, span_collector
from waiting import wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray"
READY_SECONDS = 120
PROMPT = "Once upon a time there was a king who had three daughters, and the youngest of them"
GREEDY = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
LONG = {**GREEDY, "max_tokens": 1500, "ignore_eos": True, "stream": True}
ASKED = {
    "greedy": {},
    "samples": {"n": 3, "temperature": 0.8, "seed": 3},
    "log-probabilities": {"logprobs": 3, "temperature": 0.9, "seed": 11},
    "a regex": {"structured_outputs": {"regex": "(yes|no), [0-9]{3}"}},
    "a stop string": {"stop": ["the"], "max_tokens": 40},
    "a wrong value": {"temperature": -1},
    "a method": {},
}


class Cluster:
    """A `serve run` on this machine. Attributes: url (of HTTP)."""

    def __init__(self, folder: Path, port: int, **changed: object):
        settings = yaml.safe_load((EXAMPLE / "ray_serve.yaml").read_text())
        settings["http_options"]["port"] = port
        (application,) = settings["applications"]
        application["args"] |= {"cpus": 0.5, **changed}
        if changed:
            application["deployments"][1]["num_replicas"] = 1
        path = folder / "app.yaml"
        path.write_text(yaml.safe_dump(settings))
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "log"
        command = [Path(sys.executable).with_name("serve"), "run", str(path)]
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(
                command, cwd=EXAMPLE, stdout=file, stderr=subprocess.STDOUT
            )
        self.client = httpx.Client(base_url=self.url, timeout=300)

    def ask(self, fields: dict, session: str = "") -> dict:
        """The answer to a completion."""
        headers = {"X-Session-Id": session} if session else {}
        answer = self.client.post("/v1/completions", json=fields, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def answers(self) -> bool:
        """Whether a completion is answered."""
        assert self.process.poll() is None, self.log.read_text()
        with suppress(httpx.TransportError):
            return self.client.post("/v1/completions", json=GREEDY).status_code == 200
        return False

    def counts(self) -> list[float]:
        """How many requests each replica that is ready has had."""
        answer = self.client.get("/metrics")
        families = text_string_to_metric_families(answer.text if answer.is_success else "")
        samples = [sample for family in families for sample in family.samples]
        name = "megatron_hybrid_requests_total"
        return [sample.value for sample in samples if sample.name == name]

    def processes(self, name: str) -> list[psutil.Process]:
        """Those of actors with this name."""
        found = []
        for each in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found += [each] if name in " ".join(each.cmdline()) else []
        return found

    def end(self) -> None:
        """End it; Ray Serve gives its replicas half a minute, and then all processes are killed."""
        self.client.close()
        if self.process.poll() is not None:
            return
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(READY_SECONDS)
        self.process.kill()
        self.process.wait()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


@contextmanager
def cluster(folder: Path, port: int, **changed: object) -> Iterator[Cluster]:
    made = Cluster(folder, port, **changed)
    try:
        wait_until(made.answers)
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("two"), 18_651) as made:
        wait_until(lambda: len(made.counts()) == 2)
        yield made


@pytest.fixture(scope="module")
def plain() -> Iterator[httpx.Client]:
    with (
        running_server({"cache_bytes": 64 << 20, "max_sequence_length": 2048}) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def told(answer: dict) -> list:
    said = answer.get("choices", ())
    return answer.get("error") or [[c["text"], c["finish_reason"], c["logprobs"]] for c in said]


@pytest.mark.parametrize("what", ASKED)
def test_answers_are_those_of_the_server(two, plain, what):
    method, fields = ("PUT", {}) if what == "a method" else ("POST", GREEDY | ASKED[what])
    path, clients = "/v1/completions", (two.client, plain)
    found, expected = (told(c.request(method, path, json=fields).json()) for c in clients)
    assert found == expected


def test_a_stream_comes_in_pieces_and_its_text_is_the_answer(two):
    stream = events(two.url, "/v1/completions", {**GREEDY, "stream": True})
    pieces = [each["text"] for event in stream for each in event["choices"]]
    assert len(pieces) > 3 and "".join(pieces) == two.ask(GREEDY)["choices"][0]["text"]


def test_the_turns_of_a_session_find_the_prefix_of_the_turn_before(two):
    asked = skipped = 0
    prompts = {f"chat-{i}": f"Chat {i}. {PROMPT}" for i in range(6)}
    for turn in range(3):
        for session, prompt in prompts.items():
            answer = two.ask({**GREEDY, "prompt": prompt}, session)
            if turn:
                asked += answer["usage"]["prompt_tokens"]
                skipped += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            prompts[session] = f"{prompt}{answer['choices'][0]['text']} And then?"
    assert skipped > 0.7 * asked


def test_a_client_that_leaves_ends_its_request(two):
    session = {"X-Session-Id": "leaving"}

    def statuses() -> set[str]:
        answer = two.client.get("/requests", headers=session).json()
        return {each["status"] for each in answer["requests"]}

    with two.client.stream("POST", "/v1/completions", json=LONG, headers=session) as answer:
        next(answer.iter_lines())
    wait_until(lambda: "cancelled" in statuses())


def test_operators_reach_all_replicas(two):
    """And the id of a request is told once."""
    before = sum(two.counts())

    def skipped() -> list[int]:
        answers = [two.ask(GREEDY, f"counted-{session}") for session in range(8)]
        return [each["usage"]["prefix"]["skipped_tokens"] for each in answers]

    skipped()
    assert {sum(two.counts()) for _ in range(6)} == {before + 8} and min(two.counts()) > 0
    assert {len(two.client.get("/requests").json()["requests"]) for _ in range(6)} == {before + 8}
    assert all(skipped())
    with two.client.stream("POST", "/v1/completions", json=LONG) as answer:
        (id,) = answer.headers.get_list("x-request-id")
        lines = answer.iter_lines()
        assert next(lines)
        assert {two.client.get("/load").json()["server_load"] for _ in range(6)} == {1}
        assert two.client.post("/abort", json={"request_id": id}).json() == {"aborted": True}
        assert "aborted" in "".join(lines)
    assert two.client.post("/abort", json={"request_id": id}).json() == {"aborted": False}
    refused = two.client.post("/cache/save")
    assert refused.status_code == 409 and "cache_dir" in refused.json()["error"]["message"]
    assert two.client.post("/cache/reset").json() == {"reset": True}
    assert skipped().count(0) == 2  # the first request at each replica


def test_a_request_of_whose_answer_nothing_was_sent_goes_to_another_replica(two):
    fields = {**LONG, "stream": False, "max_tokens": 600}
    expected = told(two.ask(fields))
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(two.ask, fields)
        replicas = two.processes("ray::ServeReplica:megatron_hybrid:Server")
        for replica in replicas:
            replica.cpu_percent()
        time.sleep(1)
        assert not answer.done()
        max(replicas, key=psutil.Process.cpu_percent).kill()
        assert told(answer.result()) == expected
    wait_until(lambda: len(two.counts()) == 2)


CHAT = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "stream": True}
STREAMS = {
    "/v1/completions": LONG,
    "/v1/chat/completions": CHAT | {"max_tokens": 1500, "ignore_eos": True},
    "/v1/messages": CHAT | {"max_tokens": 1500},
    "/v1/responses": {"input": PROMPT, "stream": True, "max_output_tokens": 1500},
}


def test_a_replica_that_is_killed_is_replaced_and_its_streams_end_with_an_error(two):
    before = told(two.ask(GREEDY))
    with ExitStack() as stack:
        streams = {}
        for path, body in STREAMS.items():
            answer = stack.enter_context(two.client.stream("POST", path, json=body))
            streams[path] = answer.iter_lines()
            assert next(streams[path])
        for replica in two.processes("ray::ServeReplica:megatron_hybrid:Server"):
            replica.kill()
        for path, lines in streams.items():
            last = [line for line in lines if line.startswith("data: ")][-1]
            event = json.loads(last.removeprefix("data: "))
            assert "replica ended" in event.get("error", event)["message"], path
            assert event.get("type", "error") == "error", path
            assert event.get("sequence_number", 9) > 2, path
    began = time.monotonic()
    wait_until(two.answers)
    print(f"answered {time.monotonic() - began:.1f} s after both replicas were killed")
    assert told(two.ask(GREEDY)) == before


def test_a_replica_of_two_ranks_answers_and_is_replaced_when_a_rank_is_killed(tmp_path, two, plain):
    """Its spans belong to the caller's trace."""
    two.end()
    expected = told(plain.post("/v1/completions", json=GREEDY).json())
    with span_collector() as collector:
        settings = {"cache_bytes": 64 << 20, "otlp_traces_endpoint": collector.endpoint}
        with cluster(tmp_path, 18_652, tp=2, inference=settings) as split:
            split.client.headers["traceparent"] = TRACEPARENT
            assert told(split.ask(GREEDY))[0][0] == expected[0][0]
            wait_until(lambda: CALLER in {s.parent_span_id.hex() for s in collector.spans.values()})
            (rank,) = split.processes("ray::Rank")
            rank.kill()
            rank.wait()
            wait_until(lambda: len(split.processes("ray::Rank")) == 1)
            wait_until(split.answers)
            assert told(split.ask(GREEDY))[0][0] == expected[0][0]
