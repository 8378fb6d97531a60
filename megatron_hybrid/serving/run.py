"""`megatron-hybrid serve`: a server in this process, until a signal ends it; or a rank of one."""

from __future__ import annotations

import asyncio
import atexit
import errno
import gc
import json
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from megatron_hybrid.distributed.ranks import RankError
from megatron_hybrid.distributed.watchdog import RankFailedError
from megatron_hybrid.inference.async_engine import AsyncEngine
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.serving.app import create_app
from megatron_hybrid.serving.config import ServingConfig
from megatron_hybrid.serving.http.slow_clients import IDLE_SECONDS, TimedProtocol
from megatron_hybrid.serving.kv_events import BlockEvents
from megatron_hybrid.serving.service import STEP_SECONDS, Service, Shutdown, run_steps
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.utils.child_lifetime import EndSignal

if TYPE_CHECKING:  # its imports need not be installed
    from megatron_hybrid.serving.kv_publisher import KvPublisher

logger = logging.getLogger(__name__)
_BACKLOG = 2048
_CONNECTION_SECONDS = 5
"""Seconds for connections to end when nothing runs any more."""


class _PlainLines(logging.Formatter):
    """Lines for people: the time, and what happened. `rank` is named, unless it is None."""

    def __init__(self, rank: int | None = None):
        whose = "" if rank is None else f"rank {rank}: "
        super().__init__(f"%(asctime)s {whose}%(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        if not record.name.endswith(".access"):
            return super().format(record)
        line = record.args
        text = "{method} {path} {status} in {ms:,.0f} ms".format(**line)
        if "prefix" in line:
            skipped = sum(prefix["skipped_tokens"] for prefix in line["prefix"])
            text += (
                f": {line['prompt_tokens']:,} prompt tokens, {skipped:,} of them skipped; "
                f"{line['completion_tokens']:,} generated"
            )
        return f"{self.formatTime(record, self.datefmt)} {text}"


class _JsonLines(logging.Formatter):
    """One JSON object a line, with the fields of a request and, unless it is None, the `rank`."""

    def __init__(self, rank: int | None = None):
        super().__init__()
        self._rank = {} if rank is None else {"rank": rank}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._rank,
        }
        if record.name.endswith(".access"):
            return json.dumps(line | record.args)
        line["message"] = record.getMessage()
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_lines(rank: int | None = None) -> None:
    """Write the logs of this program to stderr: plain lines to a terminal, else JSON. A thread
    writes them, as their reader may be slow. Lines name the rank, unless it is None."""
    lines: SimpleQueue = SimpleQueue()
    handler = QueueHandler(lines)
    handler.setFormatter((_PlainLines if sys.stderr.isatty() else _JsonLines)(rank))
    handler.addFilter(_is_no_cancellation)
    writer = QueueListener(lines, logging.StreamHandler(sys.stderr))
    writer.start()
    atexit.register(writer.stop)
    for name in ("megatron_hybrid", "uvicorn"):
        own = logging.getLogger(name)
        own.handlers, own.propagate = [handler], False
        own.setLevel(logging.INFO)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Drop the traceback that uvicorn writes for each request that is cancelled at the end."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


@dataclass(frozen=True)
class Address:
    """Address where a server listens, and its certificate."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any port that is free."""
    uds: str | None = None
    """Path of a Unix socket, in place of host and port."""
    certfile: str | None = None
    """Certificate (PEM), for HTTPS."""
    keyfile: str | None = None
    """Key of the certificate, if that is in another file."""

    def bind(self) -> socket.socket | None:
        """Check the address and return a bound socket, or None for a Unix socket, which is free.

        Raises:
            OSError, ValueError: the address is taken, or cannot be used; the message names it.
        """
        if self.keyfile and not self.certfile:
            raise ValueError("--ssl-keyfile needs --ssl-certfile, the certificate of the key")
        self._check_certificate()  # fail now, not after the model is loaded
        if self.uds is not None:
            if not Path(self.uds).resolve().parent.is_dir():
                raise ValueError(f"--uds {self.uds}: there is no such folder; make it first")
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(self.uds) == 0:
                    raise ValueError(f"--uds {self.uds} is in use: end that server first")
            return None
        where = f"--host {self.host} --port {self.port}"
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"{where}: a port is a number from 0 to 65535")
        try:
            family, _, _, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            bound = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise OSError(f"{where} cannot be used: {error}") from error
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            # Until the model is there, clients wait, and another server finds the port taken.
            bound.listen(_BACKLOG)
        except OSError as error:
            bound.close()
            remedy = "; give another --port" if error.errno == errno.EADDRINUSE else ""
            raise OSError(f"{where} cannot be used: {error.strerror}{remedy}") from error
        return bound

    def _check_certificate(self) -> None:
        if not self.certfile:
            return
        for option, path in (("certfile", self.certfile), ("keyfile", self.keyfile)):
            if path and not os.access(path, os.R_OK):
                raise OSError(f"--ssl-{option} {path} is no file that can be read")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile)
        except ssl.SSLError as error:
            what = f"--ssl-certfile {self.certfile}"
            what += f" with --ssl-keyfile {self.keyfile}" if self.keyfile else ""
            raise ValueError(f"{what} is no certificate and its key in PEM: {error}") from error

    def url(self, bound: socket.socket | None) -> str:
        """Return the address as people write it."""
        if bound is None:
            return f"unix:{self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.certfile else ''}://{host}:{bound.getsockname()[1]}"


class _Server(uvicorn.Server):
    """Ends by `Shutdown`: at a signal, or when a rank has failed."""

    def __init__(self, config: uvicorn.Config, service: Service, end: EndSignal):
        super().__init__(config)
        self._loop = asyncio.get_running_loop()
        self._shutdown = Shutdown(service, end, self._stop)

    def handle_exit(self, sig: int, frame) -> None:
        self._loop.call_soon_threadsafe(self._take_signal)

    async def on_tick(self, counter: int) -> bool:
        """Begin the end if it is due. uvicorn calls this ten times a second."""
        self._shutdown.begin_if_due()
        return await super().on_tick(counter)

    def _stop(self) -> None:
        self.should_exit = True

    def _take_signal(self) -> None:
        self.force_exit = self.should_exit  # only connections are left
        self.should_exit = self._shutdown.has_begun
        self._shutdown.take_signal()


def freeze_objects() -> None:
    """Exempt present objects from garbage collection: a full one stops all threads for long."""
    gc.collect()
    gc.freeze()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in uvloop's event loop, if that is installed."""
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(main)


@asynccontextmanager
async def running_service(
    model: HybridModel,
    tokenizer: Tokenizer,
    engine_config: InferenceConfig,
    config: ServingConfig,
    publisher: KvPublisher | None,
    end: EndSignal,
) -> AsyncIterator[Service]:
    """Run a service and its engine as a context. At its end the cache's folder is completed.

    Args:
        publisher: publishes KV events, and is closed at the end. With None none are published.
        end: notes a signal that was sent before the server took signals.

    Raises:
        RankFailedError: another rank of the model has failed.
    """
    tokenizer.show_special_tokens(config.style_of(tokenizer.template_source(())).marks)
    end.hold()
    engine = AsyncEngine(model, tokenizer, engine_config)
    end.serves = True
    service = Service(engine, tokenizer, engine_config, config)
    try:
        for name, _, folder in (each.partition("=") for each in config.adapters):
            await engine.load_adapter(name, folder)
        if publisher is not None:
            publisher.begin(await engine.watch_cache(BlockEvents))
            logger.info("KV events on %s", publisher.endpoint)
        yield service
        if engine.rank_failure is not None:
            raise RankFailedError(f"the server has ended, as {engine.rank_failure}")
    finally:
        began = time.perf_counter()
        await service.close()
        if publisher is not None:
            await run_steps(("the end of KV events", publisher.close, STEP_SECONDS))
        logger.info("the engine ended in %.1f s", time.perf_counter() - began)


async def serve(
    running: AbstractAsyncContextManager[Service],
    address: Address,
    bound: socket.socket | None,
    end: EndSignal,
) -> None:
    """Serve until a signal. Then requests run to their end.

    Args:
        running: `running_service`.
        bound: what `address.bind()` has returned.
        end: that of `running_service`; it is checked all the time.

    Raises:
        RankFailedError: another rank of the model has failed.
    """
    async with running as service:
        settings = uvicorn.Config(
            create_app(service),
            uds=address.uds,
            ssl_certfile=address.certfile,
            ssl_keyfile=address.keyfile,
            http=TimedProtocol,
            log_config=None,
            access_log=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=_CONNECTION_SECONDS,
        )
        freeze_objects()
        logger.info("running on %s (Ctrl-C ends it)", address.url(bound))
        await _Server(settings, service, end).serve(None if bound is None else [bound])


def follow(
    model: HybridModel,
    tokenizer: Tokenizer,
    engine_config: InferenceConfig,
    config: ServingConfig,
    end: EndSignal,
) -> None:
    """Repeat what the first rank does, on another rank and in place of `serve`, until the first one
    ends. Signals are for the first rank.

    Raises:
        RankError, RankFailedError: another rank has failed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end.hold()
    tokenizer.show_special_tokens(config.style_of(tokenizer.template_source(())).marks)
    with DynamicInferenceEngine(model, tokenizer, engine_config) as engine:
        freeze_objects()
        try:
            engine.follow()
        except (RankError, RankFailedError):
            raise
        except Exception:
            logger.exception("this rank has failed")
            raise
