"""replay: runs a trace through engines, one request at a time or several in flight.

An engine with a method `foresee` gets all requests in advance, in order of arrival; one with a
method `prepare` makes its own form of tokens (int32 [n]), which is not timed.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import length_hint
from time import thread_time
from typing import Any

import numpy as np

from megatron_hybrid.tools.replay.protocol import Engine, Request
from megatron_hybrid.utils.progress import progress

TURN = 50
"""Requests that each engine serves in its turn."""


@dataclass
class Replay:
    """Results of a trace, by request."""

    prompt_tokens: list[int] = field(default_factory=list)
    skipped_tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """CPU time of this thread in `begin`, refused attempts included, and `finish`, without garbage
    collection, so that other processes and engines do not disturb it."""

    @property
    def skipped_share(self) -> float:
        """Part of all prompt tokens that was not computed."""
        return sum(self.skipped_tokens) / max(1, sum(self.prompt_tokens))


def replay(requests: Iterable[Request], engine: Engine, in_flight: int = 1) -> Replay:
    """Begin requests in order of arrival. If `in_flight` of them run, the next has no room, or the
    last turn of its session still runs, the oldest one finishes first.

    Raises:
        RuntimeError: the engine has no room for a request that is alone.
    """
    return side_by_side(requests, [engine], in_flight)[0]


def side_by_side(
    requests: Iterable[Request], engines: Sequence[Engine], in_flight: int = 1
) -> list[Replay]:
    """`replay` the same requests through several engines, which take turns, so that a slowdown of
    the machine affects all of them."""
    runs = [_Run(engine, in_flight) for engine in engines]
    for engine in engines:
        if hasattr(engine, "foresee"):
            requests = list(requests)
            engine.foresee(requests)
    rest = iter(requests)
    with progress("replaying", length_hint(requests) or None, in_bytes=False) as advance:
        while turn := list(islice(rest, TURN)):
            for run in runs:
                for request in turn:
                    run.serve(request)
            advance(len(turn))
    for run in runs:
        run.finish()
    return [run.result for run in runs]


class _Run:
    """The replay of one engine."""

    def __init__(self, engine: Engine, in_flight: int):
        self.result = Replay()
        self._engine = engine
        self._prepare = getattr(engine, "prepare", lambda tokens: tokens)
        self._in_flight = in_flight
        self._running: deque[tuple[int, Request, Any]] = deque()

    def serve(self, request: Request) -> None:
        """Begin the next request."""
        result, index = self.result, len(self.result.prompt_tokens)
        while len(self._running) >= self._in_flight or any(
            other.session == request.session for _, other, _ in self._running
        ):
            self._finish_oldest()
        prompt = self._prepare(request.prompt)
        total = 0.0
        while True:
            handle, seconds = timed(self._engine.begin, prompt, request.message_starts)
            total += seconds
            if handle is not None:
                break
            if not self._running:
                raise RuntimeError(f"no room for request {index}, which is alone")
            self._finish_oldest()
        self._running.append((index, request, handle))
        result.prompt_tokens.append(len(request.prompt))
        result.skipped_tokens.append(handle.skipped_tokens)
        result.seconds.append(total)

    def finish(self) -> None:
        """Finish the running requests."""
        while self._running:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        index, request, handle = self._running.popleft()
        tokens = self._prepare(np.concatenate([request.prompt, request.output]))
        _, seconds = timed(self._engine.finish, handle, tokens)
        self.result.seconds[index] += seconds


def timed(call: Callable, *arguments: Any) -> tuple[Any, float]:
    """Return the result of a call, and its seconds. Garbage, which may be another engine's, is
    collected afterwards."""
    collects = gc.isenabled()
    gc.disable()
    try:
        began = thread_time()
        return call(*arguments), thread_time() - began
    finally:
        if collects:
            gc.enable()
