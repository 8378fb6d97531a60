"""Stream: an iterator over the outputs of one request."""

from collections import deque
from collections.abc import Callable, Iterator

from megatron_hybrid.inference.exclusive import EngineBusyError, EngineSuspendedError
from megatron_hybrid.inference.requests.request import Request, RequestOutput


class Stream(Iterator[RequestOutput]):
    """The outputs of one request, of all its samples; see `DynamicInferenceEngine.stream`.

    Args:
        request: a queued one; its outputs and those of its other samples are appended to
            `request.unread`.
        step: runs a step of the engine.
        cancel: ends the request.
        abandoned: requests for the engine to cancel later. A dropped stream adds its request:
            garbage collection may run in any thread, also inside a step, when nothing can be
            cancelled.
    """

    def __init__(
        self,
        request: Request,
        step: Callable[[], object],
        cancel: Callable[[Request], None],
        abandoned: deque[Request],
    ):
        self.request = request
        self._step = step
        self._cancel = cancel
        self._abandoned = abandoned
        self._num_unanswered = len(request.samples)  # samples without their last output
        self._is_closed = False

    def __next__(self) -> RequestOutput:
        request, unread = self.request, self.request.unread
        if self._is_closed:
            raise StopIteration
        try:
            while not unread and (self._num_unanswered or not self._has_ended):
                self._step()
        except (EngineBusyError, EngineSuspendedError):
            raise
        except BaseException:
            if not all(sample.done for sample in request.samples):
                self.close()
            raise
        if not unread:
            raise StopIteration
        output = unread.popleft()
        self._num_unanswered -= output.result is not None
        return output

    def close(self) -> None:
        """End the iteration, and cancel an unanswered request, now or after the running step."""
        was_closed, self._is_closed = self._is_closed, True
        if self._has_ended:
            return
        try:
            self._cancel(self.request)
        except EngineBusyError:
            self._is_closed = was_closed  # nothing has changed
            raise

    @property
    def _has_ended(self) -> bool:
        """Whether nothing of the request is in the engine any more."""
        return all(sample.closed for sample in self.request.samples)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._has_ended:
            self._abandoned.append(self.request)
