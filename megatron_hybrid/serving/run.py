"""`megatron-hybrid serve`: a server in this process, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import logging
import sys
import time
from collections.abc import Coroutine
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from megatron_hybrid.inference.async_engine import AsyncEngine
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.serving.app import create_app
from megatron_hybrid.serving.service import Service, ServingConfig
from megatron_hybrid.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_CONNECTION_SECONDS = 5
"""For connections to end when nothing runs any more."""


class _JsonLines(logging.Formatter):
    """One JSON object a line; that of a request is joined into it."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if record.name.endswith(".access"):
            return json.dumps(line | record.args)
        line["message"] = record.getMessage()
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_json_lines() -> None:
    """Write the logs of this program to stderr, in a thread: whoever reads them may be slow."""
    lines: SimpleQueue = SimpleQueue()
    handler = QueueHandler(lines)
    handler.setFormatter(_JsonLines())
    writer = QueueListener(lines, logging.StreamHandler(sys.stderr))
    writer.start()
    atexit.register(writer.stop)
    for name in ("megatron_hybrid", "uvicorn"):
        own = logging.getLogger(name)
        own.handlers, own.propagate = [handler], False
        own.setLevel(logging.INFO)


class _Server(uvicorn.Server):
    """Drains at the first signal, and ends at the second."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task | None = None

    def handle_exit(self, sig: int, frame) -> None:
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._draining is not None:
            self.should_exit = self.force_exit = True
            return
        logger.info("draining: no new requests")
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in uvloop's event loop, if that is installed."""
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(main)


async def serve(
    model: HybridModel,
    tokenizer: Tokenizer,
    engine_config: InferenceConfig,
    config: ServingConfig,
    host: str,
    port: int,
) -> None:
    """Serve until a signal. Then requests run to their end, and the cache's folder is completed."""
    engine = AsyncEngine(model, tokenizer, engine_config)
    service = Service(engine, tokenizer, engine_config, config)
    try:
        settings = uvicorn.Config(
            create_app(service),
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_CONNECTION_SECONDS,
        )
        # What is here stays: each full collection of it would stop all threads for long.
        gc.collect()
        gc.freeze()
        await _Server(settings, service).serve()
    finally:
        began = time.perf_counter()
        await service.close()
        logger.info("the engine ended in %.1f s", time.perf_counter() - began)
