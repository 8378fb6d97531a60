"""The end of a server, by signals or because a rank has failed."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from megatron_hybrid.serving.service import (
    SAVE_SECONDS,
    STEP_SECONDS,
    Service,
    Step,
    run_steps,
)
from megatron_hybrid.utils.child_lifetime import EndSignal

logger = logging.getLogger(__name__)


class Shutdown:
    """Drains a server at the first signal, and ends what runs at the second.

    Args:
        service: of the server.
        signals: of the process, which has a last deadline once the end has begun.
        stop: called when nothing runs any more.
        first: steps before requests are awaited, such as leaving a registry.
        last: steps between the last request and `stop`.
    """

    def __init__(
        self,
        service: Service,
        signals: EndSignal,
        stop: Callable[[], None],
        first: Sequence[Step] = (),
        last: Sequence[Step] = (),
    ):
        self._service, self._signals, self._stop = service, signals, stop
        drained = service.config.drain_seconds + STEP_SECONDS
        self._steps = [*first, ("the drain", service.drain, drained), *last]
        self._task: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the end has begun."""
        return self._task is not None

    def take_signal(self) -> None:
        """Begin the end, or end what runs. For the event loop's thread."""
        if self.has_begun:
            self._service.end_now()
        else:
            self.begin()

    def begin(self) -> None:
        """Take no new requests, let those that run end, and stop the server."""
        if not self.has_begun:
            logger.info("draining: no new requests")
            steps = sum(seconds for *_, seconds in self._steps)
            self._signals.end_within(steps + 2 * SAVE_SECONDS + STEP_SECONDS)
            self._task = asyncio.ensure_future(self._run())

    def begin_if_due(self) -> None:
        """Begin the end after a signal that was noted, or if another rank has failed: what runs has
        got the error."""
        if not self.has_begun and (failure := self._service.engine.rank_failure) is not None:
            logger.error("the server ends: %s", failure)
            self.begin()
        elif self._signals.was_sent:
            self.begin()

    async def _run(self) -> None:
        try:
            await run_steps(*self._steps)
        finally:
            self._stop()
