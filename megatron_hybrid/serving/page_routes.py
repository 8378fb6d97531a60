"""The page at `/`, and what it shows: requests, the tree of cached prefixes, the last day."""

from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from megatron_hybrid.serving.history import SPANS
from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.http.json_response import json_response
from megatron_hybrid.serving.protocols import schemas
from megatron_hybrid.serving.routes import errors, operator_routes
from megatron_hybrid.serving.service import Service
from megatron_hybrid.serving.tree_feed import TreeFeed

FILES = Path(__file__).parent / "page"
_TEXT_TOKENS = 40
"""Tokens of an edge or a prompt whose text is shown, where prompts may be shown."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "Cache-Control": "no-cache",
}
_Since = Annotated[
    str | None,
    Query(
        description="The `version` of an earlier answer: only later changes of the tree are "
        "returned. By default the whole tree is returned."
    ),
]
_Seconds = Annotated[
    int,
    Query(
        json_schema_extra={"enum": list(SPANS)},
        description="The length of the history, in seconds, up to now.",
    ),
]


def add_page(app: FastAPI, service: Service) -> None:
    """Add the page and its routes, which are the operator's; the page itself is open."""
    num_tokens = _TEXT_TOKENS if service.config.shows_prompts else 0

    @lru_cache(1000)  # most are asked for again after a second
    def text_of(*tokens: int) -> str:
        return service.tokenizer.detokenize(tokens)

    feed = TreeFeed(service.engine, text_of, num_tokens)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(FILES / "index.html", headers=_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(FILES / "docs.html", headers=_HEADERS)

    app.mount("/page", StaticFiles(directory=FILES), "page")

    routes = operator_routes(service.auth, 401, 403)

    @routes.get("/requests", response_model=schemas.Requests)
    async def requests(request: Request) -> Response:
        views = await service.engine.requests(num_tokens)

        def body() -> schemas.Requests:
            rows = [asdict(view) for view in views]
            texts = [text_of(*row.pop("last_tokens")) for row in rows]
            if num_tokens:
                rows = [{**row, "text": text} for row, text in zip(rows, texts)]
            return {"requests": rows}

        return await json_response(body, request)

    @routes.get("/cache/tree", response_model=schemas.Json)
    async def tree(request: Request, since: _Since = None) -> Response:
        columns = await feed.columns(since)
        return await json_response(lambda: columns, request)

    @routes.get("/cache/history", response_model=schemas.History, responses=errors(400))
    async def history(request: Request, seconds: _Seconds = 3600) -> Response:
        if seconds not in SPANS:
            spans = ", ".join(map(str, SPANS))
            raise ApiError(400, f"seconds is {seconds}: use one of {spans}", "seconds")
        columns = await service.history.columns(seconds)
        return await json_response(lambda: columns, request)

    app.include_router(routes)
