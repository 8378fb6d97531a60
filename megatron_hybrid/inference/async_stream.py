"""AsyncStream: the outputs of one request for coroutines, and the mailbox that they wait at."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import suppress

from megatron_hybrid.inference.requests.request import GenerationResult, Request, RequestOutput


class QueueTimeoutError(TimeoutError):
    """A request has waited for its whole `queue_seconds` and has not begun. It is cancelled."""


class AsyncCall:
    """One prompt in the engine, and the mailbox of the coroutine that waits for it. The mailbox has
    no limit, so that the engine's thread never waits.

    Args:
        streams: put every output into the mailbox, not only the result.
        abandoned: calls for the engine's thread to cancel.
        queue_seconds: longest wait before it begins; None means no limit.
    """

    def __init__(
        self, streams: bool, abandoned: "deque[AsyncCall]", queue_seconds: float | None = None
    ):
        self.streams = streams
        self.queue_seconds = queue_seconds
        self.samples: list[Request] = []
        self.num_unanswered = 0  # samples without their last output
        self.is_abandoned = False
        self.loop = asyncio.get_running_loop()
        self._abandoned = abandoned
        self._items: asyncio.Queue[object] = asyncio.Queue()
        self.put = self._items.put_nowait
        """Puts an item into the mailbox. Call it in the event loop."""

    async def get(self) -> RequestOutput | GenerationResult | None:
        """Wait for the next output of a stream (None at its end), or the result of `generate`."""
        item = await self._items.get()
        try:
            if isinstance(item, BaseException):
                raise item
            return item
        finally:
            del item  # an error's traceback refers to this frame, and to the failed step's tensors

    def abandon(self) -> None:
        """Note that nobody waits any more. It takes no lock, as garbage collection may call it."""
        self.is_abandoned = True
        self._abandoned.append(self)

    def take_outputs(self) -> list[RequestOutput]:
        """Take the outputs that are in the mailbox, up to the end or the error of the stream."""
        outputs: list[RequestOutput] = []
        while not self._items.empty():
            item = self._items.get_nowait()
            if not isinstance(item, RequestOutput):
                self.put(item)  # it is the last one
                break
            outputs.append(item)
        return outputs

    def put_error_of(self, added: Future[None] | asyncio.Task[None]) -> None:
        """Put the error of the job that queues the request, if any. Any thread may call it."""
        error = asyncio.CancelledError() if added.cancelled() else added.exception()
        if error is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self.loop.call_soon_threadsafe(self.put, error)

    # In the engine's thread

    def answer(self) -> GenerationResult | None:
        """Return the last item for the mailbox, when all outputs were taken."""
        return None if self.streams else self.samples[0].result()

    @property
    def has_begun(self) -> bool:
        """Whether it has had a slot, or has ended."""
        return self.samples[0].started_at is not None or self.samples[0].done

    @property
    def is_closed(self) -> bool:
        """Whether its last states are in the cache."""
        return all(sample.closed for sample in self.samples)


class AsyncStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, of all its samples; see `AsyncEngine.stream`.

    Args:
        call: its mailbox.
        added: the job that queues the request.
    """

    def __init__(self, call: AsyncCall, added: Future[None] | asyncio.Task[None]):
        self._call = call
        self._added = added
        added.add_done_callback(call.put_error_of)
        self._next: RequestOutput | None = None  # taken by `begun`
        self._is_over = False

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        if self._next is not None:
            output, self._next = self._next, None
            return output
        try:
            output = await self._call.get()
        except BaseException:
            self._end_for_readers()
            raise
        if output is None:
            self._is_over = True
            self._call.put(None)  # for the next reader
            raise StopAsyncIteration
        return output

    def waiting(self) -> list[RequestOutput]:
        """Take the outputs that the iteration would give without a wait."""
        if self._is_over:
            return []
        first, self._next = self._next, None
        return [*([] if first is None else [first]), *self._call.take_outputs()]

    async def queued(self) -> None:
        """Wait until the engine has taken the request.

        Raises:
            TypeError, ValueError, RuntimeError: as `generate`.
        """
        await asyncio.shield(asyncio.wrap_future(self._added))

    async def begun(self) -> RequestOutput:
        """Return the first output, which the iteration still gives.

        Raises:
            Exception: as `generate`.
        """
        self._next = await anext(self)
        return self._next

    async def aclose(self) -> None:
        """End the iteration, also for a task that waits for an output, and cancel an unanswered
        request."""
        self._end_for_readers()

    def _end_for_readers(self) -> None:
        self._end()
        self._call.put(None)

    def _end(self) -> None:
        """End the stream. The garbage collector does so, too, when nobody reads."""
        if not self._is_over:
            self._is_over = True
            self._call.abandon()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *error: object) -> None:
        self._end_for_readers()

    def __del__(self) -> None:
        self._end()
