"""The way into `ray_serve.py`: each HTTP request goes to a replica of `Server`, and an answer whose
replica ends has an end, too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.routes import OF_EACH_REPLICA

SESSION = "x-session-id"
MOST_BODY_BYTES = 16 << 20
MOST_TRIES = 3
"""Replicas that a request is given to, as long as nothing of its answer was sent."""


@dataclass
class Call:
    """A request on its way to a replica. scope: what ASGI tells of it."""

    scope: dict[str, Any]
    body: bytes

    @property
    def prompt(self) -> str:
        """Return what Ray's prefix-aware router compares, as JSON: a chat's contents, a text or
        token ids; of other requests the path. It is never empty, as Ray divides by its length."""
        found: Any = self.scope["path"]
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            fields = json.loads(self.body)
            found = next(filter(None, map(fields.get, ("messages", "prompt", "input"))), found)
            found = [each["content"] for each in found]  # a text has no messages: it stays
        return json.dumps(found)


def merged(texts: list[tuple[str, str]]) -> bytes:
    """Metrics of several replicas as one text.

    Args:
        texts: (replica, its metrics in Prometheus's text format). The name of the replica becomes
            a label of each sample, so that sums over it are those of the deployment.
    """
    metrics: dict[str, Metric] = {}
    for replica, text in texts:
        for family in text_string_to_metric_families(text):
            metric = Metric(family.name, family.documentation, family.type)
            metric = metrics.setdefault(family.name, metric)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels | {"replica": replica}, sample.value)

    class Registry:
        def collect(self):
            return metrics.values()

    return generate_latest(Registry())


@serve.deployment
@serve.ingress()
class Ingress:
    """Hands requests on to replicas, and their answers back, piece by piece."""

    def __init__(self, server: DeploymentHandle):
        self._server = server

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        methods = ["GET", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"]  # to be refused, too
        app.add_route("/{path:path}", self.hand_on, methods)
        return app

    async def hand_on(self, request: Request) -> Response:
        """Answer by a replica: that of the session, or one of the router's choice; or by all."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BODY_BYTES:
                error = ApiError(413, f"the body has more than {MOST_BODY_BYTES} bytes")
                return _refusal(error, request.url.path)
        names = "type method path raw_path query_string headers client server scheme http_version"
        scope = {name: request.scope.get(name) for name in names.split()}
        call = Call(scope | {"root_path": ""}, bytes(body))
        if request.url.path in OF_EACH_REPLICA:
            return await self._answer_of_all(call)
        session = request.headers.get(SESSION, "")
        server = self._server.options(stream=True, session_id=session)
        for _ in range(MOST_TRIES):
            messages = server.answer.remote(call)
            with suppress(RayActorError):
                start = await anext(messages)
                break
        else:
            error = ApiError(503, f"{MOST_TRIES} replicas ended before they answered; retry later")
            return _refusal(error, request.url.path)
        answer = StreamingResponse(_pieces(messages, start, request.url.path), start["status"])
        answer.raw_headers = _headers(start)
        return answer

    async def _answer_of_all(self, call: Call) -> Response:
        """One answer from those of all replicas, or the first that is an error."""
        path = call.scope["path"]
        try:
            answers = await self._server.broadcast("whole", call).results_async()
        except RayActorError:
            answers = []
        if not answers:
            error = ApiError(503, "a replica ended before it answered, or none is there; ask again")
            return _refusal(error, path)
        starts = [start for _, start, _ in answers]
        start = max(starts, key=lambda start: start["status"])
        body = answers[starts.index(start)][2]
        if start["status"] == 200 and path == "/metrics":
            body = merged([(replica, text.decode()) for replica, _, text in answers])
        elif start["status"] == 200:
            body = json.dumps(joined([json.loads(each) for *_, each in answers])).encode()
        answer = Response(body, start["status"])
        size = (b"content-length", b"%d" % len(body))
        answer.raw_headers = [pair for pair in _headers(start) if pair[0] != size[0]] + [size]
        return answer


def joined(answers: list[Any]) -> Any:
    """What answers of several replicas say together: sums, all parts of lists, and of booleans
    whether one is true."""
    first = answers[0]
    if isinstance(first, dict):
        return {name: joined([answer[name] for answer in answers]) for name in first}
    if isinstance(first, bool):
        return any(answers)
    if isinstance(first, list):
        return [each for answer in answers for each in answer]
    return sum(answers) if isinstance(first, int) else first


def _headers(start: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """Headers of an answer without the request's id, which Ray Serve adds, too."""
    return [pair for pair in start["headers"] if pair[0].lower() != b"x-request-id"]


def _refusal(error: ApiError, path: str) -> JSONResponse:
    return JSONResponse(error.body_of(path), error.status, error.headers)


async def _pieces(messages: Any, start: dict[str, Any], path: str) -> AsyncIterator[bytes]:
    """The body of an answer. Of a stream of events whose replica ends, the last one is an error,
    as the route's clients read it; any other answer is cut."""
    is_stream = any(b"text/event-stream" in value for _, value in start["headers"])
    num_events = 0
    try:
        async for message in messages:
            piece = message.get("body", b"")
            num_events += piece.count(b"\n\n")  # a piece has whole events
            yield piece
    except RayActorError:
        if not is_stream:
            raise
        error = ApiError(503, "the replica ended in the middle of the answer; ask again")
        event, body = b"", error.body_of(path)
        if path.startswith("/v1/messages"):
            event = b"event: error\n"
        elif path.startswith("/v1/responses"):
            event = b"event: error\n"
            body = body["error"] | {"type": "error", "sequence_number": num_events}
        yield event + b"data: %b\n\n" % json.dumps(body).encode()
    finally:
        messages.cancel()


class Exchange:
    """One request that an ASGI application answers in this process."""

    def __init__(self, app: FastAPI, call: Call):
        self._call, self._app = call, app
        self._sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._is_read, self._gone = False, asyncio.Event()

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """What the application sends. Whoever stops to read it is a client that has gone."""
        task = asyncio.create_task(self._run())
        try:
            while (message := await self._sent.get()) is not None:
                yield message
            await task
        finally:
            self._gone.set()

    async def _run(self) -> None:
        try:
            await self._app(self._call.scope, self._receive, self._sent.put)
        finally:
            self._sent.put_nowait(None)

    async def _receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._call.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}
