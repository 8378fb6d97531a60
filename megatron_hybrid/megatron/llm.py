"""MegatronLLM and MegatronAsyncLLM: Megatron's high-level interface."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from megatron_hybrid.inference.step_thread import StepThread, use_device_of
from megatron_hybrid.interrupts import result_of
from megatron_hybrid.megatron.config import InferenceConfig
from megatron_hybrid.megatron.context import DynamicInferenceContext
from megatron_hybrid.megatron.controller import GPTInferenceWrapper, TextGenerationController
from megatron_hybrid.megatron.engine import DynamicInferenceEngine, EngineState
from megatron_hybrid.megatron.request import DynamicInferenceRequest
from megatron_hybrid.megatron.sampling_params import SamplingParams
from megatron_hybrid.validation import is_int

Prompts = str | list[int] | list[str] | list[list[int]]


@dataclass
class ServeConfig:
    """Settings of Megatron's HTTP server."""

    host: str = "0.0.0.0"
    port: int = 5000
    parsers: list[str] = field(default_factory=list)
    verbose: bool = False
    frontend_replicas: int = 4


def _build_engine(
    model: nn.Module, tokenizer: Any, config: InferenceConfig | None
) -> DynamicInferenceEngine:
    context = DynamicInferenceContext(model.config, config or InferenceConfig())
    controller = TextGenerationController(GPTInferenceWrapper(model, context), tokenizer)
    return DynamicInferenceEngine(controller, context)


def _as_list(prompts: Prompts) -> tuple[list[str] | list[list[int]], bool]:
    """The prompts, and whether they were several.

    Raises:
        TypeError: they are of another type.
    """
    if isinstance(prompts, str):
        return [prompts], False
    if isinstance(prompts, list):
        if prompts and all(is_int(token) for token in prompts):
            return [prompts], False
        if all(isinstance(prompt, (str, list)) for prompt in prompts):
            return prompts, True
    raise TypeError(
        "prompts must be a str, a list of token ids, or a list of either, got "
        f"{type(prompts).__name__}"
        + (f" with {type(prompts[0]).__name__}" if isinstance(prompts, list) else "")
    )


class _Replica:
    """One engine in a thread of its own, in place of a coordinator's replicas. Of a model over
    several ranks the first one leads, and the threads of the others follow it until it shuts down.

    Args:
        model, tokenizer, config: of the engine.

    Raises:
        ValueError: there are several data-parallel replicas.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, config: InferenceConfig | None):
        self._thread = StepThread("megatron-llm", "it was shut down: make another one")
        self._futures: dict[int, Future[DynamicInferenceRequest]] = {}
        self._leading = ExitStack()
        self.submit, self.require_home = self._thread.submit, self._thread.require_home
        self.is_over = threading.Event()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        try:
            make = partial(self._make, model, tokenizer, config, device)
            self.engine = result_of(self.submit(make))
            self.is_primary = self.engine.engine.ranks.is_first
            self._start = self.submit(self._lead if self.is_primary else self._follow)
            if self.is_primary:
                result_of(self._start)
        except BaseException:
            self._thread.end(lambda: None)
            raise

    @staticmethod
    def _make(
        model: nn.Module, tokenizer: Any, config: InferenceConfig | None, device: int | None
    ) -> DynamicInferenceEngine:
        if device is not None:  # on which the ranks of the model meet
            torch.cuda.set_device(device)
        engine = _build_engine(model, tokenizer, config)
        replicas = engine.engine.replica[1]
        if replicas > 1:
            raise ValueError(
                f"use_coordinator=True serves one replica, and the dp group makes {replicas}, "
                "between which nothing would spread the prompts: use "
                "MegatronLLM(use_coordinator=False) on every rank, or one job for each replica"
            )
        use_device_of(engine.engine)
        return engine

    # In the thread -------------------------------------------------------------------------------

    def _lead(self) -> None:
        self._leading.enter_context(self.engine.engine.lead())

    def _follow(self) -> None:
        try:
            self.engine.engine.follow()
        finally:
            self._close()

    def add(
        self, prompts: Sequence[str | list[int]], params: SamplingParams
    ) -> list[tuple[int, Future[DynamicInferenceRequest]]]:
        """Queue prompts. Returns id and future of each."""
        added = []
        for prompt in prompts:
            request_id = next(self.engine.request_counter)
            self.engine.add_request(request_id, prompt, params)
            future = self._futures[request_id] = Future()
            future.set_running_or_notify_cancel()  # a task that waits for it cannot cancel it
            added.append((request_id, future))
        self._go_on()
        return added

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop those of these requests that are unfinished."""
        for request_id in request_ids:
            known = self._futures.pop(request_id, None) is not None
            if known and request_id in self.engine.requests:  # else it has failed
                self.engine.abort_request(request_id)

    def abandon(self, adding: Future[list[tuple[int, Future]]]) -> None:
        """Drop what an `add` has added or will add: nobody waits for it any more."""
        if adding.cancelled() or adding.exception() is not None:
            return
        with suppress(RuntimeError):  # it was shut down
            self.submit(partial(self.abort, [request_id for request_id, _ in adding.result()]))

    def set_state(self, state: EngineState) -> None:
        """Pause, unpause, suspend or resume."""
        if state is EngineState.SUSPENDED:
            self.engine.suspend()
        elif state is EngineState.RESUMED:
            self.engine.resume()
        elif self.engine.is_suspended:
            raise RuntimeError("the engine is suspended: call resume() first")
        self.engine.state = state
        self._go_on()

    def _go_on(self) -> None:
        if self.engine.state is EngineState.RUNNING and self.engine.has_unfinished_requests():
            try:
                self._thread.submit_step(self._step)
            except RuntimeError:  # it was shut down
                self._end_all()

    def _step(self) -> None:
        if self.engine.state is not EngineState.RUNNING:
            return
        try:
            for record in self.engine.step_modern()["finished_request_records"]:
                if (future := self._futures.pop(record.request_id, None)) is not None:
                    future.set_result(record.merge())
        except BaseException as error:  # the thread survives every error
            failed = set(self.engine.engine.take_failed())
            for request_id, entry in list(self.engine.requests.items()):
                # The caller may have added others to the engine itself.
                if entry.handle in failed and request_id in self._futures:
                    self._futures[request_id].set_exception(error)
                    self.abort([request_id])
            if not self._futures:  # no one to tell of a second error: no step before the next job
                return
        self._go_on()

    def _end_all(self) -> None:
        for request_id, future in list(self._futures.items()):
            future.set_exception(RuntimeError("shut down before this request was answered"))
            self.abort([request_id])

    def _shut(self) -> None:
        if not self.is_primary:
            self._start.result()  # it has ended: all jobs run in the same thread
            return
        self.engine.resume()
        self._end_all()
        self._leading.close()
        self._close()

    def _close(self) -> None:
        self.engine.engine.close()
        self.engine.state = EngineState.STOPPED
        self.is_over.set()

    def shutdown(self) -> Future[None]:
        """End the thread after the running step; where it follows, when the first rank has shut
        down."""
        return self._thread.end(self._shut)


class _LLM:
    """What both classes share.

    With `use_coordinator` the engine has a thread of its own; there is no coordinator process, and
    one replica. All ranks of the model make it; the first one then takes requests and changes of
    state, and the others only `shutdown` and `wait_for_shutdown`, which wait for the first one.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        tokenizer: Any,
        inference_config: InferenceConfig | None = None,
        use_coordinator: bool = True,
        coordinator_host: str | None = None,
        coordinator_port: int | None = None,
        inference_wrapper_cls: type | None = None,
    ):
        if inference_wrapper_cls not in (None, GPTInferenceWrapper):
            raise ValueError(
                f"inference_wrapper_cls is {inference_wrapper_cls!r}; only GPTInferenceWrapper of "
                "megatron_hybrid.megatron is supported"
            )
        for name, value in (("host", coordinator_host), ("port", coordinator_port)):
            if value is None:
                continue
            if not use_coordinator:
                raise ValueError(f"coordinator_{name} requires use_coordinator=True")
            warnings.warn(
                f"coordinator_{name}={value!r} has no effect: there is no coordinator process",
                stacklevel=3,
            )
        self._replica: _Replica | None = None
        if use_coordinator:
            self._replica = _Replica(model, tokenizer, inference_config)
            self.engine = self._replica.engine
        else:
            self.engine = _build_engine(model, tokenizer, inference_config)

    @property
    def is_primary_rank(self) -> bool:
        """Whether this rank takes requests."""
        return self._replica is None or self._replica.is_primary

    def _require_primary(self, name: str) -> None:
        if not self.is_primary_rank:
            raise RuntimeError(
                f"{name}() was called on rank {self.engine.engine.ranks.rank} of the model, which "
                "follows rank 0: call it there alone, where is_primary_rank is True"
            )

    @property
    def context(self) -> DynamicInferenceContext:
        return self.engine.context

    @property
    def controller(self) -> TextGenerationController:
        return self.engine.controller

    def _set_state(self, state: EngineState) -> Future[None]:
        if self._replica is None:
            raise RuntimeError("this method requires use_coordinator=True")
        self._require_primary("pause(), unpause(), suspend() or resume")
        return self._replica.submit(partial(self._replica.set_state, state))

    def _shut_down(self) -> Future[None]:
        if self._replica is not None:
            return self._replica.shutdown()
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing


class MegatronLLM(_LLM):
    """Answers prompts; `with` ends in `shutdown()`.

    Args:
        model: a HybridModel, or a model that Megatron built, wrapped or bare.
        tokenizer: with `tokenize`, `detokenize` and `eod`.
        inference_config: default `InferenceConfig()`.
        use_coordinator: run the engine in a thread, with `pause`, `suspend` and so on; the first
            rank of a model over several ranks makes all calls. False: in the caller's thread, and
            all ranks make the same calls.
        coordinator_host, coordinator_port: no effect, with a warning.
        inference_wrapper_cls: None, or GPTInferenceWrapper.

    Raises:
        TypeError, ValueError: the model cannot be served; the message says why.
    """

    def generate(
        self, prompts: Prompts, sampling_params: SamplingParams | None = None
    ) -> list[DynamicInferenceRequest]:
        """Answer one prompt or several; a list in their order.

        Raises:
            TypeError: the prompts are of another type.
            RuntimeError: the engine is paused, suspended or shut down, or this is not the primary
                rank.
        """
        self._require_primary("generate")
        prompts, _ = _as_list(prompts)
        params = sampling_params or SamplingParams()
        if self._replica is None:
            return [record.merge() for record in self.engine.generate(prompts, params)]
        if self.engine.state is not EngineState.RUNNING:
            raise RuntimeError(
                f"the engine is {self.engine.state.name}, and generate() would wait for ever: call "
                "resume() and unpause() first, or make another MegatronLLM after shutdown()"
            )
        added = result_of(self._replica.submit(partial(self._replica.add, prompts, params)))
        return [result_of(future) for _, future in added]

    def pause(self) -> None:
        """Run no step until `unpause`."""
        result_of(self._set_state(EngineState.PAUSED))

    def unpause(self) -> None:
        """End a pause."""
        result_of(self._set_state(EngineState.RUNNING))

    def suspend(self) -> None:
        """As `DynamicInferenceEngine.suspend`; `pause` first."""
        result_of(self._set_state(EngineState.SUSPENDED))

    def resume(self) -> None:
        """End a suspension; `unpause` afterwards."""
        result_of(self._set_state(EngineState.RESUMED))

    def shutdown(self) -> None:
        """End the thread; unanswered requests get a RuntimeError. A second call has no effect."""
        result_of(self._shut_down())

    def wait_for_shutdown(self) -> None:
        """Wait until another thread, or the primary rank, has called `shutdown`."""
        if self._replica is not None:
            self._replica.require_home()
            self._replica.is_over.wait()

    def __enter__(self) -> MegatronLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


class MegatronAsyncLLM(_LLM):
    """MegatronLLM for asyncio; `async with` ends in `shutdown()`.

    Arguments as for `MegatronLLM`, with `use_coordinator=True` only.
    """

    def __init__(self, *, use_coordinator: bool = True, **arguments: Any):
        if not use_coordinator:
            raise ValueError("MegatronAsyncLLM requires use_coordinator=True: or use MegatronLLM")
        super().__init__(use_coordinator=True, **arguments)

    async def generate(
        self, prompts: Prompts, sampling_params: SamplingParams | None = None
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Answer one prompt, or a list of them. Cancelling the task drops its requests.

        Raises:
            TypeError: the prompts are of another type.
            RuntimeError: the engine was shut down, or this is not the primary rank.
        """
        self._require_primary("generate")
        prompts, is_batch = _as_list(prompts)
        replica = self._replica
        job = partial(replica.add, prompts, sampling_params or SamplingParams())
        adding = replica.submit(job)
        try:
            added = await asyncio.wrap_future(adding)
            answers = [await asyncio.wrap_future(future) for _, future in added]
        except asyncio.CancelledError:
            adding.add_done_callback(replica.abandon)
            raise
        return answers if is_batch else answers[0]

    async def pause(self) -> None:
        """Run no step until `unpause`; requests wait."""
        await asyncio.wrap_future(self._set_state(EngineState.PAUSED))

    async def unpause(self) -> None:
        """End a pause."""
        await asyncio.wrap_future(self._set_state(EngineState.RUNNING))

    async def suspend(self) -> None:
        """As `DynamicInferenceEngine.suspend`; `pause` first."""
        await asyncio.wrap_future(self._set_state(EngineState.SUSPENDED))

    async def resume(self) -> None:
        """End a suspension; `unpause` afterwards."""
        await asyncio.wrap_future(self._set_state(EngineState.RESUMED))

    async def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> NoReturn:
        """Refused: there is no HTTP server yet."""
        raise NotImplementedError(
            "MegatronAsyncLLM.serve() is not supported: there is no HTTP server yet; call "
            "generate(), or megatron_hybrid.AsyncEngine for streams"
        )

    async def shutdown(self) -> None:
        """End the thread; unanswered requests get a RuntimeError. A second call has no effect."""
        await asyncio.shield(asyncio.wrap_future(self._shut_down()))

    async def wait_for_shutdown(self) -> None:
        """Wait until `shutdown` was called, on the primary rank."""
        self._replica.require_home()
        await asyncio.to_thread(self._replica.is_over.wait)

    async def __aenter__(self) -> MegatronAsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()
