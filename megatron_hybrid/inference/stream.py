"""An answer as it grows."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from megatron_hybrid.inference.request import GenerationResult, Request


@dataclass(frozen=True)
class StreamEvent:
    """What one engine step added to a streamed request."""

    tokens: list[int]
    text: str
    result: GenerationResult | None = None  # set on the last event


class Stream(Iterator[StreamEvent]):
    """The events of one request; see `DynamicInferenceEngine.stream`.

    Args:
        events: queues the request, then runs steps; cancels it if one of them fails.
        request: the one they are of.
        cancel: ends it.
        abandoned: where it goes to be ended later, if nobody waits for the rest. Garbage is
            collected at any moment, in any thread, also in the middle of a step, where a request
            cannot be cancelled.
    """

    def __init__(
        self,
        events: Generator[StreamEvent, None, None],
        request: Request,
        cancel: Callable[[Request], None],
        abandoned: deque[Request],
    ):
        self._events = events
        self._request = request
        self._cancel = cancel
        self._abandoned = abandoned

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def close(self) -> None:
        """Cancels the request if it is not answered yet, at once or, where one of its steps is
        running, after that; there are no more events."""
        if self._events.gi_running:
            self._abandoned.append(self._request)
            return
        self._events.close()
        if not self._request.closed:
            self._cancel(self._request)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def __del__(self):
        if not self._request.closed:
            self._abandoned.append(self._request)
