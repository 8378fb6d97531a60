"""Service: one engine for the requests of HTTP; and its end, by signals or after a failed rank."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import Any, TypeVar

from megatron_hybrid.distributed.watchdog import RankFailedError
from megatron_hybrid.inference.async_engine import AsyncEngine
from megatron_hybrid.inference.async_stream import AsyncStream, QueueTimeoutError
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.requests.builder import Prompt
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.request import GenerationResult, RequestOutput
from megatron_hybrid.inference.sampling_params import SamplingParams, model_defaults
from megatron_hybrid.inference.weights.updates import WeightsUnfinishedError
from megatron_hybrid.serving.admission import Admission, Ticket
from megatron_hybrid.serving.auth import Auth
from megatron_hybrid.serving.config import ServingConfig
from megatron_hybrid.serving.history import History
from megatron_hybrid.serving.http.errors import ApiError, refusal_of
from megatron_hybrid.serving.http.json_body import RequestBudget
from megatron_hybrid.serving.http.json_response import to_cpu_thread
from megatron_hybrid.text.guide import Guide
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.utils.child_lifetime import EndSignal

logger = logging.getLogger(__name__)
T = TypeVar("T")
STEP_SECONDS = 30.0
"""Time of a step that no request and no disk holds up."""
SAVE_SECONDS = 600.0
"""Time in which the cache is saved, and that in which the engine completes its folder."""
Step = tuple[str, Callable[[], Any], float]
"""A step's name, for the log; its function, or coroutine function; and its most seconds."""


async def run_steps(*steps: Step) -> None:
    """Run steps one after the other. A step that fails or takes too long is logged, not raised."""
    for name, work, seconds in steps:
        try:
            async with asyncio.timeout(seconds):
                if isawaitable(result := work()):
                    await result
        except TimeoutError:
            logger.error("%s was given up after %g s", name, seconds)
        except Exception:
            logger.exception("%s failed", name)


class Service:
    """One engine for the requests of HTTP.

    Args:
        engine, tokenizer: those of the model.
        engine_config: settings of the engine.
        config: settings of the server.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        engine_config: InferenceConfig,
        config: ServingConfig,
    ):
        self.engine = engine
        context = engine_config.max_sequence_length
        self.tokenizer = tokenizer.limited_to(context)
        self.engine_config = engine_config
        self.saves_cache = engine_config.cache_dir is not None
        self.config = config
        self.created = int(time.time())
        defaults = SamplingParams().resolved(model_defaults(tokenizer.generation_config))
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        self.sampling_defaults = {name: getattr(defaults, name) for name in names}
        """Sampling values of requests that give none."""
        self.tokenizer.shown_bytes(0)  # the first call takes long
        self.history = History(engine)
        self.auth = Auth(config)
        self.admission = Admission(engine, engine_config.max_requests, config)
        self.budget = RequestBudget(context, self.admission.most, tokenizer.vocab_size)
        self.num_responses: Counter[tuple[str, int]] = Counter()
        """Number of answers by route and status."""

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that the `model` of a request names, or None for the model alone.

        Raises:
            ApiError: the server has no model or adapter of this name.
        """
        if name in (None, "", self.config.model_name):
            return None
        served = [self.config.model_name, *(each.name for each in self.engine.adapters)]
        if name not in served:
            raise ApiError(
                404,
                f"the model {name!r} is not served: use {' or '.join(map(repr, served))}",
                "model",
                "model_not_found",
            )
        return name

    # The way to the engine ---------------------------------------------------------------------

    async def prepared(self, ticket: Ticket, job: Callable[[], T], num_bytes: int) -> T:
        """Return the result of a job that reads a request of `num_bytes`, run in its turn.

        Raises:
            ApiError: the job, or `generate_all`, would raise it.
        """
        async with self._limited(ticket):
            return await to_cpu_thread(job, ticket.key, num_bytes)

    async def compiled(self, ticket: Ticket, guide: Guide, param: str) -> Guide:
        """Compile a guide, and return it. Cancelling this drops a guide that still waits. `param`
        is the field that asks for the guide; later errors name it, too.

        Raises:
            ApiError: the guide cannot be enforced, or `generate_all` would raise it.
        """
        ticket.names["guide"] = param
        async with self._limited(ticket):
            try:
                await self.engine.compile_guide(guide, self.auth.tenant_of(ticket.key))
                return guide
            except (TypeError, ValueError) as error:
                raise ApiError(400, f"{param}: {error}", param) from error

    async def generate_all(
        self,
        ticket: Ticket,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        options: RequestOptions,
    ) -> list[GenerationResult]:
        """Return whole answers to some prompts, which run at the same time.

        Raises:
            ApiError: a prompt cannot be served, took too long, or was aborted.
        """
        async with self._limited(ticket):
            ticket.waits_since = time.perf_counter()
            calls = self._each(self.engine.generate, prompts, params, options)
            tasks = list(map(asyncio.ensure_future, calls))
            try:
                results = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            for result in results:
                for sample in result.samples:
                    _check(sample)
        ticket.count_all(results)
        return results

    def streams(
        self, prompts: Sequence[Prompt], params: SamplingParams, options: RequestOptions
    ) -> list[AsyncStream]:
        """Start the answers to some prompts, and return their streams."""
        return self._each(self.engine.stream, prompts, params, options)

    def _each(
        self,
        method: Callable[..., T],
        prompts: Sequence[Prompt],
        params: SamplingParams,
        options: RequestOptions,
    ) -> list[T]:
        # The others wait without a limit: a request that has begun is not given up.
        limits = [self.config.queue_seconds, *[None] * (len(prompts) - 1)]
        return [
            method(prompt, params, options, queue_seconds=limit)
            for prompt, limit in zip(prompts, limits)
        ]

    async def wait_for_first_output(self, ticket: Ticket, streams: Sequence[AsyncStream]) -> None:
        """Wait until the engine has taken all streams, and the first one has an output.

        Raises:
            ApiError: see `generate_all`.
        """
        async with self._limited(ticket):
            ticket.waits_since = time.perf_counter()
            for stream in streams:
                await stream.queued()
            _check((await streams[0].begun()).result)

    async def outputs(
        self, ticket: Ticket, stream: AsyncStream
    ) -> AsyncIterator[list[RequestOutput]]:
        """Yield what the steps add to one answer: each time all that is there, such as the outputs
        of all samples of a step, so that a connection gets them in one piece.

        Raises:
            ApiError: see `generate_all`.
        """
        async with self._limited(ticket):
            async for first in stream:
                outputs = [first, *stream.waiting()]
                for output in outputs:
                    ticket.count(output)
                failed = [o for o in outputs if o.result is not None and o.result.error is not None]
                if whole := [output for output in outputs if output not in failed]:
                    yield whole
                    ticket.waits_since = time.perf_counter()
                for output in failed:
                    _check(output.result)

    @asynccontextmanager
    async def _limited(self, ticket: Ticket) -> AsyncIterator[None]:
        """Turn the engine's errors, the end of the time and an abort into ApiErrors."""
        ticket.task, seconds = asyncio.current_task(), self.config.request_seconds
        left = None if seconds is None else seconds - (time.perf_counter() - ticket.began)
        try:
            if left is not None and left <= 0:  # even if the rest is there already
                raise TimeoutError
            async with asyncio.timeout(left):
                yield
        except QueueTimeoutError as error:
            raise ApiError(503, str(error)) from error
        except TimeoutError as error:
            raise ApiError(
                504, f"the request took more than {seconds} s, the most it may"
            ) from error
        except asyncio.CancelledError:
            if not ticket.is_aborted:
                raise
            ticket.task.uncancel()
            if (failure := self.engine.rank_failure) is not None:  # the drain gives it up
                raise ApiError(503, failure) from None
            raise ApiError(499, "the request was aborted", None, "aborted") from None
        except (TypeError, ValueError) as error:
            raise refusal_of(error, ticket.names) from error
        except ApiError:
            raise
        except (RankFailedError, WeightsUnfinishedError) as error:
            raise ApiError(503, str(error)) from error
        except Exception as error:
            logger.exception("request %s failed", ticket.request_id)
            raise ApiError(500, f"{type(error).__name__}: {error}") from error
        finally:
            ticket.task = None

    # The end -----------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Refuse new requests, and wait for those that run; end those that take too long."""
        await self.admission.drain()
        self.engine.end_waits()

    def end_now(self) -> None:
        """End all running requests, and save no cache."""
        self.saves_cache = False
        self.admission.abort_all()
        self.engine.end_waits()

    async def close(self) -> None:
        """Save the cache in its folder, if it has one, and end the engine."""
        if self.saves_cache and self.engine.rank_failure is None:
            await run_steps(("saving the cache", self.engine.save_cache, SAVE_SECONDS))
        await run_steps(("the engine's end", self.engine.close, SAVE_SECONDS))


def _check(result: GenerationResult | None) -> None:
    """Raise ValueError for an answer that its request made fail, ApiError for other failures."""
    if result is not None and result.error is not None:
        raise ValueError(result.error) if result.is_unsatisfiable else ApiError(500, result.error)


class Shutdown:
    """Drains a server at the first signal, and ends what runs at the second.

    Args:
        service: the server's.
        signals: those of the process, which gets a last deadline once the end has begun.
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
        """Begin to drain, or if that has begun, end what runs. For the event loop's thread."""
        if self.has_begun:
            self._service.end_now()
        else:
            self.begin()

    def begin(self) -> None:
        """Refuse new requests, let those that run end, and stop the server."""
        if not self.has_begun:
            logger.info("draining: no new requests")
            steps = sum(seconds for *_, seconds in self._steps)
            self._signals.end_within(steps + 2 * SAVE_SECONDS + STEP_SECONDS)
            self._task = asyncio.ensure_future(self._run())

    def begin_if_due(self) -> None:
        """Begin to drain if a signal was noted, or another rank has failed; then the requests that
        run have got the error."""
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
