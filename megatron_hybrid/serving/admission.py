"""Admission: how many requests generate at a time, and their end."""

import asyncio
import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from megatron_hybrid.cache.report import PrefixReport
from megatron_hybrid.inference.async_engine import AsyncEngine
from megatron_hybrid.inference.requests.request import GenerationResult, RequestOutput
from megatron_hybrid.serving.config import ServingConfig
from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.http.json_response import to_cpu_thread

STALL_SECONDS = 120.0
"""Seconds without a step, though requests wait for one, before `/health` reports it."""
_LOOK_SECONDS = 1.0
_REST_SECONDS = 2.0
"""Seconds without a request before freed memory goes back to the system."""
_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)  # glibc has it


@dataclass(eq=False)
class Ticket:
    """One request of HTTP that generates, as the log shows it."""

    request_id: str
    """The caller's label; others may have the same."""
    key: str
    num_samples: int = 1
    """Samples of all prompts together. The ticket counts as so many requests."""
    names: dict[str, str] = field(default_factory=dict)
    """Names of fields in errors: `GenerationFields.caller_names`, and "guide"."""
    task: asyncio.Task | None = None
    is_aborted: bool = False
    prefixes: dict[int, PrefixReport] = field(default_factory=dict)
    """Prefix report of each prompt, by the id of its first sample."""
    num_generated: int = 0
    num_tokens: int = 0
    """Tokens of whole answers: prompts, answers, and the most likely ones of log-probabilities."""
    first_token_seconds: float | None = None
    began: float = field(default_factory=time.perf_counter)
    waits_since: float | None = None
    """Time since which it waits for the engine. It is None while the engine has not got it, or its
    client has yet to take the last output."""

    def count(self, output: RequestOutput) -> None:
        """Count what a step added."""
        if self.first_token_seconds is None:
            self.first_token_seconds = time.perf_counter() - self.began
        self.waits_since = None  # until its client has taken it
        if output.sample_index == 0:
            self.prefixes[output.request_id] = output.prefix
        self.num_generated += len(output.token_ids)

    def count_all(self, results: Sequence[GenerationResult]) -> None:
        """Count whole answers."""
        self.waits_since = None
        self.prefixes = {result.request_id: result.prefix for result in results}
        samples = [sample for result in results for sample in result.samples]
        self.num_generated = sum(len(sample.token_ids) for sample in samples)
        self.num_tokens = self.num_generated + sum(
            len(sample.prompt_tokens)
            + sum(map(len, sample.top_n_logprobs or ()))
            + sum(map(len, sample.prompt_top_n_logprobs or ()))
            for sample in samples
        )
        times = [s.time_to_first_token for s in samples if s.time_to_first_token is not None]
        self.first_token_seconds = min(times, default=None)

    def abort(self) -> bool:
        """End the request. Return whether the engine has it."""
        if self.task is None:
            return False
        self.is_aborted = True
        self.task.cancel()
        return True


class Admission:
    """The requests that generate, those that wait included.

    Args:
        engine: is asked for its steps, and whether a rank has failed.
        max_requests: the engine's.
        config: settings of the server.
    """

    def __init__(self, engine: AsyncEngine, max_requests: int, config: ServingConfig):
        self._engine, self.config = engine, config
        self.most = max_requests + config.max_waiting
        """Most requests that run or wait at a time."""
        self.is_draining = False
        self.num_admitted = 0
        """Requests so far."""
        self._tickets: set[Ticket] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_steps, self._stepped_at = 0, time.perf_counter()

    @property
    def load(self) -> int:
        """Requests that generate now."""
        return len(self._tickets)

    async def watch(self) -> None:
        """Note when the engine steps, until cancelled."""
        while True:
            if self._engine.num_steps != self._num_steps or self._engine.is_held:
                self._num_steps, self._stepped_at = self._engine.num_steps, time.perf_counter()
            await asyncio.sleep(_LOOK_SECONDS)

    async def trim_when_idle(self) -> None:
        """Return freed memory to the system whenever no request runs any more, until cancelled. The
        allocator would keep what large requests took."""
        num_done = 0
        while True:
            await asyncio.sleep(_REST_SECONDS)
            if not self.load and self.num_admitted > num_done:
                num_done = self.num_admitted
                await to_cpu_thread(partial(_trim, 0))

    @property
    def stall(self) -> str | None:
        """Why the engine seems to have stopped, though requests wait for it; None if all is
        well."""
        waits = [each.waits_since for each in self._tickets if each.waits_since is not None]
        if not waits:
            return None
        seconds = time.perf_counter() - max(self._stepped_at, min(waits))
        if seconds < STALL_SECONDS:
            return None
        return f"no request has gone on for {seconds:.0f} s, and {len(waits)} wait"

    def check_count(self, num_prompts: int, n: int) -> None:
        """Raise ApiError for more answers than the server ever takes from one key at a time."""
        per_key = self.config.max_requests_per_key
        most = self.most if per_key is None else min(self.most, per_key)
        if num_prompts * n > most:
            raise ApiError(
                400,
                f"{num_prompts} prompts with n={n} are {num_prompts * n} requests, and one key may "
                f"have {most} at a time: send several requests",
                "prompt" if num_prompts > 1 else "n",
            )

    @contextmanager
    def admitted(self, request_id: str, key: str, num_samples: int = 1) -> Iterator[Ticket]:
        """Return the context of a request that generates; enter it before anything is tokenized.

        num_samples: those of all prompts together; each counts as a request.

        Raises:
            ApiError: too many requests are unanswered, or the server ends.
        """
        if (failure := self._engine.rank_failure) is not None:
            raise ApiError(503, f"{failure}: the server ends")
        if self.is_draining:
            raise ApiError(503, "the server is shutting down: retry on another replica")
        if sum(ticket.num_samples for ticket in self._tickets) + num_samples > self.most:
            raise ApiError(503, f"the server is at capacity ({self.most} run or wait): retry later")
        per_key = self.config.max_requests_per_key
        if per_key is not None:
            own = sum(each.num_samples for each in self._tickets if each.key == key)
            if own + num_samples > per_key:
                raise ApiError(
                    429,
                    f"this key has {own} unanswered requests and asks for {num_samples} more, and "
                    f"may have {per_key}: ask later",
                )
        ticket = Ticket(request_id, key, num_samples)
        self._tickets.add(ticket)
        self.num_admitted += 1
        self._idle.clear()
        try:
            yield ticket
        finally:
            self._tickets.remove(ticket)
            if not self._tickets:
                self._idle.set()

    def abort(self, request_id: str, key: str) -> bool:
        """End the running requests of this key (or, without keys, of anyone) that have this id.
        Return whether there is one."""
        found = [each for each in self._tickets if (each.request_id, each.key) == (request_id, key)]
        return any([each.abort() for each in found])

    def abort_all(self) -> None:
        """End all running requests."""
        for ticket in self._tickets:
            ticket.abort()

    async def drain(self) -> None:
        """Refuse new requests, and wait for those that run; end those that take too long."""
        self.is_draining = True
        try:
            async with asyncio.timeout(self.config.drain_seconds):
                await self._idle.wait()
        except TimeoutError:
            self.abort_all()
