"""json_response: bodies of any size, without a wait of the event loop; and the threads for jobs
with long texts."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic_core import to_json

from megatron_hybrid.serving.http.changes import header_of
from megatron_hybrid.serving.http.slow_clients import cancel_on_disconnect
from megatron_hybrid.utils.daemon_threads import DaemonThreads

R = TypeVar("R")

FEW_TOKENS = 500
"""Tokens of prompt, answer and most likely ones from which on an answer is encoded in a thread."""
LARGE_BYTES = 64 << 10
"""Bytes of a body above which its jobs leave a thread to others."""
_BYTES_OF_TOKEN = 16
"""Bytes that a token takes in an answer."""
_texts = DaemonThreads("texts", 4)


async def to_cpu_thread(job: Callable[[], R], key: str = "", num_bytes: int = 0) -> R:
    """Return the result of a job with long texts, such as tokenizing, templates or JSON. It runs in
    threads that nothing else uses. Cancelling this drops a job that still waits.

    key: that of the caller; keys take turns. num_bytes: size of the text.
    """
    return await asyncio.wrap_future(_texts.submit(job, key, num_bytes > LARGE_BYTES))


async def in_turn(job: Callable[[], R], request: Request) -> R:
    """Run a job as `to_cpu_thread` does, for a request whose body has come. The job is dropped when
    the client goes away.

    Raises:
        ApiError: the client has gone.
    """
    state = request.state
    return await cancel_on_disconnect(
        request.receive, to_cpu_thread(job, state.key, state.num_bytes)
    )


async def json_response(
    make: Callable[[], Any],
    request: Request,
    num_tokens: int | None = None,
    changes: Sequence[str] = (),
) -> Response:
    """Return an answer, made and encoded in a thread, so that the event loop does not wait for it.
    An answer of few tokens is made here, since a thread would cost more.

    num_tokens: size of an answer that the engine has made; None means the request's size.
    changes: those of the request, for a header; `make` may add to them.

    Raises:
        ApiError: the client has gone.
    """
    if num_tokens is None:
        body = await in_turn(lambda: encode_json(make()), request)
    elif num_tokens < FEW_TOKENS:
        body = encode_json(make())
    else:
        size = num_tokens * _BYTES_OF_TOKEN
        body = await to_cpu_thread(lambda: encode_json(make()), request.state.key, size)
    return Response(body, headers=header_of(changes), media_type="application/json")


def encode_json(value: Any) -> bytes:
    """Return the compact JSON of a body or an event; NaN and infinity become null."""
    return to_json(value, inf_nan_mode="null")
