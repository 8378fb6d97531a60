"""Loading: who asks before the model is there gets 503 at once, from a thread."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from concurrent.futures import Future
from contextlib import suppress

from megatron_hybrid.serving.errors import ApiError
from megatron_hybrid.serving.json_response import encode_json

_SECONDS = 1.0
"""Seconds for a request to come, and for its client to take the answer."""
_TICKS_SECONDS = 0.01
_PIECE = 64 << 10


class Loading:
    """Answers every request with 503, until it is closed. A context.

    Args:
        bound: listens; it stays open. None: `uds` is used.
        uds: path of a Unix socket.
        context: for HTTPS.
    """

    def __init__(
        self, bound: socket.socket | None, uds: str | None, context: ssl.SSLContext | None
    ):
        self._where = {"path": uds} if bound is None else {"sock": bound.dup()}
        self._context = context
        error = ApiError(503, "the model is loading: ask later")
        self._body = encode_json(error.body)
        fields = {"Content-Type": "application/json", "Content-Length": str(len(self._body))}
        fields |= {"Connection": "close", **error.headers}
        lines = [f"{name}: {value}\r\n" for name, value in fields.items()]
        self._head = f"HTTP/1.1 503 Service Unavailable\r\n{''.join(lines)}\r\n".encode()
        self._begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Loading:
        self._thread.start()
        self._loop, self._end = self._begun.result()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Answer no more requests; those that are here get their answer."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    async def _serve(self) -> None:
        try:
            end, running = asyncio.Event(), set()

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                running.add(asyncio.current_task())
                with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                    async with asyncio.timeout(_SECONDS):
                        is_head = (await reader.readexactly(4)) == b"HEAD"
                        writer.write(self._head + (b"" if is_head else self._body))
                        # A connection that is closed with unread bytes loses the answer, too.
                        while await reader.read(_PIECE):
                            pass
                writer.close()

            start = asyncio.start_unix_server if "path" in self._where else asyncio.start_server
            server = await start(answer, **self._where, ssl=self._context)
        except BaseException as error:
            self._begun.set_exception(error)
            return
        self._begun.set_result((asyncio.get_running_loop(), end))
        await end.wait()
        server.close()
        await asyncio.sleep(_TICKS_SECONDS)  # whoever has just come begins
        while unanswered := [task for task in running if not task.done()]:
            await asyncio.wait(unanswered)
