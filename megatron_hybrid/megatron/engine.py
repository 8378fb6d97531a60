"""Megatron's DynamicInferenceEngine, over ours."""

import asyncio
import itertools
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.distributed.watchdog import RankFailedError
from megatron_hybrid.inference.engine import DynamicInferenceEngine as Engine
from megatron_hybrid.inference.exclusive import EngineSuspendedError
from megatron_hybrid.inference.requests.request import GenerationResult, Request, RequestOutput
from megatron_hybrid.inference.sampling_params import SamplingParams as EngineParams
from megatron_hybrid.megatron.config import KVCacheManagementMode, engine_config
from megatron_hybrid.megatron.context import DynamicInferenceContext
from megatron_hybrid.megatron.controller import TextGenerationController
from megatron_hybrid.megatron.coordination import POLL_SECONDS, STABLE, Coordination, EngineState
from megatron_hybrid.megatron.errors import (
    BlockOverflowError,
    MaxSequenceLengthOverflowError,
    require,
)
from megatron_hybrid.megatron.request import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    FinishedRequestRecord,
    Status,
)
from megatron_hybrid.megatron.sampling_params import SamplingParams, engine_params
from megatron_hybrid.utils.validation import Range, check_field, check_fields, is_int

logger = logging.getLogger(__name__)


RequestId = Annotated[int, Range(ge=-(1 << 63), le=(1 << 63) - 1)]


@dataclass
class RequestEntry:
    """An unfinished request."""

    record: DynamicInferenceRequestRecord
    future: asyncio.Future
    handle: Request
    """The request in our engine."""
    num_preemptions: int = 0

    @property
    def request(self) -> DynamicInferenceRequest:
        return self.record[-1]


def _settle(future: asyncio.Future, action: Callable[[], object]) -> None:
    """Run an action that completes a future, in the thread of its event loop if that runs."""

    def act() -> None:
        if not future.done():
            action()

    loop = future.get_loop()
    if loop.is_closed():  # nobody can wait for it
        return
    try:
        runs_here = asyncio.get_running_loop() is loop
    except RuntimeError:
        runs_here = False
    if runs_here or not loop.is_running():
        act()
    else:
        loop.call_soon_threadsafe(act)


def _check_prompt(prompt: Any) -> None:
    """Raise TypeError unless a prompt is text or token ids."""
    is_ids = isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray))
    if not (isinstance(prompt, Tensor) or is_ids):
        raise TypeError(
            "a prompt is a str, a sequence of token ids or an int64 tensor, got "
            f"{type(prompt).__name__}"
        )


_MEDIA = ("imgs", "num_tiles", "num_img_embeddings_per_tile", "imgs_sizes", "multi_modal_data")


def refuse_media(given: dict[str, Any]) -> None:
    """Raise ValueError for a value but None and 0, TypeError for a name unknown to Megatron."""
    for name, value in given.items():
        if name not in _MEDIA:
            raise TypeError(f"add_request() got an unexpected keyword argument {name!r}")
        if value is not None and not (is_int(value) and value == 0):
            raise ValueError(f"{name} is not supported: prompts are text or tokens; leave it out")


def _by_text(rows: list[dict[int, float]], tokenizer: Any) -> list[dict[str, float]]:
    """Return log-probabilities by text, as in Megatron; for equal texts the largest."""
    if tokenizer is None:
        raise ValueError("top_n_logprobs are by text, and this engine has no tokenizer")
    named = []
    for row in rows:
        texts: dict[str, float] = {}
        for token, log_prob in row.items():
            texts.setdefault(tokenizer.detokenize([token]), log_prob)
        named.append(texts)
    return named


class DynamicInferenceEngine:
    """Megatron's engine, over ours, which is its `engine`.

    Requests have the caller's ids. A request that cannot be served raises no error: it is FAILED in
    the records of the next step. One thread at a time may call the engine.

    Args:
        controller: has model and tokenizer.
        context: the one from which the controller's wrapper was made.

    Raises:
        TypeError, ValueError: the model cannot be served with this config; the message says why.
        MemoryError: the device has no room for the buffer.
    """

    use_coordinator = False
    """Whether a coordinator directs the engine."""
    capture_stats = None

    def __init__(self, controller: TextGenerationController, context: DynamicInferenceContext):
        require(controller, TextGenerationController, "controller")
        require(context, DynamicInferenceContext, "context")
        self.controller = controller
        self.context = context
        model = controller.inference_wrapped_model.hybrid_model
        config = engine_config(context.config, model, context.model_config)
        try:
            self.engine = Engine(model, controller.tokenizer, config)
        except MemoryError as error:
            raise MemoryError(
                f"{error}. Live slots and cache_bytes come from InferenceConfig.buffer_size_gb="
                f"{context.config.buffer_size_gb} and prefix_caching_mamba_gb"
            ) from error
        context.bind(self.engine)
        self.pg_collection = context.config.pg_collection or model.pg_collection
        self.state = EngineState.RUNNING
        self._state_events = {state: asyncio.Event() for state in STABLE}
        self._state_events[self.state].set()
        self.local_metadata_ledger_enabled = False
        """Whether the ledger keeps records of the requests whose answers a coordinator got."""
        self.local_metadata_ledger: dict[str, FinishedRequestRecord] = {}
        self.request_counter = itertools.count()
        self.requests: dict[int, RequestEntry] = {}
        self.decode_only = SimpleNamespace(launched=None, consumed=None)
        """Whether the last step computed only decodes; None before the first step."""
        self._ids: dict[int, int] = {}  # of our engine -> of the caller
        self._waiting: dict[int, RequestEntry] = {}  # not yet admitted, by the caller's id
        self._finished: list[DynamicInferenceRequestRecord] = []  # not yet returned
        self._num_preemptions = 0
        self._generation_epochs: dict[int, int] = {}  # the caller's numbers, by epoch
        self._coordination: Coordination | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # Requests ----------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: int,
        prompt: str | Sequence[int] | Tensor,
        sampling_params: SamplingParams | None = None,
        precomputed_block_hashes: Sequence[int] | None = None,
        **media: Any,
    ) -> asyncio.Future[DynamicInferenceRequestRecord]:
        """Queue a request. Return the future of its record, which is the one of `step_modern`.

        Args:
            request_id: the caller's; unique among unfinished requests.
            prompt: text, token ids, or an int64 tensor of them on any device.
            sampling_params: ours, or megatron-core's own, which stay as they are; default
                `SamplingParams()`.
            precomputed_block_hashes: not used; prefixes are compared by their tokens.
            media: Megatron's `imgs`, `multi_modal_data` and so on, None or 0.

        Raises:
            ValueError: an unfinished request has this id, there are images, or a parameter has an
                illegal value.
            AssertionError: both numbers of tokens are given, as in Megatron.
            TypeError: the prompt is of another type. After these errors nothing has changed.
        """
        refuse_media(media)
        check_field("request_id", request_id, RequestId)
        if request_id in self.requests:
            raise ValueError(
                f"request_id {request_id} belongs to an unfinished request: give each its own"
            )
        _check_prompt(prompt)
        params = SamplingParams.of(sampling_params)
        if None not in (params.num_tokens_to_generate, params.num_tokens_total):
            raise AssertionError(
                f"num_tokens_to_generate={params.num_tokens_to_generate} and "
                f"num_tokens_total={params.num_tokens_total} exclude each other: give one"
            )
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_tokens=torch.empty(0, dtype=torch.long),
            prompt_length=0,
            sampling_params=params,
            arrival_time=time.time(),
            status=Status.WAITING_IN_QUEUE,
            block_size_tokens=self.context.block_size_tokens,
            enable_prefix_caching=self.context.enable_prefix_caching,
        )
        record, future = DynamicInferenceRequestRecord.from_request(request), self._future()
        request.add_event_add_engine()
        try:
            check_fields(params, "SamplingParams.")
            tokens = self._tokens_of(prompt, params)
            request.prompt_length = len(tokens)
            request.prompt_tokens = torch.tensor(tokens, dtype=torch.long)
            self._clamp(request)
            self._check_room(request)
            own = engine_params(params, params.num_tokens_to_generate)
            handle = self.engine.add_request(tokens, own, growing_text=False)
        except Exception as error:  # also the tokenizer's
            request.fail(error)
            self._end(record, future)
            warnings.warn(f"request {request_id} failed: {error}", stacklevel=2)
        else:
            entry = RequestEntry(record, future, handle)
            self.requests[request_id] = self._waiting[request_id] = entry
            self._ids[handle.request_id] = request_id
        return future

    def _tokens_of(
        self, prompt: str | Sequence[int] | Tensor, params: SamplingParams
    ) -> np.ndarray:
        tokenizer = self.controller.tokenizer
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer, and there is none: pass ids")
            prompt = self.controller.tokenize_prompt(tokenizer, prompt, params.add_BOS)
        return self.engine.request_builder.tokens_of(prompt, EngineParams())

    def _clamp(self, request: DynamicInferenceRequest) -> None:
        """Set `num_tokens_to_generate` to the rest of the context, or to the given number if that
        is less.

        Raises:
            MaxSequenceLengthOverflowError: it is negative, or the prompt exceeds the context.
        """
        params, limit = request.sampling_params, self.context.max_sequence_length
        left = limit - request.prompt_length
        if left < 0:
            raise MaxSequenceLengthOverflowError(
                request.request_id,
                f"the prompt has {request.prompt_length} tokens, and max_sequence_length is "
                f"{limit}: shorten the prompt or raise max_sequence_length",
            )
        asked = params.num_tokens_to_generate
        if params.num_tokens_total is not None:
            asked = params.num_tokens_total - request.prompt_length
            params.num_tokens_total = None
        if asked is None:
            asked = left
        if asked < 0:
            raise MaxSequenceLengthOverflowError(
                request.request_id, f"num_tokens_to_generate is {asked}; it must be 0 or more"
            )
        if asked > left:
            warnings.warn(
                f"request {request.request_id} asks for num_tokens_to_generate={asked}; with its "
                f"{request.prompt_length} prompt tokens, max_sequence_length={limit} leaves {left}",
                stacklevel=3,
            )
        params.num_tokens_to_generate = min(asked, left)

    def _check_room(self, request: DynamicInferenceRequest) -> None:
        """Raise BlockOverflowError for a request that does not fit into the empty pool."""
        total = request.prompt_length + request.sampling_params.num_tokens_to_generate
        config = self.engine.config
        if not self.engine.cache.longest_forward(total, config.max_tokens):
            raise BlockOverflowError(
                request.request_id,
                f"{total} tokens, prompt and answer, do not fit in the pool of "
                f"{config.cache_bytes} bytes: raise buffer_size_gb, or ask for fewer tokens",
            )

    def _future(self) -> asyncio.Future:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            if self._loop is None:  # for futures that nobody awaits: scripts read the records
                self._loop = asyncio.new_event_loop()
                weakref.finalize(self, self._loop.close)
            loop = self._loop
        return loop.create_future()

    def _end(self, record: DynamicInferenceRequestRecord, future: asyncio.Future) -> None:
        """Complete a record, for the next step to return, and its future."""
        request = record[-1]
        request.latency = record.latency = time.time() - request.arrival_time
        request.generated_length = len(request.generated_tokens)
        self._finished.append(record)
        _settle(future, lambda: future.set_result(record))

    def get_request(self, request_id: int) -> DynamicInferenceRequest:
        """Return an unfinished request, with its tokens so far.

        Raises:
            KeyError: there is no such unfinished request.
        """
        return self._unfinished(request_id).request

    def _unfinished(self, request_id: int) -> RequestEntry:
        check_field("request_id", request_id, RequestId)
        if request_id not in self.requests:
            raise KeyError(f"request_id {request_id} is of no unfinished request: see `requests`")
        return self.requests[request_id]

    def has_unfinished_requests(self) -> bool:
        """Return whether `step_modern` has something to do or to return."""
        return bool(self.requests or self._finished)

    # Steps -------------------------------------------------------------------------------------

    def step_modern(self) -> dict[str, Any]:
        """Run one step.

        Returns:
            "active_request_ids": ids of admitted, unfinished requests; "finished_request_records":
            records, including failed ones; "finished_requests": the same, merged, as in
            Megatron-LM's main; "step_time": seconds; "cuda_graph_request_count": None.

        If a step raises, the next one returns the requests that were finished by then.

        Raises:
            EngineSuspendedError: after `suspend`; nothing has changed.
        """
        if self.is_suspended:
            raise EngineSuspendedError(
                f"the engine is suspended after step {self.context.step_count}: call resume() first"
            )
        start = time.perf_counter()
        if self.engine.has_work:
            before = self.engine.num_steps, self.engine.scheduler.num_prefill_tokens
            outputs = self.engine.step()
            step_time = time.perf_counter() - start
            if self.engine.num_steps > before[0]:
                is_decode = self.engine.scheduler.num_prefill_tokens == before[1]
                self.decode_only = SimpleNamespace(launched=is_decode, consumed=is_decode)
            self._note_moves()
            for output in outputs:
                self._take(output, step_time)
        if not self.requests:
            self._save_last_states()
        finished = self.take_finished()
        return {
            "active_request_ids": [
                self._ids[request.request_id]
                for request in self.engine.scheduler.running
                if not request.done
            ],
            "finished_request_records": finished,
            "finished_requests": [record.merge() for record in finished],
            "step_time": time.perf_counter() - start,
            "cuda_graph_request_count": None,
        }

    async def async_step(self) -> dict[str, Any]:
        """Run `step_modern` for a coroutine. The event loop waits for it."""
        return self.step_modern()

    def serve_step(self) -> list[DynamicInferenceRequestRecord]:
        """Run one step of a loop that survives errors: requests that make the step fail get its
        error. Return the finished records.

        Raises:
            RankFailedError: another rank of the model has failed.
        """
        try:
            return self.step_modern()["finished_request_records"]
        except RankFailedError:
            raise
        except Exception as error:
            logger.exception("a step failed: its requests get the error")
            failed = set(self.engine.take_failed())
            for request_id, entry in list(self.requests.items()):
                if entry.handle in failed:
                    self.fail_request(request_id, error)
            return self.take_finished()

    async def run_engine(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Step whenever there are requests, for futures that this event loop awaits, until the task
        is cancelled. `loop` is this loop, or None."""
        while True:
            if self.has_unfinished_requests() and not self.is_suspended:
                self.serve_step()
                await asyncio.sleep(0)  # for the other tasks of this loop
            else:
                await asyncio.sleep(POLL_SECONDS)

    def get_prefix_coordination_metrics(self) -> dict[str, int]:
        """Return how often a request waited for a running prefill of the same prefix."""
        return {"waits": self.engine.scheduler.num_prefix_waits}

    def step_legacy(
        self, sampling_params: SamplingParams | None = None
    ) -> tuple[list[DynamicInferenceRequest], list[DynamicInferenceRequest], float]:
        """Run the step of older scripts: (active requests, finished requests, seconds)."""
        result = self.step_modern()
        active = [self.get_request(request_id) for request_id in result["active_request_ids"]]
        return active, result["finished_requests"], result["step_time"]

    step = step_legacy

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | Tensor],
        sampling_params: SamplingParams | None = None,
    ) -> list[DynamicInferenceRequestRecord]:
        """Answer prompts, and requests queued before. Return all records by ascending request id,
        in which those of the prompts have the order of the prompts.

        Raises:
            TypeError: a prompt is of another type; nothing has changed.
        """
        check_field("prompts", prompts, Sequence | Tensor)
        for prompt in prompts:
            _check_prompt(prompt)
        for prompt in prompts:
            request_id = next(self.request_counter)
            while request_id in self.requests:
                request_id = next(self.request_counter)
            self.add_request(request_id, prompt, sampling_params)
        records: list[DynamicInferenceRequestRecord] = []
        while self.has_unfinished_requests():
            records += self.step_modern()["finished_request_records"]
        return sorted(records, key=lambda record: record.request_id)

    def abort_request(self, request_id: int) -> None:
        """Drop an unfinished request, which gets no record; its computed tokens stay cached.

        Raises:
            KeyError: there is no such unfinished request.
        """
        entry = self._take_out(request_id)
        _settle(entry.future, entry.future.cancel)

    def fail_request(self, request_id: int, error: BaseException) -> None:
        """End an unfinished request with an error, in the records of the next step.

        Raises:
            KeyError: there is no such unfinished request.
        """
        entry = self._take_out(request_id)
        entry.request.fail(error)
        self._end(entry.record, entry.future)

    def _take_out(self, request_id: int) -> RequestEntry:
        """Cancel an unfinished request, and return its entry. Raise KeyError if there is none."""
        entry = self._unfinished(request_id)
        self.engine.cancel(entry.handle)
        del self.requests[request_id], self._ids[entry.handle.request_id]
        self._waiting.pop(request_id, None)
        return entry

    def take_finished(self) -> list[DynamicInferenceRequestRecord]:
        """Take the records of finished requests that no step has returned."""
        finished, self._finished = self._finished, []
        return finished

    def _note_moves(self) -> None:
        admitted = [e for e in self._waiting.values() if e.handle.lease_report is not None]
        for entry in admitted:
            del self._waiting[entry.request.request_id]
            entry.request.status = Status.ACTIVE_AND_GENERATING_TOKENS
            entry.request.num_cached_tokens = entry.handle.prefix.skipped_tokens
            self.context.count_admission(entry.handle.prefix)
            entry.request.add_event_add_context()
        if self._num_preemptions == self.engine.scheduler.num_preemptions:
            return
        self._num_preemptions = self.engine.scheduler.num_preemptions
        for entry in self.requests.values():
            if entry.handle.num_preemptions == entry.num_preemptions:
                continue
            entry.num_preemptions = entry.handle.num_preemptions
            if not entry.handle.parked_tokens:
                entry.request.add_event_evict()
            elif self.context.config.track_paused_request_events:
                entry.request.add_event_pause()

    def _take(self, output: RequestOutput, step_time: float) -> None:
        """Add a step's tokens to a request, and end it with its last ones."""
        request_id = self._ids.get(output.request_id)
        if request_id is None:  # it was aborted after a failed step that left this output
            return
        entry = self.requests[request_id]
        request = entry.request
        if output.token_ids and request.ttft is None:
            request.ttft = time.time() - request.arrival_time
        request.generated_tokens += output.token_ids
        request.tpot += [step_time] * len(output.token_ids)
        if self.context.config.track_generated_token_events:
            for token in output.token_ids:
                request.add_event_generated_token(token)
        if output.result is not None:
            del self.requests[request_id], self._ids[output.request_id]
            self._answer(entry, output.result)

    def _answer(self, entry: RequestEntry, result: GenerationResult) -> None:
        request = entry.request
        try:
            if result.error is not None:
                raise RuntimeError(result.error)
            self._write_text(request, entry.handle)
            self._write_scores(request, result)
            self._write_epochs(request, result)
        except BaseException as error:  # the tokenizer's, also a panic of a native one
            request.fail(error)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
        else:
            request.status = Status.COMPLETED
            request.add_event_finish()
        finally:
            self._end(entry.record, entry.future)

    def _write_text(self, request: DynamicInferenceRequest, handle: Request) -> None:
        """Set the texts, and cut off the tokens of a stop word, unless they are wanted."""
        if self.controller.tokenizer is None:
            return
        params, tokens = request.sampling_params, request.generated_tokens
        if request.prompt is None:
            request.prompt = self._text(request.prompt_tokens.tolist())
        keep = params.detokenize_stop_sequence
        if not keep and tokens and tokens[-1] in handle.stop_ids:
            request.generated_text = self._text(tokens[:-1])
            return
        text = self._text(tokens)
        places = [] if keep else [text.find(word) for word in params.stop_words or ()]
        if found := [place for place in places if place >= 0]:
            text = text[: min(found)]
            self._cut(tokens, text)
        request.generated_text = text

    def _text(self, tokens: list[int]) -> str:
        controller = self.controller
        return controller.detokenize(controller.tokenizer, tokens, remove_EOD=False)

    def _cut(self, tokens: list[int], text: str) -> None:
        """Shorten tokens to those of `text`, with which their own text begins. A token that reaches
        beyond its end stays."""
        for count in range(len(tokens), -1, -1):
            part = self._text(tokens[:count])
            if part == text:
                del tokens[count:]
                return
            if not part.startswith(text):
                del tokens[count + 1 :]
                return

    def _write_scores(self, request: DynamicInferenceRequest, result: GenerationResult) -> None:
        params = request.sampling_params
        if not params.return_log_probs:
            return
        count = len(request.generated_tokens)
        request.prompt_log_probs = result.prompt_log_probs or []
        request.generated_log_probs = result.log_probs[:count]
        if params.top_n_logprobs:
            tokenizer, of_prompt = self.controller.tokenizer, result.prompt_top_n_logprobs or []
            request.prompt_top_n_logprobs = _by_text(of_prompt, tokenizer)
            request.generated_top_n_logprobs = _by_text(result.top_n_logprobs[:count], tokenizer)

    def _write_epochs(self, request: DynamicInferenceRequest, result: GenerationResult) -> None:
        """Set the epochs: each begins at the token whose forward pass had the new weights first."""
        epochs = [
            (self._generation_epoch(epoch), start)
            for epoch, start in result.epochs or [(self.engine.epoch, 0)]
        ]
        (first, _), *later = epochs
        request.policy_epoch = [(0, first)]
        for epoch, start in later:
            if start < len(request.generated_tokens):  # else it was cut with a stop word
                request.policy_epoch.append((request.prompt_length + start - 1, epoch))
        request.kv_cache_epoch = [(0, epochs[-1][0])]

    def begin_generation_epoch(self, number: int) -> None:
        """Update the engine to new weights, and give their epoch a number of the caller's."""
        if number != self._generation_epoch(self.engine.epoch):
            self.engine.update_weights()
            self._generation_epochs[self.engine.epoch] = number

    def _generation_epoch(self, epoch: int) -> int:
        """Return the caller's last number by an epoch of our engine, or the epoch itself."""
        given = [each for each in self._generation_epochs if each <= epoch]
        return self._generation_epochs[max(given)] if given else epoch

    def _save_last_states(self) -> None:
        """Let the answered requests save their last states now, as no step may follow. Answers do
        not depend on it."""
        try:
            while self.engine.has_work:
                self.engine.step()
        except Exception as error:
            logger.warning("the last states of answered requests are not saved: %s", error)

    # The engine as a whole -----------------------------------------------------------------------

    def reset(self) -> None:
        """Drop all requests and the whole cache, and start the counters anew."""
        self.resume()
        for request_id in list(self.requests):
            self.abort_request(request_id)
        self.engine.live.take_outputs()
        self.engine.clear_cache()
        self._finished.clear()
        self.local_metadata_ledger = {}
        self.request_counter = itertools.count()
        self.decode_only = SimpleNamespace(launched=None, consumed=None)
        self._num_preemptions = self.engine.scheduler.num_preemptions
        self.context.reset_counters()

    def suspend(self) -> None:
        """Refuse steps until `resume`. By `kv_cache_management_mode` the cache stays, waits in host
        memory, or is dropped; in the last two cases its device memory is given back. This has no
        effect on a suspended engine.

        Raises:
            MemoryError: host memory has no room; nothing has changed.
        """
        if self.is_suspended:
            return
        mode = KVCacheManagementMode(self.context.config.kv_cache_management_mode)
        if mode is not KVCacheManagementMode.PERSIST:
            self.engine.suspend("host" if mode is KVCacheManagementMode.OFFLOAD else "drop")
        self.state = EngineState.SUSPENDED

    def resume(self) -> None:
        """End a suspension. This has no effect on an engine that is not suspended.

        Raises:
            MemoryError: the device has no room; the engine stays suspended.
        """
        if self.is_suspended:
            self.engine.resume()
            self.state = EngineState.RUNNING

    @property
    def is_suspended(self) -> bool:
        return self.state is EngineState.SUSPENDED

    # Megatron's coordinator ----------------------------------------------------------------------

    async def start_listening_to_data_parallel_coordinator(
        self,
        inference_coordinator_port: int | None = None,
        launch_inference_coordinator: bool = True,
        *,
        hostname: str | None = None,
        coordinator_schedule_output_path: str | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> str:
        """Take requests from megatron-core's coordinator, in a task of this event loop. All ranks
        of all data-parallel replicas call it.

        Args:
            inference_coordinator_port: that of the coordinator; None takes any.
            launch_inference_coordinator: let the first rank of all start the coordinator, a process
                of core's; otherwise it must run already, at this port.
            hostname: that of the coordinator; default 127.0.0.1 if the launcher says that all ranks
                are on this machine, else this machine's name.
            coordinator_schedule_output_path: a file for the coordinator's decisions.
            loop: this loop, or None.

        Returns:
            The coordinator's address, for `InferenceClient`.

        Raises:
            CoordinatorError: this megatron-core has no such coordinator.
            ValueError: there is no tokenizer.
            RuntimeError: the coordinator has ended, or the engine has one already.
        """
        name = "start_listening_to_data_parallel_coordinator()"
        if self._coordination is not None:
            raise RuntimeError(f"{name} was called before: make another engine")
        coordination = Coordination(self)
        address = await coordination.start(
            inference_coordinator_port,
            launch_inference_coordinator,
            hostname,
            coordinator_schedule_output_path,
        )
        self._coordination = coordination
        return address

    @property
    def engine_loop_task(self) -> asyncio.Task[None]:
        """The task that takes requests from a coordinator; it ends with the engine."""
        return self._coordinated("engine_loop_task").task

    async def wait_until(self, state: EngineState) -> None:
        """Wait until a coordinator's client has brought the engine into a state.

        Raises:
            ValueError: the state does not last.
            RuntimeError: the engine has joined no coordinator.
        """
        await self._coordinated("wait_until()").wait_until(state)

    def _coordinated(self, name: str) -> Coordination:
        if self._coordination is None:
            raise RuntimeError(
                f"{name} is of an engine that has joined a coordinator: await "
                "start_listening_to_data_parallel_coordinator() first"
            )
        return self._coordination
