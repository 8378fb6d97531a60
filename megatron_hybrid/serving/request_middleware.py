"""RequestMiddleware: what every request of HTTP passes: an id, the check of its key or its origin,
the limit of its body, and a line in the log."""

import json
import logging
import re
import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.http.json_response import encode_json
from megatron_hybrid.serving.http.slow_clients import TOO_LARGE, LimitedBody
from megatron_hybrid.serving.protocols.answers import prefix_block
from megatron_hybrid.serving.service import Service

access = logging.getLogger("megatron_hybrid.serving.access")

OPEN_PATHS = (
    *("/health", "/ready", "/ping", "/live", "/metrics", "/version"),
    *("/", "/docs", "/openapi.json"),
)
"""Paths that need no key; the files of the page need none either."""
POLLED_PATHS = ("/requests", "/cache/tree", "/cache/history")
"""Paths that the page asks for every second. A success gets no line in the log."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Origins:
    """The check of the headers Host and Origin, where no API key keeps strangers out.

    A browser sends what any page asks for, even to a server that only this machine can reach.
    `Origin` names the page's site. A site whose own name points to this machine (DNS rebinding) has
    that name in `Host`: so names that nobody has allowed are refused, and addresses are not.

    Args:
        hosts: names of the server in addition to those of this machine.
        origins: sites whose pages may call it, such as "https://chat.example"; "*" allows all.
    """

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()):
        self._hosts = {"localhost", socket.gethostname().lower(), *map(str.lower, hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    def check(self, host: str | None, origin: str | None) -> None:
        """Check the headers of a request, each None if it is missing.

        Raises:
            ApiError: a foreign page, or a foreign name.
        """
        if host is not None and not self._is_own(host.lower()):
            raise ApiError(
                403,
                f"this server has no API key and is not called {host!r}: use its address, allow "
                "the name by --allowed-host NAME, or set --api-key",
            )
        if origin is None or "*" in self._origins or origin.lower() in self._origins:
            return
        # A page of this server has its own host; that has just been checked.
        if host is not None and origin.lower().partition("://")[2] == host.lower():
            return
        raise ApiError(
            403,
            f"this server has no API key, and a page of {origin!r} may not call it: allow it by "
            f"--cors-origin {origin}, or set --api-key",
        )

    def _is_own(self, host: str) -> bool:
        name = host.partition("]")[0].removeprefix("[") if "[" in host else host.partition(":")[0]
        if name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


class RequestMiddleware:
    """ASGI middleware. `scope["state"]` gets `request_id`, `key` and, from routes, `ticket`.

    Args:
        app: the application that it calls.
        service: has the keys and limits.
    """

    def __init__(self, app, service: Service):
        self._app = app
        self._service = service
        config = service.config
        is_open = not (config.api_keys or config.admin_keys)
        self._unread: Counter[str] = Counter()  # bytes of bodies, by key
        self._origins = Origins(config.allowed_hosts, config.cors_origins) if is_open else None

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # as GET: the server leaves out the body
            scope = {**scope, "method": "GET"}
        began, status = time.perf_counter(), 499
        # The proxy may remove its path or not.
        scope["root_path"] = self._service.config.root_path.rstrip("/")
        path = scope["path"].removeprefix(scope["root_path"])
        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        given = headers.get("x-request-id", "")
        limit, state["num_bytes"], state["key"] = self._service.config.max_body_bytes, 0, ""
        body = LimitedBody(receive, state, limit, self._unread)
        state["body_is_read"] = body.release
        state["request_id"] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def named(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = state["request_id"]
            await send(message)

        try:
            try:
                if not (path in OPEN_PATHS or path.startswith("/page/")):
                    state["key"] = self._service.auth.key_of(headers)
                    if self._origins is not None:
                        self._origins.check(headers.get("host"), headers.get("origin"))
                length = headers.get("content-length", "")
                if length.isdecimal() and int(length) > limit:
                    raise ApiError(413, TOO_LARGE.format(limit))
            except ApiError as error:
                await refusal(error, scope)(scope, receive, named)
            else:
                await self._app(scope, body, named)
        finally:
            body.release()
            # The pattern of the route: paths of clients are no names of metrics.
            route = getattr(scope.get("route"), "path", "other")
            self._service.num_responses[route, status] += 1
            if path not in POLLED_PATHS or status != 200:
                self._log(scope, status, time.perf_counter() - began)

    def _log(self, scope, status: int, seconds: float) -> None:
        state = scope["state"]
        line: dict[str, Any] = {
            "request_id": state["request_id"],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "ms": round(seconds * 1e3, 1),
        }
        if (ticket := state.get("ticket")) is not None:
            reports = ticket.prefixes.values()
            line |= {
                "prompt_tokens": sum(report.prompt_tokens for report in reports),
                "completion_tokens": ticket.num_generated,
                "prefix": [prefix_block(report) for report in reports],
            }
            if ticket.first_token_seconds is not None:
                line["first_token_ms"] = round(ticket.first_token_seconds * 1e3, 1)
        access.info("%s", _Line(line))


class _Line(dict):
    """A line of the log, which `str` writes as JSON."""

    def __str__(self) -> str:
        return json.dumps(self)


def refusal(error: ApiError, scope) -> Response:
    """Return the answer of an error in the form that the clients of the route read."""
    path = scope["path"].removeprefix(scope["root_path"])
    body = encode_json(error.body_of(path))
    return Response(body, error.status, error.headers, "application/json")
