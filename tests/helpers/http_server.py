"""A server of the demo model in a thread of this process."""

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import torch
import uvicorn
from waiting import LIMIT_S

import megatron_hybrid
from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.inference.async_engine import AsyncEngine
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.serving.app import create_app
from megatron_hybrid.serving.config import ServingConfig
from megatron_hybrid.serving.http.slow_clients import IDLE_SECONDS, TimedProtocol
from megatron_hybrid.serving.service import Service

DEMO = Path(megatron_hybrid.__file__).parent / "demo_model"


class RunningServer:
    """A server that answers.

    Attributes:
        service: behind the routes.
        url: without a path.
        address: host and port.
        thread: of the event loop.
    """

    def __init__(self, service: Service):
        self.service = service
        config = uvicorn.Config(
            create_app(service),
            http=TimedProtocol,
            port=0,
            log_config=None,
            access_log=False,
            timeout_keep_alive=IDLE_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self._server.run, daemon=True)
        self.thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.address = self._server.servers[0].sockets[0].getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"

    def call(self, path: str, body=None, key: str | None = None, **options) -> httpx.Response:
        """The answer to a request: GET, or POST where there is a body."""
        if key is not None:
            options["headers"] = {"Authorization": f"Bearer {key}"}
        method = "GET" if body is None else "POST"
        return httpx.request(method, self.url + path, json=body, timeout=LIMIT_S, **options)

    def complete(self, prompt: str | list[str], max_tokens: int = 4) -> dict:
        """The answer to a completion."""
        return self.call("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens}).json()

    def told(self, name: str, *args):
        """What a method of the engine returns."""
        return run_apart(getattr(self.service.engine, name)(*args))

    def stop(self) -> None:
        self._server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


def demo_service(engine_fields: dict | None = None, folder: Path = DEMO, **fields) -> Service:
    """Of the demo model, or that in another folder, in fp32."""
    model, tokenizer = load_pretrained(folder, device="cpu", dtype=torch.float32)
    settings = {"cache_bytes": 32 << 20, "max_requests": 8, "max_sequence_length": 1024}
    config = InferenceConfig(**{**settings, **(engine_fields or {})})
    serving = ServingConfig("demo", **fields)
    tokenizer.show_special_tokens(serving.style_of(tokenizer.chat_template).marks)
    engine = AsyncEngine(model, tokenizer, config)
    return Service(engine, tokenizer, config, serving)


def run_apart(coroutine: Coroutine):
    """The result of a coroutine, by an event loop of its own in another thread: this one may have
    one that runs."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


@contextmanager
def running_server(engine_fields: dict | None = None, **fields) -> Iterator[RunningServer]:
    """Context of a server of the demo model. fields: of `ServingConfig`, and `folder`."""
    service = demo_service(engine_fields, **fields)
    server = RunningServer(service)
    try:
        yield server
    finally:
        server.stop()
        run_apart(service.close())


def events(url: str, path: str, body: dict) -> Iterator[dict]:
    """The events of a server's stream. It ends with the generator, and so does its connection."""
    with httpx.stream("POST", url + path, json=body, timeout=LIMIT_S) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def set_config(monkeypatch, server, **fields) -> None:
    """Change the `ServingConfig` of a server's `service` until the end of a test."""
    config = replace(server.service.config, **fields)
    monkeypatch.setattr(server.service, "config", config)
