"""Clients that are slow, or gone: connections whose headers or bodies do not arrive in time are
dropped, and work for a client that has gone ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from megatron_hybrid.serving.errors import ApiError

T = TypeVar("T")
HEADER_SECONDS = 10.0
"""Most time from the beginning of a connection, or of a further request in it, to the end of the
headers."""
BODY_SECONDS = 20.0
"""Most time of a body to arrive, besides that of its bytes."""
BODY_RATE = 64 << 10
"""Bytes a second that a body may count on."""


class TimedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which waits for headers without a limit."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._begin()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin()

    def on_headers_complete(self) -> None:
        self._end()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def _begin(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._drop)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self) -> None:
        self._timer = None
        self.transport.abort()


class BodyClock:
    """Limits the time of one body."""

    def __init__(self):
        self._began = time.perf_counter()
        self._is_whole = False

    async def receive(self, receive, num_bytes: int):
        """The next message of ASGI. num_bytes: that have come before.

        Raises:
            HTTPException: the body takes too long.
        """
        if self._is_whole:  # it waits for the client's leaving
            return await receive()
        seconds = BODY_SECONDS + num_bytes / BODY_RATE
        try:
            async with asyncio.timeout(self._began + seconds - time.perf_counter()):
                message = await receive()
        except TimeoutError:
            text = f"the body has not arrived within {seconds:.0f} s: send it faster"
            raise HTTPException(408, text, {"Connection": "close"}) from None
        self._is_whole = not message.get("more_body", False)
        return message


async def cancel_on_disconnect(receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled when the client goes away.

    Args:
        receive: of ASGI, after the body.

    Raises:
        ApiError: the client has gone.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ApiError(499, "the client has gone", None, "aborted")
    finally:
        gone.cancel()
        work.cancel()
