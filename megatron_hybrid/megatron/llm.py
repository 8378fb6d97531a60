"""MegatronLLM and MegatronAsyncLLM: Megatron's high-level interface."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import nn

from megatron_hybrid.distributed.ranks import replica_of
from megatron_hybrid.inference.async_calls import StepThread, follow_in_thread, use_device_of
from megatron_hybrid.megatron.config import InferenceConfig
from megatron_hybrid.megatron.context import DynamicInferenceContext
from megatron_hybrid.megatron.controller import GPTInferenceWrapper, TextGenerationController
from megatron_hybrid.megatron.coordination import EngineState, core_parts
from megatron_hybrid.megatron.engine import DynamicInferenceEngine, refuse_media
from megatron_hybrid.megatron.request import DynamicInferenceRequest
from megatron_hybrid.megatron.sampling_params import SamplingParams
from megatron_hybrid.models.hybrid_model import unwrap
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.utils.child_lifetime import EndSignal
from megatron_hybrid.utils.fork_guard import ForkGuard
from megatron_hybrid.utils.interrupts import result_of
from megatron_hybrid.utils.validation import is_int

T = TypeVar("T")
Prompts = str | list[int] | list[str] | list[list[int]]


@dataclass
class ServeConfig:
    """Settings of Megatron's HTTP server."""

    host: str = "0.0.0.0"
    port: int = 5000
    parsers: list[str] = field(default_factory=list)
    verbose: bool = False
    frontend_replicas: int = 4
    sock: socket.socket | None = None
    """A bound socket, in place of host and port."""


class InferenceClient:
    """A name that makes core's InferenceClient, with the same arguments.

    Raises:
        CoordinatorError: this megatron-core has no such coordinator.
    """

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        return core_parts().InferenceClient(*arguments, **named)


def _build_engine(
    model: nn.Module, tokenizer: Any, config: InferenceConfig | None
) -> DynamicInferenceEngine:
    model_config = getattr(unwrap(model), "config", None)  # the wrapper refuses a model without one
    context = DynamicInferenceContext(model_config, config or InferenceConfig())
    controller = TextGenerationController(GPTInferenceWrapper(model, context), tokenizer)
    return DynamicInferenceEngine(controller, context)


def _to_tokenizer(given: Any) -> Tokenizer:
    """Return our Tokenizer for one of `load_pretrained` or Hugging Face, or Megatron's around it.

    Raises:
        ValueError: it is another tokenizer.
    """
    inner = given
    while not (isinstance(inner, Tokenizer) or hasattr(inner, "save_pretrained")):
        inside = getattr(inner, "_tokenizer", None) or getattr(inner, "tokenizer", None)
        if inside is None:
            raise ValueError(
                f"serve() writes chats and the bytes of tokens, which {type(given).__name__} does "
                "not know: use --tokenizer-type HuggingFaceTokenizer, or the tokenizer of "
                "megatron_hybrid.load_pretrained(folder)"
            )
        inner = inside
    if isinstance(inner, Tokenizer):
        return inner
    with tempfile.TemporaryDirectory() as folder:
        inner.save_pretrained(folder)
        return Tokenizer.from_folder(folder)


def _as_list(prompts: Prompts) -> tuple[list[str] | list[list[int]], bool]:
    """Return the prompts as a list, and whether they were a list of prompts before.

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
    """One engine in a thread of its own, in place of a coordinator's replicas. If a model is over
    several ranks, the first one leads, and the threads of the others follow it until it shuts down.

    Args:
        model, tokenizer, config: those of the engine.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, config: InferenceConfig | None):
        self.engine = _build_engine(model, tokenizer, config)
        self.is_primary = self.engine.engine.ranks.is_first
        self._thread = StepThread("megatron-llm", "it was shut down: make another one")
        self._futures: dict[int, Future[DynamicInferenceRequest]] = {}
        self._leading = ExitStack()
        self.submit, self.require_home = self._thread.submit, self._thread.require_home
        self.is_over = threading.Event()
        try:
            self._start = self.submit(self._lead if self.is_primary else self._follow)
            if self.is_primary:
                result_of(self._start)
        except BaseException:
            self._thread.end(self._shut)
            raise

    # In the thread -------------------------------------------------------------------------------

    def _lead(self) -> None:
        use_device_of(self.engine.engine)
        self._leading.enter_context(self.engine.engine.lead())

    def _follow(self) -> None:
        try:
            follow_in_thread(self.engine.engine)
        finally:
            self._close()

    def add(
        self, prompts: Sequence[str | list[int]], params: SamplingParams
    ) -> list[tuple[int, Future[DynamicInferenceRequest]]]:
        """Queue prompts. Return the id and the future of each."""
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
        """Drop the unfinished ones among these requests."""
        for request_id in request_ids:
            known = self._futures.pop(request_id, None) is not None
            if known and request_id in self.engine.requests:  # else it has failed
                self.engine.abort_request(request_id)

    def change(self, state: EngineState) -> Future[None]:
        """Pause, unpause, suspend or resume, on the first rank."""
        return self.submit(partial(self._set_state, state))

    def _set_state(self, state: EngineState) -> None:
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
            if not self._futures:  # no one waits for a second error: no step before the next job
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
        """End the thread after the running step, or on other ranks once the first one has shut
        down."""
        return self._thread.end(self._shut)


class _Replicas:
    """Several data-parallel replicas under megatron-core's coordinator, with the interface of
    `_Replica`. Each rank's engine has a thread of its own; the first rank of all takes requests.

    Args:
        model, tokenizer, config: those of the engine.
        host, port: those of the coordinator; None takes any.

    Raises:
        CoordinatorError: this megatron-core has no such coordinator.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        config: InferenceConfig | None,
        host: str | None,
        port: int | None,
    ):
        core_parts()  # before there is an engine
        self._loop, self._home = asyncio.new_event_loop(), ForkGuard()
        self._ending: Future[None] | None = None
        self._lock = threading.Lock()
        self.is_over = threading.Event()
        self.engine = _build_engine(model, tokenizer, config)
        ours = self.engine.engine
        self.is_primary = ours.replica[0] == 0 and ours.ranks.is_first
        self._thread = threading.Thread(target=self._run, name="megatron-replicas", daemon=True)
        self._thread.start()
        try:
            result_of(self._in_loop(self._start(host, port)))
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            ours.close()
            raise

    def _run(self) -> None:
        use_device_of(self.engine.engine)
        self._loop.run_forever()

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _start(self, host: str | None, port: int | None) -> None:
        address = await self.engine.start_listening_to_data_parallel_coordinator(
            port, hostname=host
        )
        self.engine.engine_loop_task.add_done_callback(lambda _: self.is_over.set())
        if self.is_primary:
            self._client = InferenceClient(address)
            self._client.start(loop=self._loop)

    def require_home(self) -> None:
        """Raise RuntimeError in a fork."""
        self._home.require("this engine")

    def submit(self, job: Callable[[], T]) -> Future[T]:
        self.require_home()

        async def run() -> T:
            return job()

        with self._lock:
            if self._ending is not None:
                raise RuntimeError("it was shut down: make another one")
            return self._in_loop(run())

    # In the thread -------------------------------------------------------------------------------

    def add(
        self, prompts: Sequence[str | list[int]], params: SamplingParams
    ) -> list[tuple[asyncio.Future, Future[DynamicInferenceRequest]]]:
        """Give prompts to the coordinator. Return the client's future and ours for each."""
        added = []
        for prompt in prompts:
            answer, future = self._client.add_request(prompt, params), Future()
            future.set_running_or_notify_cancel()
            answer.add_done_callback(partial(_settle_answer, future))
            added.append((answer, future))
        return added

    def abort(self, answers: Sequence[asyncio.Future]) -> None:
        """Cancel these futures. The requests run to their end, as a client cannot end them."""
        for answer in answers:
            answer.cancel()

    # States --------------------------------------------------------------------------------------

    def change(self, state: EngineState) -> Future[None]:
        """Pause, unpause, suspend or resume all replicas; on other ranks, wait for that."""
        return self._in_loop(self._change(state))

    async def _change(self, state: EngineState) -> None:
        if self.is_primary:
            client = self._client
            signal = {
                EngineState.PAUSED: client.pause_engines,
                EngineState.RUNNING: client.unpause_engines,
                EngineState.SUSPENDED: client.suspend_engines,
                EngineState.RESUMED: client.resume_engines,
            }[state]
            signal()
        await self.engine.wait_until(state)

    def shutdown(self) -> Future[None]:
        """Stop all replicas, the coordinator and the thread; on other ranks, wait for that."""
        with self._lock:
            if self._ending is None:
                self._ending = self._in_loop(self._stop())
                self._ending.add_done_callback(
                    lambda _: self._loop.call_soon_threadsafe(self._loop.stop)
                )
            return self._ending

    async def _stop(self) -> None:
        if self.is_primary:
            if self.engine.state is EngineState.RUNNING:
                await self._change(EngineState.PAUSED)
            self._client.stop_engines()
        await self.engine.wait_until(EngineState.STOPPED)
        if self.is_primary:
            self._client.shutdown_coordinator()
            await asyncio.sleep(0.1)  # its socket does not linger
            self._client.stop()
        self.engine.engine.close()


def _abandon(replica: _Replica | _Replicas, adding: Future[list[tuple[Any, Future]]]) -> None:
    """Drop the requests that an `add` has added, since no one waits for them any more."""
    if adding.cancelled() or adding.exception() is not None:
        return
    with suppress(RuntimeError):  # it was shut down
        replica.submit(partial(replica.abort, [added for added, _ in adding.result()]))


def _settle_answer(future: Future[DynamicInferenceRequest], answer: asyncio.Future) -> None:
    if answer.cancelled():
        future.set_exception(RuntimeError("shut down before this request was answered"))
    else:
        future.set_result(DynamicInferenceRequest.deserialize(answer.result()))


class _LLM:
    """The base class of both.

    With `use_coordinator` the engine has a thread of its own. A single replica has no coordinator
    process: all ranks of the model make this object; the first one then takes requests and changes
    of state, and the others only `shutdown` and `wait_for_shutdown`, which wait for the first one.
    Several data-parallel replicas are under megatron-core's coordinator.
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
        groups = getattr(unwrap(model), "pg_collection", None)
        has_replicas = use_coordinator and replica_of(groups)[1] > 1
        for name, value in (("host", coordinator_host), ("port", coordinator_port)):
            if value is None:
                continue
            if not use_coordinator:
                raise ValueError(f"coordinator_{name} requires use_coordinator=True")
            if not has_replicas:
                warnings.warn(
                    f"coordinator_{name}={value!r} has no effect: of one replica there is no "
                    "coordinator process",
                    stacklevel=3,
                )
        self._replica: _Replica | _Replicas | None = None
        if use_coordinator:
            parts = model, tokenizer, inference_config
            if has_replicas:
                self._replica = _Replicas(*parts, coordinator_host, coordinator_port)
            else:
                self._replica = _Replica(*parts)
            self.engine = self._replica.engine
        else:
            self.engine = _build_engine(model, tokenizer, inference_config)
        self.context, self.controller = self.engine.context, self.engine.controller

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

    def _set_state(self, state: EngineState) -> Future[None]:
        if self._replica is None:
            raise RuntimeError("this method requires use_coordinator=True")
        if isinstance(self._replica, _Replica):  # with several replicas other ranks wait
            self._require_primary("pause(), unpause(), suspend() or resume")
        return self._replica.change(state)

    def _server(self, serve_config: ServeConfig) -> Callable[[EndSignal], Coroutine]:
        """Bind the address of `serve`, and return its server.

        Raises:
            ValueError, RuntimeError, OSError: see `serve`.
        """
        if self._replica is None:
            raise ValueError(f"{type(self).__name__}.serve() requires use_coordinator=True")
        engine = self.engine.engine
        if engine.ranks.size > 1 or engine.replica[1] > 1:
            raise ValueError(
                f"serve() has one model on one rank, and there are {engine.ranks.size} ranks and "
                f"{engine.replica[1]} replicas: use megatron-hybrid serve --tp for each replica"
            )
        tokenizer = _to_tokenizer(self.engine.controller.tokenizer)
        if self.engine.requests:
            raise RuntimeError(f"{len(self.engine.requests)} requests are unanswered: await them")
        from megatron_hybrid.serving.run import Address, ServingConfig, running_service, serve

        address, bound = Address(serve_config.host, serve_config.port), serve_config.sock
        if bound is None:
            bound = address.bind()
        model = self.engine.controller.inference_wrapped_model.hybrid_model
        config = ServingConfig("megatron", allowed_hosts=(serve_config.host,))
        given = model, tokenizer, engine.config, config, None
        return lambda end: serve(running_service(*given, end), address, bound, end)

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
        tokenizer: has `tokenize`, `detokenize` and `eod`.
        inference_config: default `InferenceConfig()`.
        use_coordinator: run the engine in a thread, with `pause`, `suspend` and so on; the first
            rank of all makes all calls, and megatron-core's coordinator spreads prompts over
            data-parallel replicas. With False it runs in the caller's thread, and all ranks make
            the same calls.
        coordinator_host, coordinator_port: those of the coordinator of several data-parallel
            replicas; for a single one they have no effect, and a warning says so.
        inference_wrapper_cls: None, or GPTInferenceWrapper.

    Raises:
        TypeError, ValueError: the model cannot be served; the message says why.
        CoordinatorError: there are several replicas, and this megatron-core cannot spread prompts.
    """

    _serving: threading.Thread | None = None

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | None = None,
        multi_modal_data: None = None,
    ) -> list[DynamicInferenceRequest]:
        """Answer one prompt or several. Return a list in their order.

        Raises:
            TypeError: the prompts are of another type.
            ValueError: `multi_modal_data` is given.
            RuntimeError: the engine is paused, suspended or shut down, or this is not the primary
                rank.
        """
        refuse_media({"multi_modal_data": multi_modal_data})
        self._require_primary("generate")
        prompts, _ = _as_list(prompts)
        params = SamplingParams.of(sampling_params)
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
        """Suspend the engine, as `DynamicInferenceEngine.suspend`; `pause` first."""
        result_of(self._set_state(EngineState.SUSPENDED))

    def resume(self) -> None:
        """End a suspension; `unpause` afterwards."""
        result_of(self._set_state(EngineState.RESUMED))

    def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> None:
        """Serve HTTP as `MegatronAsyncLLM.serve` does; without `blocking`, in a thread."""
        server = self._server(serve_config)
        result_of(self._shut_down())
        self._end = EndSignal()
        if blocking:
            asyncio.run(server(self._end))
        else:
            self._serving = threading.Thread(
                target=lambda: asyncio.run(server(self._end)), name="megatron-serve", daemon=True
            )
            self._serving.start()

    def shutdown(self) -> None:
        """End the thread, or the server; unanswered requests get a RuntimeError. A second call has
        no effect."""
        if self._serving is not None:
            self._end.was_sent = True
            self._serving.join()
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

    `MegatronLLM` describes the arguments; `use_coordinator` must be True.
    """

    def __init__(self, *, use_coordinator: bool = True, **arguments: Any):
        if not use_coordinator:
            raise ValueError("MegatronAsyncLLM requires use_coordinator=True: or use MegatronLLM")
        super().__init__(use_coordinator=True, **arguments)
        self._serving: asyncio.Task[None] | None = None

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | None = None,
        multi_modal_data: None = None,
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Answer one prompt, or a list of them. Cancelling the task drops its requests.

        Raises:
            TypeError: the prompts are of another type.
            ValueError: `multi_modal_data` is given.
            RuntimeError: the engine was shut down, or this is not the primary rank.
        """
        refuse_media({"multi_modal_data": multi_modal_data})
        self._require_primary("generate")
        prompts, is_batch = _as_list(prompts)
        replica = self._replica
        job = partial(replica.add, prompts, SamplingParams.of(sampling_params))
        adding = replica.submit(job)
        try:
            added = await asyncio.wrap_future(adding)
            answers = [await asyncio.wrap_future(future) for _, future in added]
        except asyncio.CancelledError:
            adding.add_done_callback(partial(_abandon, replica))
            raise
        return answers if is_batch else answers[0]

    async def pause(self) -> None:
        """Run no step until `unpause`; requests wait."""
        await asyncio.wrap_future(self._set_state(EngineState.PAUSED))

    async def unpause(self) -> None:
        """End a pause."""
        await asyncio.wrap_future(self._set_state(EngineState.RUNNING))

    async def suspend(self) -> None:
        """Suspend the engine, as `DynamicInferenceEngine.suspend`; `pause` first."""
        await asyncio.wrap_future(self._set_state(EngineState.SUSPENDED))

    async def resume(self) -> None:
        """End a suspension; `unpause` afterwards."""
        await asyncio.wrap_future(self._set_state(EngineState.RESUMED))

    async def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> None:
        """Serve HTTP by `megatron-hybrid serve`'s server, with an engine of its own in place of
        this one, until a signal or `shutdown`.

        Args:
            serve_config: its `host` and `port`, or its `sock`, are used.
            blocking: return when the server has ended, otherwise when it is about to listen.

        Raises:
            ValueError: the tokenizer is neither one of `load_pretrained` nor of Hugging Face, the
                model is split over ranks or has replicas, or the address cannot be used.
            RuntimeError: requests are unanswered, or the engine was shut down.
            OSError: the address is taken.
        """
        server = self._server(serve_config)
        await asyncio.shield(asyncio.wrap_future(self._shut_down()))
        self._end = EndSignal()
        self._serving = asyncio.create_task(server(self._end))
        if blocking:
            await self._serving

    async def shutdown(self) -> None:
        """End the thread, or the server; unanswered requests get a RuntimeError. A second call has
        no effect."""
        if self._serving is not None:
            self._end.was_sent = True
            await asyncio.wait([self._serving])
        await asyncio.shield(asyncio.wrap_future(self._shut_down()))

    async def wait_for_shutdown(self) -> None:
        """Wait until `shutdown` was called on the primary rank."""
        self._replica.require_home()
        await asyncio.to_thread(self._replica.is_over.wait)

    async def __aenter__(self) -> MegatronAsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()
