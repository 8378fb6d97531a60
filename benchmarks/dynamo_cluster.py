"""A frontend of NVIDIA Dynamo and workers of ours on loopback, without etcd and NATS; and chats."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

READY_SECONDS = 300
MODEL = "demo"
HYBRID_FLAGS = ("--router-mode", "kv", "--no-router-track-active-blocks")
"""Of a router before hybrids, see docs/guides/many_machines.md."""
GUESSING_FLAGS = (*HYBRID_FLAGS, "--no-router-kv-events")
"""The router reads no events: it guesses from its own decisions what is cached."""
BLIND_FLAGS = ("--router-mode", "kv", "--load-aware")
"""The router knows loads alone."""
SIZES = ("--device", "cpu", "--context", "2048", "--max-requests", "16")
_WORDS = (
    *("king", "queen", "daughter", "castle", "forest", "river", "golden", "silver", "horse"),
    *("night", "morning", "garden", "bread", "water", "stone", "bird", "fox", "wolf", "old"),
    *("young", "poor", "rich", "great", "little", "went", "came", "said", "found", "gave"),
    *("took", "again", "before", "after", "under", "behind", "three", "seven", "many", "never"),
)


def free_port() -> int:
    """One that DYN_SYSTEM_PORT takes, which is a number of 15 bits."""
    while True:
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", random.randrange(20_000, 1 << 15)))
            return one.getsockname()[1]


@dataclass
class Program:
    """A process that was started. Attributes: port (of HTTP), log."""

    process: subprocess.Popen
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str) -> float:
        """A value of its /metrics, summed over labels."""
        text = httpx.get(f"{self.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and wait for the end. Returns the status."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.process.wait(60)


class Cluster:
    """Programs of one discovery folder.

    Args:
        folder: an empty one, for discovery and logs.
        environment: of all programs, in addition to what keeps them on loopback.
    """

    def __init__(self, folder: Path, **environment: str):
        self._folder = folder
        self.programs: list[Program] = []
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DYN_")},
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_EVENT_PLANE": "zmq",
            **{
                f"DYN_{name}_HOST": "127.0.0.1"
                for name in ("TCP_RPC", "TCP_RESPONSE_STREAM", "EVENT_PLANE", "SYSTEM")
            },
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "3",  # workers look every 2 s
            "TOKIO_WORKER_THREADS": "2",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **environment,
        }

    def start(self, arguments: Sequence[str], port: int = 0, **environment: str) -> Program:
        """Start Python. port: where it will answer HTTP."""
        log = self._folder / f"{len(self.programs)}.log"
        with open(log, "w") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**self._environment, **environment},
            )
        self.programs.append(Program(process, port, log))
        return self.programs[-1]

    def worker(self, *flags: str, model: str = MODEL) -> Program:
        """Start a worker."""
        port, program = free_port(), ["-m", "megatron_hybrid.dynamo.__main__", model]
        program += ["--served-model-name", MODEL, *SIZES, *flags]
        return self.start(program, port, DYN_SYSTEM_PORT=str(port))

    def frontend(self, *flags: str) -> Program:
        """Start a frontend."""
        port = free_port()
        place = ["--http-host", "127.0.0.1", "--http-port", str(port), "--migration-limit", "3"]
        return self.start(["-m", "dynamo.frontend", *place, *flags], port)

    def wait_until_ready(self, frontend: Program, num_workers: int) -> None:
        """Wait until a frontend has so many workers."""
        end = time.monotonic() + READY_SECONDS
        while self.workers_of(frontend) != num_workers:
            for program in self.programs:
                if program.process.poll() not in (None, 0, -signal.SIGKILL):
                    raise RuntimeError(f"it has ended:\n{program.log.read_text()}")
            if time.monotonic() > end:
                logs = "\n".join(program.log.read_text() for program in self.programs)
                raise TimeoutError(f"no {num_workers} workers after {READY_SECONDS} s:\n{logs}")
            time.sleep(0.1)

    def workers_of(self, frontend: Program) -> int:
        """Workers that a frontend knows and sends chats to."""
        try:
            models = httpx.get(f"{frontend.url}/v1/models").json()["data"]
            health = httpx.get(f"{frontend.url}/health").json()
        except (httpx.TransportError, ValueError, KeyError):
            return 0
        found = health.get("instances", ())
        return sum(each.get("endpoint") == "generate" for each in found) if models else 0

    def end(self) -> None:
        """End all programs."""
        for program in reversed(self.programs):
            if program.process.poll() is None:
                program.process.send_signal(signal.SIGTERM)
        for program in reversed(self.programs):
            try:
                program.process.wait(20)
            except subprocess.TimeoutExpired:
                program.end(signal.SIGKILL)


@contextmanager
def cluster(folder: Path, **environment: str) -> Iterator[Cluster]:
    """Context of a cluster, which is ended."""
    made = Cluster(folder, **environment)
    try:
        yield made
    finally:
        made.end()


@dataclass
class Measured:
    """Measurements of a run of chats. Times in seconds."""

    num_answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def skipped(self) -> float:
        """Percent of the prompts' tokens that were not computed."""
        return 100 * self.cached_tokens / self.prompt_tokens


def said(draw: random.Random, num_words: int) -> str:
    """A text of some words."""
    return " ".join(draw.choice(_WORDS) for _ in range(num_words))


async def run_chats(
    url: str,
    seed: int,
    num_chats: int = 12,
    turns: int = 5,
    at_once: int = 3,
    tokens: int = 24,
) -> Measured:
    """Chats of several turns that share three system prompts; a turn of all chats, then the next,
    in random order.

    Args:
        url: of a server.
        seed: of all texts: those of other seeds share nothing with them.
        at_once: requests at a time.
        tokens: of each answer.
    """
    draw, found, few = random.Random(seed), Measured(), asyncio.Semaphore(at_once)
    systems = [said(draw, 200) for _ in range(3)]
    chats = [[{"role": "system", "content": draw.choice(systems)}] for _ in range(num_chats)]
    asked = [[said(draw, 30) for _ in range(turns)] for _ in range(num_chats)]
    began = time.perf_counter()
    async with httpx.AsyncClient(timeout=120) as client:

        async def ask(number: int, turn: int) -> None:
            messages = chats[number]
            messages.append({"role": "user", "content": asked[number][turn]})
            async with few:
                text = await _streamed(client, url, messages, tokens, found)
            messages.append({"role": "assistant", "content": text})

        for turn in range(turns):
            order = draw.sample(range(num_chats), num_chats)
            await asyncio.gather(*(ask(number, turn) for number in order))
    found.seconds = time.perf_counter() - began
    return found


async def _streamed(
    client: httpx.AsyncClient, url: str, messages: list, tokens: int, found: Measured
) -> str:
    body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    texts, last = [], None
    began = time.perf_counter()
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode())
        async for event in events_of(answer):
            now = time.perf_counter()
            if usage := event.get("usage"):
                found.prompt_tokens += usage["prompt_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                found.cached_tokens += details.get("cached_tokens") or 0
            for choice in event.get("choices", ()):
                if text := choice["delta"].get("content"):
                    texts.append(text)
                    times = found.first_token if last is None else found.between_tokens
                    times.append(now - (began if last is None else last))
                    last = now
    found.num_answers += 1
    return "".join(texts)


async def events_of(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of a stream's events, as they come."""
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if error := event.get("error"):
                raise RuntimeError(str(error))
            yield event
