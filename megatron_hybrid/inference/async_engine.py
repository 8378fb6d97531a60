"""AsyncEngine: one engine for all coroutines of a program.

The engine has its own thread, a `StepThread`, whose queue holds the calls of coroutines.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.requests.builder import Prompt, TextTokenizer
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.request import GenerationResult, Request, RequestOutput
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.step_thread import StepThread, use_device_of
from megatron_hybrid.inference.weights.transfer import LOOK_SECONDS
from megatron_hybrid.inference.weights.updates import WeightsUnfinishedError
from megatron_hybrid.text.guide import NICENESS, Guide
from megatron_hybrid.utils.daemon_threads import DaemonThreads
from megatron_hybrid.utils.interrupts import result_of

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


class QueueTimeoutError(TimeoutError):
    """A request has waited for its whole `queue_seconds` and has not begun. It is cancelled."""


class _Call:
    """One prompt in the engine, and the mailbox of the coroutine that waits for it. The mailbox has
    no limit, so that the engine's thread never waits.

    Args:
        streams: put every output into the mailbox, not only the result.
        abandoned: calls for the engine's thread to cancel.
        queue_seconds: most time to wait before it begins; None: any.
    """

    def __init__(
        self, streams: bool, abandoned: "deque[_Call]", queue_seconds: float | None = None
    ):
        self.streams = streams
        self.queue_seconds = queue_seconds
        self.samples: list[Request] = []
        self.num_unanswered = 0  # samples without their last output
        self.is_abandoned = False
        self.loop = asyncio.get_running_loop()
        self._abandoned = abandoned
        self._items: deque[object] = deque()
        self._readers: deque[asyncio.Future[None]] = deque()  # that wait for an item

    async def get(self) -> RequestOutput | GenerationResult | None:
        """Wait for the next output of a stream (None at its end), or the result of `generate`."""
        while not self._items:
            reader = self.loop.create_future()
            self._readers.append(reader)
            try:
                await reader
            except BaseException:
                if self._items:  # it was woken, and another one is to be in its place
                    self._wake_reader()
                raise
        item = self._items.popleft()
        try:
            if isinstance(item, BaseException):
                raise item
            return item
        finally:
            del item  # an error's traceback refers to this frame, and to the failed step's tensors

    def abandon(self) -> None:
        """Nobody waits for it any more. It takes no lock: garbage collection may call it."""
        self.is_abandoned = True
        self._abandoned.append(self)

    def take_outputs(self) -> list[RequestOutput]:
        """The outputs of a stream that are there, up to its end or its error."""
        outputs: list[RequestOutput] = []
        while self._items and isinstance(self._items[0], RequestOutput):
            outputs.append(self._items.popleft())
        return outputs

    def put(self, item: object) -> None:
        """Call it in the event loop."""
        self._items.append(item)
        self._wake_reader()

    def _wake_reader(self) -> None:
        while self._readers:
            reader = self._readers.popleft()
            if not reader.done():
                reader.set_result(None)
                return

    def put_error_of(self, added: Future[None] | asyncio.Task[None]) -> None:
        """Put the error of the job that queues the request, if it has one. Any thread may call
        it."""
        error = asyncio.CancelledError() if added.cancelled() else added.exception()
        if error is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self.loop.call_soon_threadsafe(self.put, error)

    # In the engine's thread

    def answer(self) -> GenerationResult | None:
        """The last item of the mailbox, when all outputs were taken."""
        return None if self.streams else self.samples[0].result()

    @property
    def has_begun(self) -> bool:
        """Whether it has had a slot, or has ended."""
        return self.samples[0].started_at is not None or self.samples[0].done

    @property
    def is_closed(self) -> bool:
        """Whether its last states are in the cache."""
        return all(sample.closed for sample in self.samples)


def _guide_of(options: RequestOptions | None) -> Guide | None:
    """The guide to compile. The engine refuses options of another type."""
    return options.guide if isinstance(options, RequestOptions) else None


def _put_all(items: list[tuple[_Call, object]]) -> None:
    for call, item in items:
        call.put(item)


class AsyncStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, of all its samples; see `AsyncEngine.stream`.

    Args:
        call: its mailbox.
        added: the job that queues the request.
    """

    def __init__(self, call: _Call, added: Future[None] | asyncio.Task[None]):
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

    async def begun(self) -> None:
        """Wait for the first output, which the iteration still gives.

        Raises:
            Exception: as `generate`.
        """
        self._next = await anext(self)

    async def aclose(self) -> None:
        """End the iteration, also for a task that waits for an output, and cancel an unanswered
        request."""
        self._end_for_readers()

    def _end_for_readers(self) -> None:
        self._end()
        self._call.put(None)

    def _end(self) -> None:
        """Also from the garbage collector, when nobody reads."""
        if not self._is_over:
            self._is_over = True
            self._call.abandon()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *error: object) -> None:
        self._end_for_readers()

    def __del__(self) -> None:
        self._end()


def _in_thread(
    method: Callable[Concatenate[DynamicInferenceEngine, P], R],
) -> Callable[Concatenate["AsyncEngine", P], Coroutine[Any, Any, R]]:
    """Make a coroutine function that calls a method of the engine between two steps."""

    @wraps(method)
    async def call(self: "AsyncEngine", *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._run(method, self._engine, *args, **kwargs)

    return call


PAUSE_MODES = ("abort", "wait", "keep")
_PARTS = ("weights", "kv_cache", "scheduling")
"""What `AsyncEngine.wake_up` takes, in the order in which it wakes them up."""


class AsyncEngine:
    """A `DynamicInferenceEngine` for asyncio: requests of all coroutines run in one batch.

    Coroutines of several event loops in several threads may use one AsyncEngine. A cancelled
    coroutine, or a closed or dropped stream, cancels its own request only. If a step fails, its
    requests start again from what is cached: no output is lost, repeated or changed. A request that
    is blamed for three failed steps in a row gets the error of the third; other requests continue.
    `stats`, `explain` and so on are the engine's methods as coroutines, and run between two steps.

    `close` it, or use `async with`. Otherwise the program's exit ends it after the running step. In
    a fork of its process `close` does nothing, and every other method raises RuntimeError.

    If the model is split over ranks, the first rank has the AsyncEngine. Each other rank makes a
    `DynamicInferenceEngine` and calls its `follow()`, which returns when the AsyncEngine is closed.

    Args:
        model, tokenizer, config: as for `DynamicInferenceEngine`.

    Raises:
        RuntimeError: this is not the first rank of the model.
        TypeError, ValueError, MemoryError: as `DynamicInferenceEngine`.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        tokenizer: TextTokenizer | None = None,
        config: InferenceConfig | None = None,
    ) -> None:
        # For the engine's thread only, but for `_abandoned`, which anyone may append to.
        self._calls: dict[int, _Call] = {}  # by the id of each sample
        self._answered: dict[_Call, None] = {}  # those of them that took all outputs
        self._queued: dict[_Call, float] = {}  # until when they may wait to begin
        self._mail: dict[asyncio.AbstractEventLoop, list[tuple[_Call, object]]] = {}
        self._abandoned: deque[_Call] = deque()
        self._pause: str | None = None  # its mode
        self._held: deque[tuple[_Call, Callable[[], None]]] = deque()  # not in the engine yet
        self._on_empty: list[Future[None]] = []  # of those that wait until nothing runs
        closed = "this AsyncEngine is closed: make another one"
        self._thread = StepThread("async-engine", closed)
        self._guide_thread = DaemonThreads("guides", 1, niceness=NICENESS)
        try:
            make = partial(self._make, model, tokenizer, config)
            self._engine = result_of(self._thread.submit(make))
        except BaseException:
            self._thread.end(lambda: None)
            raise

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        queue_seconds: float | None = None,
    ) -> GenerationResult:
        """Answer one prompt; `samples` of the result hold all n. Arguments as for
        `DynamicInferenceEngine.add_request`. Cancelling the task cancels the request.

        queue_seconds: it is given up if it has waited so long for its first slot; None: it waits.

        Raises:
            QueueTimeoutError: it was given up.
            TypeError, ValueError: the request cannot be served; nothing has changed.
            WeightsUnfinishedError: an update of the weights has failed.
            RuntimeError: this engine is closed, or was closed before the answer was complete.
            Exception: the error of the third step that failed with this request, see
                `DynamicInferenceEngine.take_failed`; or of one that no request can go on after.
        """
        call = _Call(False, self._abandoned, queue_seconds)
        try:
            self._thread.require_home()
            if (guide := _guide_of(options)) is not None:
                await self.compile_guide(guide)
            await self._run(self._add, call, prompt, params, options)
            return await call.get()
        except BaseException:
            call.abandon()
            raise

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        queue_seconds: float | None = None,
    ) -> AsyncStream:
        """Queue one prompt and return an async iterator over its outputs, one for each step that
        added to the answer, however slow the reader. Call it in a coroutine. A cancelled reader
        cancels the request; so does `aclose()`, the end of `async with`, or dropping the stream.

        With n > 1 it has the outputs of all samples, by `sample_index`; each sample has a last one,
        with its `result`, and the stream ends behind the last of all. Ending it cancels all
        samples that are not answered. Arguments as for `generate`; the first `anext` raises its
        errors."""
        call = _Call(True, self._abandoned, queue_seconds)
        self._thread.require_home()
        add = partial(self._add, call, prompt, params, options)
        if (guide := _guide_of(options)) is None:
            return AsyncStream(call, self._submit(add))
        return AsyncStream(call, asyncio.create_task(self._add_guided(guide, add)))

    stats = _in_thread(DynamicInferenceEngine.stats)
    histograms = _in_thread(DynamicInferenceEngine.histograms)
    metrics = _in_thread(DynamicInferenceEngine.metrics)
    explain = _in_thread(DynamicInferenceEngine.explain)
    requests = _in_thread(DynamicInferenceEngine.requests)
    cache_tree = _in_thread(DynamicInferenceEngine.cache_tree)
    cache_changes = _in_thread(DynamicInferenceEngine.cache_changes)
    watch_cache = _in_thread(DynamicInferenceEngine.watch_cache)
    save_cache = _in_thread(DynamicInferenceEngine.save_cache)
    clear_cache = _in_thread(DynamicInferenceEngine.clear_cache)
    load_weights = _in_thread(DynamicInferenceEngine.load_weights)
    update_weights = _in_thread(DynamicInferenceEngine.update_weights)
    check_integrity = _in_thread(DynamicInferenceEngine.check_integrity)

    # Between updates of the weights. The names are vLLM's, where they mean the same.

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """See `DynamicInferenceEngine.init_weight_transfer_engine`; steps run while it waits."""
        try:
            joining = await self._run(self._engine.begin_join, init_info)
            ended = asyncio.wrap_future(joining.ended)
            while not await self._run(self._engine.end_join, joining.number):
                await asyncio.wait([ended], timeout=LOOK_SECONDS)
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # it is closed, which has the same effect
                self._submit(self._engine.cancel_join)
            raise

    start_weight_update = _in_thread(DynamicInferenceEngine.start_weight_update)
    receive_weights = _in_thread(DynamicInferenceEngine.receive_weights)
    finish_weight_update = _in_thread(DynamicInferenceEngine.finish_weight_update)

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Let no request start until `resume_generation`; new requests wait.

        Args:
            mode: for requests that have started. "abort": they end now, with the tokens that they
                have and the `finish_reason` "cancelled". "wait": the pause begins after they have
                ended. "keep": they stop where they are, and continue after the pause.
            clear_cache: empty the cache, too; with "keep" it has no effect.

        Raises:
            ValueError: there is no such mode.
            RuntimeError: "abort", and the engine is suspended.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode is {mode!r}; use one of {', '.join(PAUSE_MODES)}")
        await self._run(self._begin_pause, mode)
        if mode == "keep":
            return
        empty: Future[None] = Future()
        await self._run(self._tell_when_empty, empty)
        await asyncio.wrap_future(empty)
        if clear_cache:
            await self._run(self._clear_paused)

    async def resume_generation(self) -> None:
        """End a pause: kept requests continue, and waiting requests start.

        Raises:
            RuntimeError: the engine sleeps.
        """
        await self._run(self._end_pause)

    async def epoch(self) -> int:
        """See `DynamicInferenceEngine.epoch`."""
        return await self._run(lambda: self._engine.epoch)

    async def unfinished_weights(self) -> str | None:
        """See `DynamicInferenceEngine.unfinished_weights`."""
        return await self._run(lambda: self._engine.unfinished_weights)

    async def is_paused(self) -> bool:
        """Whether `pause_generation` or `sleep` holds requests back."""
        return await self._run(lambda: self._pause is not None)

    async def sleep(self, level: int = 1, mode: str = "abort", keep_cache: str = "drop") -> None:
        """Pause, and give memory of the device back until `wake_up`.

        Args:
            level: 0: nothing is given back. 1: the memory of the cache is given back, and the
                weights move to host memory. 2: the weights are dropped, and a trainer must send
                all of them after `wake_up`.
            mode: as for `pause_generation`.
            keep_cache: as for `DynamicInferenceEngine.suspend`.

        Raises:
            ValueError: there is no such level or mode, or as `suspend` and `release_weights`.
            MemoryError: host memory has no room; the engine stays paused.
        """
        if level not in (0, 1, 2):
            raise ValueError(f"level is {level!r}; use 0, 1 or 2")
        await self.pause_generation(mode, clear_cache=False)
        if level:
            await self._run(self._sleep, level, keep_cache)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again, and end the pause when all of it is allocated.

        tags: "weights", "kv_cache" or both; None: both. Weights may be sent between the two.

        Raises:
            ValueError: there is no such tag.
            MemoryError: the device has no room.
            RuntimeError: the cache is to wake up before the weights.
        """
        tags = _PARTS if tags is None else tags
        if unknown := [tag for tag in tags if tag not in _PARTS]:
            raise ValueError(f"there is no {unknown[0]!r} to wake up; use {', '.join(_PARTS)}")
        await self._run(self._wake_up, tags)

    async def is_sleeping(self) -> bool:
        """Whether the engine has given back memory."""
        return await self._run(lambda: self._engine.is_suspended)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the model."""
        return self._engine.ranks.size

    @property
    def rank_failure(self) -> str | None:
        """See `DynamicInferenceEngine.rank_failure`."""
        return self._engine.rank_failure

    def end_waits(self) -> None:
        """See `DynamicInferenceEngine.end_waits`."""
        self._engine.end_waits()

    def check_prompt(self, prompt: Prompt, params: SamplingParams) -> None:
        """Check that a prompt can be served, in any thread.

        Raises:
            TypeError, ValueError: as `generate`, for its tokens.
        """
        self._engine.request_builder.check_prompt(prompt, params)

    async def compile_guide(self, guide: Guide) -> None:
        """Compile a guide in a thread of a low priority, so that no step waits for it. `generate`
        and `stream` do so, too. Cancelling the task takes out a guide that waits.

        Raises:
            TypeError, ValueError: it cannot be kept to.
            RuntimeError: this engine is closed.
        """
        self._thread.require_home()
        check = partial(self._engine.request_builder.check_guide, guide)
        await asyncio.wrap_future(self._guide_thread.submit(check))

    async def close(self) -> None:
        """End the thread after the running step, and complete the folder of `config.cache_dir`.
        Unanswered requests get a RuntimeError, and so does every later call but `close`."""
        await asyncio.shield(asyncio.wrap_future(self._thread.end(self._shut)))

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _add_guided(self, guide: Guide, add: Callable[[], None]) -> None:
        await self.compile_guide(guide)
        await self._run(add)

    async def _run(self, job: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.wrap_future(self._submit(partial(job, *args, **kwargs)))

    def _submit(self, job: Callable[[], R]) -> Future[R]:
        return self._thread.submit(partial(self._between_steps, job))

    # In the engine's thread ----------------------------------------------------------------------

    def _make(
        self,
        model: nn.Module | Sequence[nn.Module],
        tokenizer: TextTokenizer | None,
        config: InferenceConfig | None,
    ) -> DynamicInferenceEngine:
        with ExitStack() as undo:
            engine = undo.enter_context(DynamicInferenceEngine(model, tokenizer, config))
            undo.enter_context(engine.lead())
            use_device_of(engine)
            self._leading = undo.pop_all()
        return engine

    def _between_steps(self, job: Callable[[], R]) -> R:
        while self._abandoned:
            call = self._abandoned.popleft()
            if call.samples and call.samples[0].request_id in self._calls:
                self._cancel(call)
                self._go_on()  # with other ranks a cancellation is a part of the next step
        was_frozen = self._is_frozen
        try:
            return job()
        except StopIteration as error:  # no future can hold it
            raise RuntimeError(f"a tokenizer raised {error!r}") from error
        finally:
            self._let_in()
            if was_frozen:
                self._go_on()
            self._deliver()

    @property
    def _is_frozen(self) -> bool:
        """Whether no step may run."""
        engine = self._engine
        return self._pause == "keep" or engine.is_suspended or engine.awaits_weights

    def _let_in(self) -> None:
        """Give the engine the requests that were held back, if they may begin."""
        while self._held and self._pause is None and not self._is_frozen:
            call, add = self._held.popleft()
            try:
                add()
            except Exception as error:
                self._send(call, error)
        if self._engine.weights_failure is not None:
            while self._held:
                self._send(self._held.popleft()[0], self._unfinished())

    def _unfinished(self) -> WeightsUnfinishedError:
        return WeightsUnfinishedError(self._engine.weights_failure)

    def _begin_pause(self, mode: str) -> None:
        if mode == "abort" and self._calls:
            calls = self._live_calls()
            self._take(self._engine.end([call.samples[0] for call in calls]))
            for call in calls:
                self._end(call, call.answer())
        self._pause = mode

    def _tell_when_empty(self, empty: Future[None]) -> None:
        self._on_empty.append(empty)
        self._note_empty()

    def _note_empty(self) -> None:
        if not self._calls:
            waiting, self._on_empty = self._on_empty, []
            for each in waiting:
                each.set_result(None)

    def _clear_paused(self) -> None:
        if self._pause is not None and not self._engine.is_suspended:  # it is still paused
            self._engine.clear_cache()

    def _end_pause(self) -> None:
        if self._engine.is_suspended:
            raise RuntimeError("the engine sleeps: call wake_up first")
        self._pause = None

    def _sleep(self, level: int, keep_cache: str) -> None:
        self._engine.suspend(keep_cache)
        self._engine.release_weights(keep=level == 1)

    def _wake_up(self, tags: Sequence[str]) -> None:
        if "weights" in tags:
            self._engine.reacquire_weights()
        if "kv_cache" in tags:
            self._engine.resume()
        if not self._engine.is_suspended:
            self._pause = None

    def _send(self, call: _Call, item: object) -> None:
        """Put an item into a call's mailbox, at the end of this job."""
        self._mail.setdefault(call.loop, []).append((call, item))

    def _deliver(self) -> None:
        """Wake each event loop once for all its items: every wake-up hands it the interpreter."""
        mail, self._mail = self._mail, {}
        for loop, items in mail.items():
            try:
                loop.call_soon_threadsafe(_put_all, items)
            except RuntimeError:  # the event loop is closed
                for call, _ in items:
                    call.abandon()

    def _live_calls(self) -> list[_Call]:
        """The oldest first."""
        return list(dict.fromkeys(self._calls.values()))

    def _add(
        self,
        call: _Call,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions | None,
    ) -> None:
        if call.is_abandoned:
            return
        if self._engine.weights_failure is not None:
            raise self._unfinished()
        if self._pause is not None or self._is_frozen:
            self._held.append((call, partial(self._add, call, prompt, params, options)))
            return
        request = self._engine.add_request(prompt, params, options, growing_text=call.streams)
        call.samples = request.samples
        call.num_unanswered = len(call.samples)
        self._calls.update((sample.request_id, call) for sample in call.samples)
        if call.queue_seconds is not None:
            self._queued[call] = request.added_at + call.queue_seconds
        self._go_on()

    def _go_on(self) -> None:
        if self._is_frozen or not self._engine.has_work:
            return
        try:
            self._thread.submit_step(partial(self._between_steps, self._step))
        except RuntimeError:  # closed, or the interpreter exits
            self._end_all()

    def _step(self) -> None:
        if self._is_frozen:  # since it was queued
            return
        try:
            self._take(self._engine.step())
        except BaseException as error:  # the thread survives every error
            self._take(self._engine.take_outputs())
            self._fail(error)
            if not self._calls:  # no one to tell of a second error: no step before the next job
                return
        for call in [call for call in self._answered if call.is_closed]:
            self._end(call, call.answer())
        self._give_up_late()
        self._go_on()

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            call = self._calls.get(output.request_id)
            if call is None:
                continue
            if call.streams:
                self._send(call, output)
            call.num_unanswered -= output.result is not None
            if not call.num_unanswered:
                self._answered[call] = None

    def _fail(self, error: BaseException) -> None:
        """End the calls that the error of a step is for. All others are back in the queue."""
        failed = [request.request_id for request in self._engine.take_failed()]
        calls = dict.fromkeys(self._calls[number] for number in failed if number in self._calls)
        logger.error(
            "a step failed: of %d requests %d get its error, the others go on from what is cached",
            len(self._live_calls()),
            len(calls),
            exc_info=error,
        )
        for call in calls:
            self._cancel(call, error)

    def _give_up_late(self) -> None:
        """End the calls that have waited too long to begin."""
        now = time.perf_counter()
        for call, until in list(self._queued.items()):
            if call.has_begun:
                del self._queued[call]
            elif now > until:
                text = f"the request has waited {call.queue_seconds} s and has not begun"
                self._cancel(call, QueueTimeoutError(f"{text}: send it again later"))

    def _end(self, call: _Call, item: object) -> None:
        for sample in call.samples:
            del self._calls[sample.request_id]
        self._answered.pop(call, None)
        self._queued.pop(call, None)
        self._send(call, item)
        self._note_empty()

    def _cancel(self, call: _Call, error: BaseException | None = None) -> None:
        """Cancel a call. error: for its coroutine, if that waits for an answer."""
        self._end(call, call.answer() if call in self._answered else error)
        try:
            self._engine.cancel_soon(call.samples[0])
        except BaseException:  # such as a tokenizer's panic: the thread survives every error
            logger.exception("request %d is cancelled, but", call.samples[0].request_id)

    def _end_all(self) -> None:
        text = "the AsyncEngine was closed before this request was answered: await it first"
        for call in self._live_calls():
            self._cancel(call, RuntimeError(text))
        while self._held:
            self._send(self._held.popleft()[0], RuntimeError(text))

    def _shut(self) -> None:
        self._end_all()
        self._deliver()
        self._leading.close()
