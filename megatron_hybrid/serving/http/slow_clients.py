"""Clients that are slow, or gone: connections whose headers are too large, or whose headers or
bodies do not arrive in time, are dropped, and work for a client that has gone ends."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from megatron_hybrid.serving.http.errors import RETRY_SECONDS, ApiError

T = TypeVar("T")
MAX_HEADERS = 128
"""Most headers of a request."""
MAX_HEADER_BYTES = 64 << 10
"""Most bytes of all headers of a request, and of its path."""
HEADER_SECONDS = 10.0
"""Most seconds from the beginning of a connection, or of a further request in it, to the end of the
headers."""
BODY_SECONDS = 20.0
"""Most seconds for a body to arrive, in addition to those of its bytes at `BODY_RATE`."""
BODY_RATE = 64 << 10
"""Bytes a second of the slowest body."""
UNREAD_BODIES = 16
"""Bodies of the largest size that one key may send, or have wait to be read, at a time."""
IDLE_SECONDS = 75
"""Seconds that a connection stays open without a request. Proxies reuse theirs for up to 60, and
answer 502 if the server closes one at that moment."""
TOO_LARGE = "the body has more than {} bytes, the most it may: send less"


class TimedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits of the time and size of headers, which it lacks."""

    _timer: asyncio.TimerHandle | None = None
    _num_headers = _num_header_bytes = 0
    _num_open = 0
    """Bytes since the last header, or piece of a body, was whole."""

    def data_received(self, data: bytes) -> None:
        self._num_open += len(data)
        super().data_received(data)
        if self._num_open > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._num_header_bytes = self._num_open
            self.send_400_response("")

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._num_headers += 1
        self._count(len(name) + len(value))

    def on_body(self, body: bytes) -> None:
        self._num_open = 0
        super().on_body(body)

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._is_too_large:
            raise ValueError  # in the parser's callback: it calls `send_400_response`

    @property
    def _is_too_large(self) -> bool:
        return self._num_headers > MAX_HEADERS or self._num_header_bytes > MAX_HEADER_BYTES

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP with 400, and headers that are too large with 431."""
        if not self._is_too_large:
            super().send_400_response(msg)
            return
        text = (
            f"a request may have {MAX_HEADERS} headers, and {MAX_HEADER_BYTES} bytes of them: send "
            "fewer"
        )
        body = json.dumps(ApiError(431, text).body).encode()
        head = f"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._begin()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers = self._num_header_bytes = 0
        self._begin()

    def on_headers_complete(self) -> None:
        self._num_open = 0
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


class LimitedBody:
    """ASGI's `receive` with limits of a body's time and size, and of all bodies of a key.

    Args:
        receive: that of ASGI.
        state: that of the request; its `num_bytes` counts the bytes that have come.
        limit: most bytes of a body.
        unread: bytes of the bodies that have come, or wait to be read, by key.
    """

    def __init__(self, receive, state: dict[str, Any], limit: int, unread: Counter[str]):
        self._receive, self._state, self._limit, self._unread = receive, state, limit, unread
        self._began, self._is_whole, self._held = time.perf_counter(), False, 0

    def release(self) -> None:
        """Stop counting the body, which is read or dropped, among the unread ones."""
        self._unread[self._state["key"]] -= self._held
        self._held = 0

    async def __call__(self):
        """Receive the next message.

        Raises:
            HTTPException: the body takes too long or is too large, or its key sends too much.
        """
        if self._is_whole:  # the caller waits for the client to leave
            return await self._receive()
        state, key = self._state, self._state["key"]
        seconds = BODY_SECONDS + state["num_bytes"] / BODY_RATE
        try:
            async with asyncio.timeout(self._began + seconds - time.perf_counter()):
                message = await self._receive()
        except TimeoutError:
            text = f"the body has not arrived within {seconds:.0f} s: send it faster"
            raise HTTPException(408, text, {"Connection": "close"}) from None
        self._is_whole = not message.get("more_body", False)
        num_bytes = len(message.get("body", b""))
        self._held += num_bytes
        self._unread[key] += num_bytes
        state["num_bytes"] += num_bytes
        if state["num_bytes"] > self._limit:
            raise HTTPException(413, TOO_LARGE.format(self._limit))
        if (most := UNREAD_BODIES * self._limit) < self._unread[key]:
            raise HTTPException(
                429,
                f"this key sends {self._unread[key]} bytes at a time, and may send {most}: send "
                "fewer requests at a time",
                {"Retry-After": str(RETRY_SECONDS)},
            )
        return message


async def cancel_on_disconnect(receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of some work, which is cancelled when the client goes away.

    Args:
        receive: that of ASGI, after the body.

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
