"""AsyncEngine: one engine for all coroutines of a program.

The engine has its own thread, a `StepThread`, whose queue holds the calls of coroutines.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

from megatron_hybrid.cache.eviction import CacheListener
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.async_calls import AsyncCalls, StepThread
from megatron_hybrid.inference.async_stream import AsyncCall, AsyncStream
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.requests.builder import Prompt, TextTokenizer
from megatron_hybrid.inference.requests.options import LoadedAdapter, RequestOptions
from megatron_hybrid.inference.requests.request import GenerationResult
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.weights.transfer import LOOK_SECONDS
from megatron_hybrid.text.guide import NICENESS, Guide
from megatron_hybrid.utils.daemon_threads import DaemonThreads
from megatron_hybrid.utils.interrupts import result_of
from megatron_hybrid.utils.other_names import names_arguments

P = ParamSpec("P")
R = TypeVar("R")
Listener = TypeVar("Listener", bound=CacheListener)


def _guide_of(options: RequestOptions | None) -> Guide | None:
    """Return the guide to compile. The engine refuses options of another type."""
    return options.guide if isinstance(options, RequestOptions) else None


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


@names_arguments()
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
        closed = "this AsyncEngine is closed: make another one"
        self._thread = StepThread("async-engine", closed)
        self._guide_thread = DaemonThreads("guides", 1, niceness=NICENESS)
        self._adapter_thread = DaemonThreads("adapters", 1)
        self._calls = AsyncCalls(self._thread)
        try:
            result_of(self._thread.submit(partial(self._calls.make, model, tokenizer, config)))
        except BaseException:
            self._thread.end(lambda: None)
            raise
        self._engine = self._calls.engine

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        queue_seconds: float | None = None,
    ) -> GenerationResult:
        """Answer one prompt; `samples` of the result hold all n. Arguments are those of
        `DynamicInferenceEngine.add_request`. Cancelling the task cancels the request.

        queue_seconds: longest wait for the first slot; then the request is cancelled. None means
            no limit.

        Raises:
            QueueTimeoutError: the request has waited for `queue_seconds`.
            TypeError, ValueError: the request cannot be served; nothing has changed.
            WeightsUnfinishedError: an update of the weights has failed.
            RuntimeError: this engine is closed, or was closed before the answer was complete.
            Exception: an error from which no request can go on, or that of the third step that
                failed with this request, see `DynamicInferenceEngine.take_failed`."""
        call = AsyncCall(False, self._calls.abandoned, queue_seconds)
        try:
            self._thread.require_home()
            if (guide := _guide_of(options)) is not None:
                await self.compile_guide(guide, options.tenant)
            await self._run(self._calls.add, call, prompt, params, options)
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

        With n > 1 it has the outputs of all samples, by `sample_index`. The last output of each
        sample has its `result`, and the stream ends after the last one of all. Ending it early
        cancels the unanswered samples. Arguments are those of `generate`, whose errors the first
        `anext` raises."""
        call = AsyncCall(True, self._calls.abandoned, queue_seconds)
        self._thread.require_home()
        add = partial(self._calls.add, call, prompt, params, options)
        if (guide := _guide_of(options)) is None:
            return AsyncStream(call, self._submit(add))
        adding = self._add_guided(guide, options.tenant, add)
        return AsyncStream(call, asyncio.create_task(adding))

    @property
    def adapters(self) -> list[LoadedAdapter]:
        """The adapters that requests can choose."""
        return self._engine.adapters.loaded

    async def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> LoadedAdapter:
        """Load an adapter, see `AdapterCalls.load`. Steps run while it is read; several adapters
        are read one after the other."""
        self._thread.require_home()
        load = partial(self._load_adapter, name, folder)
        return await asyncio.wrap_future(self._adapter_thread.submit(load))

    def _load_adapter(self, name: str, folder: str | os.PathLike[str]) -> LoadedAdapter:
        calls = self._engine.adapters
        reading = self._submit(partial(calls.begin_load, name, folder)).result()
        wait([reading])
        return self._submit(partial(calls.end_load, name)).result()

    async def unload_adapter(self, name: str) -> None:
        """Drop an adapter, see `AdapterCalls.unload`."""
        await self._run(self._engine.adapters.unload, name)

    stats = _in_thread(DynamicInferenceEngine.stats)
    metrics = _in_thread(DynamicInferenceEngine.metrics)
    explain = _in_thread(DynamicInferenceEngine.explain)
    requests = _in_thread(DynamicInferenceEngine.requests)
    cache_tree = _in_thread(DynamicInferenceEngine.cache_tree)
    cache_changes = _in_thread(DynamicInferenceEngine.cache_changes)
    save_cache = _in_thread(DynamicInferenceEngine.save_cache)
    clear_cache = _in_thread(DynamicInferenceEngine.clear_cache)
    load_weights = _in_thread(DynamicInferenceEngine.load_weights)
    update_weights = _in_thread(DynamicInferenceEngine.update_weights)
    check_integrity = _in_thread(DynamicInferenceEngine.check_integrity)

    async def histograms(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return the counts of times and the longest times, by the names of
        `prometheus.HISTOGRAMS`: up to each of `meter.BOUNDS`, in seconds, and beyond the last."""
        measured = self._engine.live.meter.histograms.items()
        return await self._run(
            lambda: {name: (list(each.counts), list(each.longest)) for name, each in measured}
        )

    async def watch_cache(self, make: Callable[[PrefixCache], Listener]) -> Listener:
        """Make a listener of the cache, which from now on follows what is cached and evicted on
        the first rank. Call it before the first request: it does not report earlier records."""

        def watch() -> Listener:
            listener = make(self._engine.cache)
            self._engine.cache.watch(listener)
            return listener

        return await self._run(watch)

    # Between updates of the weights. The names are vLLM's, where they mean the same.

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Call `DynamicInferenceEngine.init_weight_transfer_engine`; steps run while it waits."""
        try:
            joining = await self._run(self._engine.weights.begin_join, init_info)
            ended = asyncio.wrap_future(joining.ended)
            while not await self._run(self._engine.weights.end_join, joining.number):
                await asyncio.wait([ended], timeout=LOOK_SECONDS)
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # it is closed, which has the same effect
                self._submit(self._engine.weights.cancel_join)
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
            RuntimeError: the mode is "abort" and the engine is suspended, or the mode is "wait"
                and the pause was ended before it began.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode is {mode!r}; use one of {', '.join(PAUSE_MODES)}")
        await self._run(self._calls.begin_pause, mode)
        if mode == "keep":
            return
        empty: Future[None] = Future()
        await self._run(self._calls.tell_when_empty, empty)
        await asyncio.wrap_future(empty)
        if clear_cache:
            await self._run(self._calls.clear_paused)

    async def resume_generation(self) -> None:
        """End a pause: kept requests continue, and waiting requests start.

        Raises:
            RuntimeError: the engine sleeps.
        """
        await self._run(self._calls.end_pause)

    async def epoch(self) -> int:
        """Return `DynamicInferenceEngine.epoch`."""
        return await self._run(lambda: self._engine.epoch)

    async def unfinished_weights(self) -> str | None:
        """Return why steps are refused until weights come, and how to go on, or None."""
        return await self._run(lambda: self._engine.weights.unfinished)

    async def is_paused(self) -> bool:
        """Return whether `pause_generation` or `sleep` holds requests back."""
        return await self._run(lambda: self._calls.is_paused)

    async def sleep(self, level: int = 1, mode: str = "abort", keep_cache: str = "drop") -> None:
        """Pause, and give memory of the device back until `wake_up`.

        Args:
            level: 0 gives nothing back. 1 gives the memory of the cache back and moves the weights
                to host memory. 2 also drops the weights, and a trainer must send all of them after
                `wake_up`.
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
            await self._run(self._calls.sleep, level, keep_cache)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again, and end the pause when all of it is allocated.

        tags: some of "weights", "kv_cache" and "scheduling", which allocates nothing; by default
            all. Weights may be sent between the first two.

        Raises:
            ValueError: there is no such tag.
            MemoryError: the device has no room.
            RuntimeError: the cache is to wake up before the weights.
        """
        tags = _PARTS if tags is None else [tags] if isinstance(tags, str) else tags
        if unknown := [tag for tag in tags if tag not in _PARTS]:
            raise ValueError(f"there is no {unknown[0]!r} to wake up; use {', '.join(_PARTS)}")
        await self._run(self._calls.wake_up, tags)

    async def is_sleeping(self) -> bool:
        """Return whether the engine has given back memory."""
        return await self._run(lambda: self._engine.is_suspended)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the model."""
        return self._engine.ranks.size

    @property
    def rank_failure(self) -> str | None:
        """See `DynamicInferenceEngine.rank_failure`."""
        return self._engine.rank_failure

    @property
    def num_steps(self) -> int:
        """Number of steps so far, for any thread."""
        return self._engine.num_steps

    @property
    def is_held(self) -> bool:
        """Whether a pause, sleep or an update of the weights holds requests back, for any
        thread."""
        return self._calls.is_held

    def end_waits(self) -> None:
        """Call `WeightCalls.end_waits`."""
        self._engine.weights.end_waits()

    async def compile_guide(self, guide: Guide, tenant: str = "") -> None:
        """Compile a guide in a thread of a low priority, so that no step waits for it. `generate`
        and `stream` do so, too. Tenants take turns. Cancelling the task removes a guide that still
        waits.

        Raises:
            TypeError, ValueError: the guide cannot be enforced.
            RuntimeError: this engine is closed.
        """
        self._thread.require_home()
        check = partial(self._engine.request_builder.check_guide, guide)
        await asyncio.wrap_future(self._guide_thread.submit(check, tenant))

    async def close(self) -> None:
        """End the thread after the running step, and complete the folder of `config.cache_dir`.
        Unanswered requests and later calls, except `close`, get a RuntimeError."""
        await asyncio.shield(asyncio.wrap_future(self._thread.end(self._calls.shut)))

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _add_guided(self, guide: Guide, tenant: str, add: Callable[[], None]) -> None:
        await self.compile_guide(guide, tenant)
        await self._run(add)

    async def _run(self, job: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.wrap_future(self._submit(partial(job, *args, **kwargs)))

    def _submit(self, job: Callable[[], R]) -> Future[R]:
        return self._thread.submit(partial(self._calls.between_steps, job))
