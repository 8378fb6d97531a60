"""Drives a trace through an engine, one request at a time or several in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import thread_time

import numpy as np

from megatron_hybrid.tools.replay.protocol import Engine, Foreseeing, Handle, KnowsMessages
from megatron_hybrid.tools.replay.request import Request


@dataclass
class Replay:
    """What came of a trace, request by request."""

    prompt_tokens: list[int] = field(default_factory=list)
    skipped_tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """CPU time of this thread in `begin` and `finish`: other processes do not disturb it."""
    miss_reasons: list[str | None] = field(default_factory=list)
    """Of engines that say; None: nothing that was ever cached went unused."""
    explains: bool = False
    """Whether the engine gives reasons at all."""

    @property
    def skipped_share(self) -> float:
        """Part of all prompt tokens that was not computed."""
        return sum(self.skipped_tokens) / max(1, sum(self.prompt_tokens))

    def micros(self, quantile: float) -> float:
        """Quantile of the time per request, in microseconds."""
        return float(np.quantile(self.seconds, quantile)) * 1e6

    def lost_tokens(self, possible: list[int]) -> dict[str, int]:
        """Tokens not skipped that `possible` skipped (those of an infinite cache), by reason.
        Empty if the engine gives none."""
        lost: dict[str, int] = {}
        if not self.explains:
            return lost
        for skipped, could, reason in zip(self.skipped_tokens, possible, self.miss_reasons):
            if could > skipped:
                key = reason or "unexplained"
                lost[key] = lost.get(key, 0) + could - skipped
        return dict(sorted(lost.items(), key=lambda item: -item[1]))


def replay(requests: Iterable[Request], engine: Engine, in_flight: int = 1) -> Replay:
    """Requests begin in order of arrival. When `in_flight` of them are running, or when the next
    finds no room, or when its session's last turn is still running, the oldest one finishes first.

    Raises:
        RuntimeError: the engine has no room for a request that is alone.
    """
    if isinstance(engine, Foreseeing):
        requests = list(requests)
        engine.foresee(requests)
    knows_messages = isinstance(engine, KnowsMessages)
    result = Replay()
    running: deque[tuple[int, Request, Handle]] = deque()

    def finish_oldest() -> None:
        index, request, handle = running.popleft()
        tokens = engine.prepare(np.concatenate([request.prompt, request.output]))
        began = thread_time()
        engine.finish(handle, tokens)
        result.seconds[index] += thread_time() - began

    for index, request in enumerate(requests):
        while len(running) >= in_flight or any(
            other.session == request.session for _, other, _ in running
        ):
            finish_oldest()
        prompt = engine.prepare(request.prompt)
        while True:
            began = thread_time()
            if knows_messages:
                handle = engine.begin_chat(prompt, request.message_starts)
            else:
                handle = engine.begin(prompt)
            seconds = thread_time() - began
            if handle is not None:
                break
            if not running:
                raise RuntimeError(f"no room for request {index}, which is alone")
            finish_oldest()
        running.append((index, request, handle))
        result.prompt_tokens.append(len(request.prompt))
        result.skipped_tokens.append(handle.skipped_tokens)
        result.seconds.append(seconds)
        result.miss_reasons.append(getattr(handle, "miss_reason", None))
        result.explains |= hasattr(handle, "miss_reason")
    while running:
        finish_oldest()
    return result
