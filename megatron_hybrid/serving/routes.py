"""Routes that want a key, and the statuses of their errors, for /openapi.json."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPBearer

from megatron_hybrid.serving.auth import Auth
from megatron_hybrid.serving.http.json_body import BodyRoute
from megatron_hybrid.serving.protocols.schemas import Error

OF_EACH_REPLICA = (
    *("/abort", "/cache/reset", "/cache/save", "/load", "/metrics", "/requests"),
    *("/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
"""Paths that act on, or report, one server alone: with several servers, ask each of them."""
Answers = dict[int | str, dict[str, Any]]
"""The answers of a route by status, as FastAPI takes them."""

EVENTS: Answers = {
    200: {"content": {"text/event-stream": {"schema": {"description": "server-sent events"}}}}
}
"""Answers of a route that streams on request."""
_MEANINGS = {
    400: "a field is wrong, or not supported: `param` names it",
    401: "the API key is missing or wrong",
    403: "the route is the operator's",
    404: "there is no such model",
    409: "the cache, or the weights, cannot do so now",
    413: "the body is too large",
    429: "the key has too many unanswered requests",
    499: "the request was aborted",
    502: "the trainer has not come, or has left",
    503: "too many requests, a rank has failed, or the server shuts down",
    504: "the request took too long",
}
_KEY = HTTPBearer(scheme_name="key", auto_error=False)  # RequestMiddleware checks it


def errors(*statuses: int, model: Any = Error) -> Answers:
    """Describe the errors with these statuses, and that any other one looks the same."""
    found: Answers = {s: {"description": _MEANINGS[s], "model": model} for s in statuses}
    return found | {"default": {"description": "the server failed", "model": model}}


def keyed_routes(*statuses: int, dependencies: Sequence[Any] = ()) -> APIRouter:
    """Return a router for routes that want a key. All its routes have errors of `statuses`."""
    return APIRouter(
        dependencies=[Depends(_KEY), *dependencies],
        route_class=BodyRoute,
        responses=errors(*statuses) if statuses else None,
    )


def operator_routes(auth: Auth, *statuses: int, dependencies: Sequence[Any] = ()) -> APIRouter:
    """Return a router for routes of the operator. `keyed_routes` describes the arguments."""

    async def check(request: Request) -> None:
        auth.check_admin(request.state.key)

    return keyed_routes(*statuses, dependencies=[Depends(check), *dependencies])
