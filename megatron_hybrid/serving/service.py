"""Service: who may ask, how much at a time, and the way to the engine."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import hmac
import logging
import time
from collections import Counter, deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from megatron_hybrid.cache.report import PrefixReport
from megatron_hybrid.distributed.watchdog import RankFailedError
from megatron_hybrid.inference.async_engine import AsyncEngine
from megatron_hybrid.inference.async_stream import AsyncStream, QueueTimeoutError
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.requests.builder import Prompt
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.request import GenerationResult, RequestOutput
from megatron_hybrid.inference.sampling_params import SamplingParams, model_defaults
from megatron_hybrid.inference.weights.updates import WeightsUnfinishedError
from megatron_hybrid.serving.config import ServingConfig
from megatron_hybrid.serving.errors import ApiError, refusal_of
from megatron_hybrid.serving.fields import TemplateFields
from megatron_hybrid.serving.history import History
from megatron_hybrid.serving.json_response import to_cpu_thread
from megatron_hybrid.serving.parsers import Style
from megatron_hybrid.text.guide import Guide
from megatron_hybrid.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")
_REST_SECONDS = 2.0
"""Without a request, before freed memory goes back to the system."""
_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)  # glibc has it


@dataclass(eq=False)
class Ticket:
    """One request of HTTP that generates, as the log shows it."""

    request_id: str
    """The caller's label; others may have the same."""
    key: str
    num_samples: int = 1
    """Of all prompts together: for so many requests it counts."""
    names: Mapping[str, str] = field(default_factory=dict)
    """For errors: `GenerationFields.caller_names`."""
    task: asyncio.Task | None = None
    is_aborted: bool = False
    prefixes: dict[int, PrefixReport] = field(default_factory=dict)
    """Of each prompt, by the id of its first sample."""
    num_generated: int = 0
    num_tokens: int = 0
    """Of whole answers: prompts, answers, and the most likely tokens of log-probabilities."""
    first_token_seconds: float | None = None
    began: float = field(default_factory=time.perf_counter)

    def count(self, output: RequestOutput) -> None:
        """Take note of what a step added."""
        if self.first_token_seconds is None:
            self.first_token_seconds = time.perf_counter() - self.began
        if output.sample_index == 0:
            self.prefixes[output.request_id] = output.report
        self.num_generated += len(output.tokens)

    def count_all(self, results: Sequence[GenerationResult]) -> None:
        """Take note of whole answers."""
        self.prefixes = {result.request_id: result.prefix for result in results}
        samples = [sample for result in results for sample in result.samples]
        self.num_generated = sum(len(sample.generated_tokens) for sample in samples)
        self.num_tokens = self.num_generated + sum(
            len(sample.prompt_tokens)
            + sum(map(len, sample.top_n_logprobs or ()))
            + sum(map(len, sample.prompt_top_n_logprobs or ()))
            for sample in samples
        )
        times = [s.time_to_first_token for s in samples if s.time_to_first_token is not None]
        self.first_token_seconds = min(times, default=None)


class PromptStreams(Iterable[AsyncStream]):
    """Streams of the prompts of one request, in their order. A further prompt enters the engine
    when the first of those inside is read.

    Args:
        calls: each makes a stream.
        most: streams at a time.
    """

    def __init__(self, calls: Sequence[Callable[[], AsyncStream]], most: int):
        self._inside = deque(call() for call in calls[:most])
        self._calls = iter(calls[most:])

    def __iter__(self) -> Iterator[AsyncStream]:
        while self._inside:
            yield self._inside[0]
            self._inside.popleft()
            self._inside.extend(call() for call in islice(self._calls, 1))

    async def begun(self) -> None:
        """See `Service.wait_for_first_output`."""
        for stream in self._inside:
            await stream.queued()
        await self._inside[0].begun()

    async def aclose(self) -> None:
        """End all."""
        for stream in self._inside:
            await stream.aclose()


class Service:
    """One engine for the requests of HTTP.

    Args:
        engine: of the model.
        tokenizer: of the model.
        engine_config: the engine's.
        config: of the server.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        engine_config: InferenceConfig,
        config: ServingConfig,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.engine_config = engine_config
        self.saves_cache = engine_config.cache_dir is not None
        self.config = config
        self.created = int(time.time())
        defaults = SamplingParams().resolved(model_defaults(tokenizer.generation_config))
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        self.sampling_defaults = {name: getattr(defaults, name) for name in names}
        """Of requests that say nothing else."""
        tokenizer.shown_bytes(0)  # the first call takes long
        self.history = History(engine)
        self.is_draining = False
        self.num_responses: Counter[tuple[str, int]] = Counter()
        """By route and status."""
        self._tickets: set[Ticket] = set()
        self._num_tickets = 0  # so far
        self._idle = asyncio.Event()
        self._idle.set()

    # Who may ask -------------------------------------------------------------------------------

    def key_of(self, authorization: str | None) -> str:
        """The key of a request; "" where none is needed.

        Raises:
            ApiError: it has none, or none of ours.
        """
        if not (self.config.api_keys or self.config.admin_keys):
            return ""
        kind, _, given = (authorization or "").partition(" ")
        found = self.known_key(given.strip())
        if kind.lower() != "bearer" or found is None:
            raise ApiError(
                401,
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                None,
                "invalid_api_key",
            )
        return found

    def known_key(self, given: str) -> str | None:
        """A key of the server that is the same as this one; None: there is none."""
        keys = (*self.config.api_keys, *self.config.admin_keys)
        # All are compared, each in constant time: the time tells nothing of a key.
        asked = given.encode(errors="surrogatepass")
        found = [key for key in keys if hmac.compare_digest(key.encode(), asked)]
        return found[0] if found else None

    def check_admin(self, key: str) -> None:
        """Raise ApiError unless a key is the operator's."""
        if self.config.admin_keys and key not in self.config.admin_keys:
            raise ApiError(403, "this route is the operator's: use the admin key")
        if len(self.config.api_keys) > 1 and not self.config.admin_keys:
            raise ApiError(
                403,
                "with several API keys this route needs an admin key: start with --admin-key, or "
                "set MEGATRON_HYBRID_ADMIN_KEYS",
            )

    def salt_of(self, key: str, salt: str | None) -> str:
        """The salt of cached prefixes: the request's, and one of its key if there are several."""
        return f"{self.tenant_of(key)}:{salt or ''}" if self.separates_keys else salt or ""

    @property
    def separates_keys(self) -> bool:
        """Whether no key may learn what another one has asked."""
        return len(self.config.api_keys) > 1 and not self.config.shares_cache

    def tenant_of(self, key: str) -> str:
        """A name for the owner of a key, which does not tell the key."""
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest() if key else ""

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for another model than the one there is."""
        if name not in (None, "", self.config.model_name):
            raise ApiError(
                404,
                f"the model {name!r} is not served: use {self.config.model_name!r}",
                "model",
                "model_not_found",
            )

    def tokenizer_of(self, fields: TemplateFields) -> Tokenizer:
        """The tokenizer, with the request's own chat template if it has one.

        Raises:
            ApiError: it may have none.
        """
        if fields.chat_template is None:
            return self.tokenizer
        if not self.config.trusts_templates:
            raise ApiError(
                400,
                "chat_template of a request is a program that may take any time and memory: leave "
                "it out, or start the server with --trust-request-chat-template",
                "chat_template",
                "unsupported_parameter",
            )
        return self.tokenizer.with_chat_template(fields.chat_template, "chat_template")

    def style_of(self, tokenizer: Tokenizer, fields: TemplateFields) -> Style:
        """How the model answers a chat."""
        return self.config.style_of(tokenizer.template_source(fields.shown_tools))

    # How much at a time ------------------------------------------------------------------------

    @property
    def max_samples(self) -> int:
        """Most samples of one request: all that a key may have at a time."""
        limit = self.engine_config.max_requests + self.config.max_waiting
        per_key = self.config.max_requests_per_key
        return limit if per_key is None else min(limit, per_key)

    @contextmanager
    def admitted(self, request_id: str, key: str, num_samples: int = 1) -> Iterator[Ticket]:
        """Context of a request that generates, before anything is tokenized.

        num_samples: of all prompts together, each of which counts.

        Raises:
            ApiError: too many are unanswered, or the server ends.
        """
        limit = self.engine_config.max_requests + self.config.max_waiting
        if (failure := self.engine.rank_failure) is not None:
            raise ApiError(503, f"{failure}: the server ends")
        if self.is_draining:
            raise ApiError(503, "the server is shutting down: ask another one")
        if sum(ticket.num_samples for ticket in self._tickets) + num_samples > limit:
            raise ApiError(503, f"{limit} requests run or wait, the most there may: ask later")
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
        self._num_tickets += 1
        self._idle.clear()
        try:
            yield ticket
        finally:
            self._tickets.remove(ticket)
            if not self._tickets:
                self._idle.set()

    def abort(self, request_id: str, key: str) -> bool:
        """End the running requests of this key (or, with no keys, of anyone) that have this id.
        Returns whether there is one."""
        return any(
            [_aborted(t) for t in self._tickets if (t.request_id, t.key) == (request_id, key)]
        )

    # The way to the engine ---------------------------------------------------------------------

    async def compiled(self, ticket: Ticket, guide: Guide, param: str) -> Guide:
        """Compile a guide, and return it. What cancels this takes out a guide that waits.

        Raises:
            ApiError: the guide in this field cannot be kept to, or as `generate_all`.
        """
        async with self._limited(ticket):
            try:
                await self.engine.compile_guide(guide)
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
        """Whole answers to some prompts, side by side.

        Raises:
            ApiError: a prompt cannot be served, took too long, or was aborted.
        """
        calls = self._each(self.engine.generate, prompts, params, options)
        few = asyncio.Semaphore(self._most_at_once)

        async def answer(
            call: Callable[[], Coroutine[Any, Any, GenerationResult]],
        ) -> GenerationResult:
            async with few:
                return await call()

        async with self._limited(ticket):
            tasks = [asyncio.ensure_future(answer(call)) for call in calls]
            try:
                results = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        for sample in (sample for result in results for sample in result.samples):
            if sample.error is not None:
                raise ApiError(500, sample.error)
        ticket.count_all(results)
        return results

    @property
    def _most_at_once(self) -> int:
        """Prompts of one request in the engine. It gets no more than it looks at: each one takes
        its thread's time."""
        return 2 * self.engine_config.max_requests

    def streams(
        self, prompts: Sequence[Prompt], params: SamplingParams, options: RequestOptions
    ) -> PromptStreams:
        """Streams of the answers to some prompts."""
        calls = self._each(self.engine.stream, prompts, params, options)
        return PromptStreams(calls, self._most_at_once)

    def check_late(
        self, prompts: Sequence[Prompt], params: SamplingParams, names: Mapping[str, str]
    ) -> None:
        """Check prompts that a stream gives to the engine when it has begun, for a thread.

        names: `GenerationFields.caller_names`.

        Raises:
            ApiError: one cannot be served.
        """
        try:
            for prompt in prompts[self._most_at_once :]:
                self.engine.check_prompt(prompt, params)
        except (TypeError, ValueError) as error:
            raise refusal_of(error, names) from error

    def _each(
        self,
        method: Callable[..., T],
        prompts: Sequence[Prompt],
        params: SamplingParams,
        options: RequestOptions,
    ) -> list[Callable[[], T]]:
        # The others wait as long as they have to: a request that has begun is not given up.
        limits = [self.config.queue_seconds, *[None] * (len(prompts) - 1)]
        return [
            partial(method, prompt, params, options, queue_seconds=limit)
            for prompt, limit in zip(prompts, limits)
        ]

    async def wait_for_first_output(self, ticket: Ticket, streams: PromptStreams) -> None:
        """Wait until the engine has taken the first streams, and the first one has an output.

        Raises:
            ApiError: as `generate_all`.
        """
        async with self._limited(ticket):
            await streams.begun()

    async def outputs(
        self, ticket: Ticket, stream: AsyncStream
    ) -> AsyncIterator[list[RequestOutput]]:
        """What the steps add to one answer: each time all that is there, such as the outputs of
        all samples of a step, so that a connection gets them in one piece.

        Raises:
            ApiError: as `generate_all`.
        """
        async with self._limited(ticket):
            async for first in stream:
                outputs = [first, *stream.waiting()]
                for output in outputs:
                    ticket.count(output)
                failed = [o for o in outputs if o.result is not None and o.result.error is not None]
                if whole := [output for output in outputs if output not in failed]:
                    yield whole
                if failed:
                    raise ApiError(500, failed[0].result.error)

    @asynccontextmanager
    async def _limited(self, ticket: Ticket) -> AsyncIterator[None]:
        """Turns the engine's errors, the end of the time and an abort into ApiErrors."""
        ticket.task, seconds = asyncio.current_task(), self.config.request_seconds
        left = None if seconds is None else seconds - (time.perf_counter() - ticket.began)
        try:
            if left is not None and left <= 0:  # also where all that is left is there already
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
            if (failure := self.engine.rank_failure) is not None:  # what the drain gives up
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
        """Take no new requests, and wait for those that run; end those that take too long."""
        self.is_draining = True
        try:
            async with asyncio.timeout(self.config.drain_seconds):
                await self._idle.wait()
        except TimeoutError:
            self.abort_all()
        self.engine.end_waits()

    def end_now(self) -> None:
        """End all running requests, and save no cache."""
        self.saves_cache = False
        self.abort_all()
        self.engine.end_waits()

    def abort_all(self) -> None:
        """End all running requests."""
        for ticket in self._tickets:
            _aborted(ticket)

    @property
    def load(self) -> int:
        """Requests that generate, those that wait included."""
        return len(self._tickets)

    async def give_back(self) -> None:
        """Whenever no request runs any more, give the memory that those have freed back to the
        system, until cancelled: the allocator would keep what large ones took."""
        num_done = 0
        while True:
            await asyncio.sleep(_REST_SECONDS)
            if not self._tickets and self._num_tickets > num_done:
                num_done = self._num_tickets
                await to_cpu_thread(partial(_trim, 0))

    async def close(self) -> None:
        """Save the cache in its folder, if it has one, and end the engine."""
        if self.saves_cache and self.engine.rank_failure is None:
            try:
                await self.engine.save_cache()
            except Exception:
                logger.exception("the cache could not be saved")
        await self.engine.close()


def _aborted(ticket: Ticket) -> bool:
    """End a request, if the engine has it."""
    if ticket.task is None:
        return False
    ticket.is_aborted = True
    ticket.task.cancel()
    return True


async def cancel_on_disconnect(receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled when the client goes away.

    Args:
        receive: of ASGI, behind the body.

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
