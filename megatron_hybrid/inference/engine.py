"""DynamicInferenceEngine: requests in, tokens out.

The engine checks requests, executes the scheduler's plans and returns outputs. The cache decides
about sharing and eviction, the scheduler about the tokens of each step.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from megatron_hybrid.cache.explain import Explanation
from megatron_hybrid.cache.index.journal import Version
from megatron_hybrid.cache.listener import CacheListener
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.report import MissReason, PrefixReport
from megatron_hybrid.cache.tree_view import TreeChanges, TreeView
from megatron_hybrid.distributed.rank_control import RankControl, on_all_ranks
from megatron_hybrid.distributed.ranks import MAKING, ranks_of, replica_of
from megatron_hybrid.distributed.rendezvous import BEGIN_SECONDS, coming
from megatron_hybrid.distributed.watchdog import STEP_SECONDS
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.drafters import Drafter, Drafts
from megatron_hybrid.inference.drafters.lookup import KnownAnswers, OwnTokens
from megatron_hybrid.inference.exclusive import EngineBusyError, EngineSuspendedError, exclusive
from megatron_hybrid.inference.metrics.meter import ActivityLog, Meter
from megatron_hybrid.inference.metrics.prometheus import (
    Stats,
    prometheus_text,
    requests_text,
)
from megatron_hybrid.inference.rank_checks import (
    check_equal_decisions,
    check_equal_weights,
    refuse_fsdp,
    what_must_be_equal,
)
from megatron_hybrid.inference.requests.builder import (
    Prompt,
    RequestBuilder,
    RequestSpec,
    TextTokenizer,
)
from megatron_hybrid.inference.requests.options import RequestOptions, check_salt
from megatron_hybrid.inference.requests.output import OutputProcessor
from megatron_hybrid.inference.requests.request import (
    GenerationResult,
    Request,
    RequestOutput,
    recompute_reason,
)
from megatron_hybrid.inference.requests.view import EndedRequests, RequestView
from megatron_hybrid.inference.sampling_params import Sampled, SamplingParams
from megatron_hybrid.inference.scheduling.scheduler import RestoreFailedError, Scheduler
from megatron_hybrid.inference.stream import Stream
from megatron_hybrid.inference.weight_epochs import Epochs
from megatron_hybrid.inference.weights.cache_folders import CacheFolders
from megatron_hybrid.inference.weights.memory import WeightMemory
from megatron_hybrid.inference.weights.transfer import Joining
from megatron_hybrid.inference.weights.updates import (
    Pairs,
    WeightsUnfinishedError,
    WeightUpdates,
)
from megatron_hybrid.inference.worker.allocation import allocate
from megatron_hybrid.inference.worker.graph_runner import GraphRunner
from megatron_hybrid.inference.worker.model_runner import ModelRunner
from megatron_hybrid.inference.worker.mtp_drafter import PartDrafter
from megatron_hybrid.inference.worker.warm_up import WARMED, measure_draft_costs, warm_up
from megatron_hybrid.models.hybrid_model import HybridModel, unwrap
from megatron_hybrid.offload.offload import Offload
from megatron_hybrid.offload.page_mover import PageMover
from megatron_hybrid.utils import out_of_memory
from megatron_hybrid.utils.fork_guard import ForkGuard
from megatron_hybrid.utils.interrupts import defer_sigint

logger = logging.getLogger(__name__)
Listener = TypeVar("Listener", bound=CacheListener)


@dataclass(frozen=True)
class CacheSaved:
    """Content of a cache folder on this rank after `save_cache`."""

    states: int
    kv_blocks: int
    num_bytes: int


def _checked(
    given: nn.Module | Sequence[nn.Module],
    tokenizer: TextTokenizer | None,
    config: InferenceConfig,
) -> HybridModel:
    """Check an engine's arguments, and return the bare model."""
    if not isinstance(config, InferenceConfig):
        raise TypeError(f"config must be an InferenceConfig, got {type(config).__name__}")
    model = unwrap(given)
    if not isinstance(model, HybridModel):
        raise TypeError(
            f"model must be one of build_hybrid_model, load_pretrained, load_megatron or "
            f"from_megatron, bare or wrapped, got {type(given).__name__}"
        )
    refuse_fsdp(given, model)
    if tokenizer is not None and not callable(getattr(tokenizer, "detokenize", None)):
        raise TypeError(
            f"tokenizer must be that of load_pretrained or one like it, with tokenize() and "
            f"detokenize(), or None; got {type(tokenizer).__name__}"
        )
    return model


class DynamicInferenceEngine:
    """Serves a hybrid model with continuous batching and prefix sharing.

    One thread at a time may call it: a call during one of another thread raises `EngineBusyError`,
    a RuntimeError, at once and changes nothing.

    Args:
        model: from `build_hybrid_model`, `load_pretrained`, `load_megatron` or `from_megatron`;
            bare, or as a training loop has it: in Float16Module, in DistributedDataParallel of
            megatron-core or of torch, in a list of one. Put into eval mode. Its own parameters are
            used, not copies; after training steps call `update_weights`.
        tokenizer: with `tokenize`, `detokenize` and `eod` (megatron-core's names), and `end_tokens`
            if there are several. Without one, prompts are token ids, answers have no text, and
            only `stop_token_ids` and the length end them. An optional `generation_config` holds the
            model's values for `SamplingParams`.
        config: sizes and the prefix-caching mode.

    Raises:
        ValueError, TypeError: the model cannot be served with this configuration; the message
            gives the reason.
        MemoryError: the device, or the host, has no room for what `config` asks for.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        tokenizer: TextTokenizer | None = None,
        config: InferenceConfig | None = None,
    ) -> None:
        with ExitStack() as undo:
            with coming(MAKING):
                if config is None:
                    config = InferenceConfig()
                model = _checked(model, tokenizer, config)
                seconds = config.rank_timeout or BEGIN_SECONDS
                self.ranks = ranks = ranks_of(model.pg_collection, seconds)
            self.replica = replica_of(model.pg_collection)
            """Number of this data-parallel replica of the model, and how many there are."""
            is_on_cpu = next(model.parameters()).device.type == "cpu"
            self._control = RankControl(ranks, config.rank_timeout or STEP_SECONDS, is_on_cpu)
            undo.callback(self._control.close)
            with self._control.inside(MAKING), ranks.together(MAKING):
                self._build(model, tokenizer, config, undo)
            undo.pop_all()
        self._updates = WeightUpdates(model, ranks, lambda: self._control.ends_waits)
        self._weight_memory = WeightMemory(model)
        self._epochs = Epochs(
            self.scheduler, self.offload, self.runner, self.output, self._folders, self.config
        )
        self._changed: dict[Request, None] = {}  # with new tokens and no output yet
        self._outputs: list[RequestOutput] = []  # not yet returned, if a step failed
        self._failed: list[Request] | None = None  # to cancel after a step that raised
        self._is_stepping = False
        self._num_decided_by_memory = out_of_memory.num_decided_by_memory
        self.is_suspended = self.is_closed = False
        self._abandoned: deque[Request] = deque()  # of dropped streams
        self._followed: dict[int, Request] = {}  # first samples, of the leading rank's requests
        self.num_steps = 0
        self.peak_pages_in_use = 0
        self.meter = Meter()
        self._ended = EndedRequests()
        self._activity = ActivityLog()

    def _build(
        self,
        model: HybridModel,
        tokenizer: TextTokenizer | None,
        config: InferenceConfig,
        undo: ExitStack,
    ) -> None:
        """Agree with the other ranks on sizes, and make the parts. undo: closes what they open."""
        stage = model.pg_collection.pp.rank()
        self.ranks.require_equal(what_must_be_equal(config, model, stage))
        check_equal_weights(self.ranks, model)
        self.model = model.eval()
        allocated = allocate(model, config, self.ranks)
        self.config = config = allocated.config
        self.context = allocated.context
        self.memory = self.context.memory
        spec, drafts = self.memory.spec, allocated.max_drafts
        self.cache = PrefixCache(spec, len(self.memory.pool), config.prefix_caching)
        self._lock, self._home = threading.RLock(), ForkGuard()
        self._folders = CacheFolders(
            self.ranks.name, self.model, spec, allocated.kv_dtype, config.state_encoding
        )
        disk = None
        if config.cache_dir is not None:
            disk = self._folders.open(config.cache_dir)
            undo.callback(disk.close)  # else the folder stays locked
        self.offload = Offload(
            self.cache,
            PageMover(self.memory.pool),
            config.host_cache_bytes,
            disk,
            config.disk_cache_bytes,
            self.ranks,
        )
        load, graphs = self.offload.fetches.load, allocated.graph_sizes
        self.runner = ModelRunner(
            self.model,
            self.memory,
            self.context,
            load,
            config.logprobs_mode,
            self.ranks,
            GraphRunner(self.model, self.context, graphs) if graphs is not None else None,
        )
        drafters: list[Drafter] = [KnownAnswers(self.cache), OwnTokens()]
        uses_part = config.speculation == "mtp"
        if uses_part:
            drafters = [PartDrafter(self.runner.predict)]
        self.scheduler = Scheduler(
            self.cache,
            self.offload.fetches,
            config.max_requests,
            config.max_tokens,
            Drafts(drafters, drafts, model.config.vocab_size, self.ranks.size > 1)
            if drafts
            else None,
            drafts_need_hidden=uses_part,
        )
        self.request_builder = RequestBuilder(
            config, self.cache, tokenizer, model.config.vocab_size
        )
        self.output = OutputProcessor(tokenizer)
        self.warm_up_seconds = 0.0
        if config.warm_up:
            try:
                if self.memory.device.type in WARMED:
                    saves = config.prefix_caching == "restore"
                    self.warm_up_seconds = warm_up(self.runner, config.max_tokens, saves)
                if drafts:
                    costs = measure_draft_costs(self.runner, config.max_tokens)
                    self.scheduler.draft_costs = costs
            except BaseException as error:
                self._control.report(error)  # other ranks may be in the same forward
                raise

    # One request ----------------------------------------------------------------------------------

    @exclusive
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        growing_text: bool = True,
    ) -> Request:
        """Queue a request and return its handle (`done`, `result()`).

        Args:
            prompt: text, token ids, or the messages of a chat (dicts with "role" and "content"),
                rendered by the tokenizer's chat template; states are then also saved at likely
                junctions with other chats. With tools or template variables, pass both results of
                `tokenizer.chat_prompt`, as prompt and as `cache_breakpoints` of the options.
            params: sampling parameters; default `SamplingParams()`, the model's defaults or ours.
            options: see `RequestOptions`; default: all of its defaults.
            growing_text: whether its outputs have text, which costs a little for each token. The
                result has it in any case.

        Raises:
            TypeError, ValueError: the request cannot be served; nothing has changed.
            ImportError: a guide needs llguidance.
            RuntimeError: the engine is closed.
        """
        self._refuse_closed("add_request")
        with self._control.checked("add_request()"):
            samples = self.request_builder.build(prompt, params, options)
        if growing_text:
            for request in samples:
                self.output.write_text_of(request)
        self._add(samples)
        return samples[0]

    def _add(self, samples: list[Request]) -> None:
        if self.ranks.size > 1:
            spec = RequestSpec.of(samples)
            if self._control.leads:
                self._control.queue("_add_told", spec)
            self._control.note("add_request()", spec.values())
        self.scheduler.add(samples[0])

    # Steps -------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Generation epoch: number of times that the weights have changed."""
        return self.output.epoch

    @property
    def rank_failure(self) -> str | None:
        """Which rank of this engine has failed or ended, and how, after which the engine cannot go
        on; None: none has. Any thread may ask."""
        return self._control.failure

    @property
    def has_work(self) -> bool:
        is_cancelling = self._control.leads and bool(self._abandoned)
        return self.scheduler.has_work or is_cancelling or bool(self._changed or self._outputs)

    @exclusive
    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step; return one output for each request that got a token or was answered in it.
        Streams get their outputs of every step, whoever runs it. If all requests wait for the disk,
        the step only waits a few milliseconds.

        If anything raises (such as a lack of memory for the forward), the running requests are
        queued again and start from the cache, which loses nothing; the next step returns outputs
        that were ready by then, too. After two such steps in a row they start one at a time; after
        the third, `take_failed` tells which request makes steps fail. Ctrl-C takes effect after the
        step.

        Raises:
            RuntimeError: the model is in training mode, or its weights are not whole
                (`WeightsUnfinishedError`), or the engine is suspended, or a step of it is running;
                nothing has changed.
            RankFailedError: another rank has failed or ended.
        """
        self._refuse_inside_step("step")
        self._failed = None
        self._refuse_suspended("step")
        with self._control.checked("step()"):
            if self.model.training:
                raise RuntimeError(
                    "the model is in training mode, in which answers and what is cached of them "
                    "would be noisy: call model.eval(), or update_weights() after a training step"
                )
            if (reason := self._updates.reason_to_wait) is not None:
                raise WeightsUnfinishedError(reason)
        began, num_steps = time.perf_counter(), self.num_steps
        if self.ranks.is_first and self._activity.is_due(began):
            self._activity.write(self.stats(), began)
        with defer_sigint(), self._control.inside("step()"):
            self._control.note("step()")
            self._is_stepping = True
            try:
                self._check_decisions()  # those of calls since the last step
                self._step()
                self._check_decisions()
            except BaseException as error:
                self._failed = self.scheduler.fail()
                if not isinstance(error, RestoreFailedError):  # which all ranks raise
                    self._control.report(error)
                raise
            finally:
                self._is_stepping = False
                self._make_outputs()
        self._activity.until = ended = time.perf_counter()
        if self.num_steps > num_steps:
            self.meter.step.observe(ended - began)
        return self.take_outputs()

    @exclusive
    def take_outputs(self) -> list[RequestOutput]:
        """Return the outputs that a failed step left, which the next one returns otherwise."""
        outputs, self._outputs = self._outputs, []
        return outputs

    @exclusive
    def take_failed(self) -> list[Request]:
        """Requests and samples to be cancelled after a step that raised, since the next ones would
        raise, too; all others go on with the next step, which answers them as if nothing had
        happened. Call it once after such a step.

        They are those that three failed steps in a row are blamed on, in which they did not get on
        (no token was added, nothing new of the prompt was computed), and those whose output could
        not be made. If the step was refused, it is the first one, so that something changes; if a
        rank has failed, all.
        """
        failed, self._failed = self._failed, None
        # While other ranks follow, what is cancelled stays until they are told.
        gone = {sample for request in list(self._abandoned) for sample in request.samples}
        everyone = {*self.scheduler.running, *self.scheduler.waiting} - gone
        if self._control.has_failed:
            return list(everyone)
        if failed is None:
            return sorted(everyone, key=lambda request: request.request_id)[:1]
        return failed

    def _check_decisions(self) -> None:
        """Raise MemoryError if a lack of memory has changed a decision, which other ranks have made
        otherwise."""
        if (
            self.ranks.size > 1
            and out_of_memory.num_decided_by_memory != self._num_decided_by_memory
        ):
            raise MemoryError(
                "a lack of host memory has changed a decision that all ranks make alike"
            )

    def _refuse_inside_step(self, name: str) -> None:
        if self._is_stepping:
            raise EngineBusyError(
                f"{name}() was called inside a step of this engine, by a tokenizer or a hook, and "
                "nothing has changed: call it when step() has returned"
            )
        self._refuse_inside_load(name)

    def _refuse_inside_load(self, name: str) -> None:
        """The other ranks wait for a pair, and an update must stay the one that is under way."""
        if self._updates.reads_pairs:
            raise EngineBusyError(
                f"{name}() was called inside load_weights() of this engine, by what it reads pairs "
                "from, and nothing has changed: call it when load_weights() has returned"
            )

    def _refuse_closed(self, name: str) -> None:
        if self.is_closed:
            raise RuntimeError(
                f"{name}() was called on a closed engine, which has given its memory back: make "
                "another one"
            )

    def _refuse_suspended(self, name: str) -> None:
        self._refuse_closed(name)
        if self.is_suspended:
            raise EngineSuspendedError(
                f"{name}() was called while this engine is suspended, and nothing has changed: "
                "call resume() first"
            )

    def _make_outputs(self) -> None:
        """Outputs that cannot be made are made by the next step."""
        changed, self._changed = self._changed, {}
        for request in changed:
            try:
                self._outputs.append(self.output.take(request))
            except BaseException as error:
                self._changed[request], failure = None, error
        if self._changed:
            self._failed = [*(self._failed or ()), *self._changed]
            raise failure

    def _step(self) -> None:
        if self._begin_step():
            self._epochs.begin_unsaid()
        had_fetches = self.offload.fetches.is_busy
        plan = self.scheduler.schedule()
        if not plan:
            if self.offload.fetches.is_busy:
                self.offload.fetches.wait()
            elif self.scheduler.waiting and not had_fetches:  # else they may have held the room
                raise RuntimeError(
                    f"{len(self.scheduler.waiting)} requests wait and none can run: this is a bug "
                    "in the scheduler, please report it"
                )
            return
        self.num_steps += 1
        pages = self.cache.allocator
        in_use = pages.num_pages - 1 - pages.num_free - pages.num_evictable
        self.peak_pages_in_use = max(self.peak_pages_in_use, in_use)
        if self.config.verify_ranks:
            check_equal_decisions(self.ranks, self.num_steps, self.scheduler, plan)
        result = self.runner.run(plan)
        gained = self.scheduler.accept(result.accepted, self._append) if result.accepted else []
        owners = self.scheduler.complete(plan, result)
        if any(work.draft_draws for work in plan.work):
            self.runner.take_back(plan, {r.request_id: r.num_computed for r in owners})
        for request in owners:
            if not request.done:  # by a draft
                gained.append(request)
                self._append(request, result.sampled[request.request_id])
            if request.done:
                self.output.finish(request)
                self.scheduler.finish(request)
                self._note_end(request)
        self.meter.note_tokens(gained, time.perf_counter())
        self._run_moves()

    def _append(self, request: Request, sampled: Sampled) -> bool:
        """Append a drawn token. Returns whether the request is answered."""
        self._changed[request] = None
        return self.output.append(request, sampled)

    def _note_end(self, request: Request) -> None:
        with out_of_memory.optional_work(lambda error: None):  # the page may lack it
            self._ended.note(request)
        self.meter.note_end(request)

    def _run_moves(self) -> None:
        """Execute the moves that are due before the next step."""
        if plan := self.scheduler.schedule_moves():
            self.scheduler.complete(plan, self.runner.run(plan))

    def _move(self) -> None:
        """`_run_moves` between two steps."""
        try:
            self._run_moves()
        except BaseException as error:
            self.scheduler.abort()
            self._control.report(error)
            raise

    def _begin_step(self) -> bool:
        """Exchange between the ranks what the step depends on. Returns whether the weights may have
        changed, on any rank."""
        changed = self._epochs.watch.has_changed()
        control = self._control
        if control.leads:
            self._tell("_step_told", changed)
        else:
            self._cancel_abandoned()
        if not (control.leads or control.follows) or self.offload.tiers:
            return bool(self.offload.poll(changed))
        if changed and not (control.leads or control.told_change):
            raise RuntimeError(
                f"the weights have changed on rank {self.ranks.rank}, but not on the first one: "
                "end lead() before they change, or call update_weights() there"
            )
        return changed or control.told_change

    def _tell(self, name: str | None = None, *args, **kwargs) -> None:
        """Tell the following ranks to cancel what is abandoned, and then to make a call, if any."""
        self._refuse_inside_load(name or "step")
        cancelled = []
        while self._abandoned and not self.is_suspended:
            request = self._abandoned.popleft()
            if not all(sample.closed for sample in request.samples):
                cancelled.append(request)
                self._control.queue("_cancel_told", request.request_id)
        if name is not None:
            self._control.queue(name, *args, **kwargs)
        self._control.send()
        for request in cancelled:
            self._cancel(request)

    # Weights -----------------------------------------------------------------------------------

    @exclusive
    @defer_sigint()
    @on_all_ranks
    def update_weights(self) -> None:
        """Say that the model has new weights, and put it into eval mode. Call it after a training
        step, or after a write that the engine cannot notice (see `WeightWatch`); also while the
        engine is suspended, and on all ranks between the same steps.

        `epoch` rises by one. All that older weights computed is dropped: the pool, host memory,
        `config.cache_dir`, parked requests. Requests keep their generated tokens; the next ones are
        drawn with the new weights, after all tokens before them were computed anew.

        Raises:
            RuntimeError: a step of this engine is running, or it is closed, or it has given back
                the weights; nothing has changed.
            MemoryError: there is no memory for the work; the next step does it first.
        """
        self._require_weights("update_weights")
        self._updates.note_whole()
        self._epochs.begin()

    @exclusive
    @defer_sigint()
    def load_weights(self, pairs: Pairs) -> None:
        """Write new weights into the model, and do what `update_weights` does. Call it on all ranks
        between the same steps, each with the same names, or on the leading one (`lead`), which
        sends the tensors to the others; also while the engine is suspended.

        Args:
            pairs: names and whole tensors, on any device and in any order: a mapping, or an
                iterable of pairs, which is read one pair at a time. Names are those of a checkpoint
                of the whole model, ours or (for a model of a Hugging Face folder) theirs. Any part
                of the model may be given, but tensors that are one in the model, such as the
                projections of q, k and v, only together. Floating-point values are rounded to the
                model's dtypes.

        It is an update of its own, in place of one that is under way. Where an earlier one has
        failed, the weights are whole again when all that it wrote was given again.

        Raises:
            ValueError: a name that the model does not have, one without others that belong to it,
                another shape, a quantized dtype, two values for one tensor, or other names, shapes,
                dtypes, values or another order than on another rank. Of a mapping or a sequence
                nothing has been written then. Of another iterable what came before has been, and
                the rest is read and dropped: if anything was written, steps raise
                WeightsUnfinishedError until it was given again.
            TypeError: not pairs of names and whole tensors; as with ValueError.
            Exception: what the iterable raised; as with ValueError.
            RuntimeError, MemoryError: as `update_weights`.
        """
        self._require_weights("load_weights")
        if self._control.leads:
            self._tell("_load", ())
        self._load(pairs)

    def _load(self, pairs: Pairs) -> None:
        control = self._control
        control.note("load_weights()")
        with control.inside("load_weights()"):
            self._updates.load(pairs, control.leads or control.follows, self._epochs.begin)

    _load.is_on_all_ranks = True

    # A trainer in another process

    @property
    def awaits_weights(self) -> bool:
        """Whether steps are refused until weights have come: an update is under way or has failed,
        or the weights were dropped."""
        return self.unfinished_weights is not None

    @property
    def unfinished_weights(self) -> str | None:
        """Why `awaits_weights` is true, and how to go on; None: it is not."""
        return self._updates.reason_to_wait

    @property
    def weights_failure(self) -> str | None:
        """Why the weights are those of no model, and how to go on, after an update has failed;
        None: none has."""
        if self._updates.has_failed and self._control.has_failed:
            return f"the weights are not those of one model, as {self._control.failure}"
        return self._updates.reason_to_wait if self._updates.has_failed else None

    def end_waits(self) -> None:
        """Let no rank wait for a trainer any more: who waits, or will, gets a TrainerError. Any
        thread may call it, before it closes the engine."""
        self._control.end_waits()

    @exclusive
    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Meet a trainer in another process: join its group with all ranks of the model. Like the
        next three calls, make it on all ranks, or on the leading one. The names are vLLM's.

        init_info: fields of `weight_transfer.GroupInfo`, such as {"master_address": "10.0.0.1",
            "master_port": 29500, "rank_offset": 1, "world_size": 3}.

        Raises:
            ValueError: the info is none; nothing has changed.
            TrainerError: the trainer has not come.
            RuntimeError: a step of this engine is running, or it is closed; nothing has changed.
        """
        # Where all ranks wait, Ctrl-C on one must not leave an exchange that the others are in.
        all_wait = self.ranks.size > 1 and not self._control.leads
        with defer_sigint() if all_wait else nullcontext():
            joining = self.begin_join(init_info)
            try:
                while not self.end_join(joining.number):
                    joining.wait()
            except KeyboardInterrupt:
                self.cancel_join()
                raise

    # Its three parts: whoever has steps to run runs them in between.

    @exclusive
    @on_all_ranks
    def begin_join(self, init_info: Mapping[str, Any]) -> Joining:
        """Set out to meet a trainer; see `init_weight_transfer_engine`."""
        self._refuse_inside_step("init_weight_transfer_engine")
        self._refuse_closed("init_weight_transfer_engine")
        return self._updates.begin_join(init_info)

    @exclusive
    @on_all_ranks
    def end_join(self, number: int) -> bool:
        """Whether all ranks have met the trainer; see `WeightUpdates.end_join`. number: that of
        the `Joining`."""
        self._refuse_closed("init_weight_transfer_engine")
        return self._updates.end_join(number)

    @exclusive
    @on_all_ranks
    def cancel_join(self) -> None:
        """Let nobody wait for a trainer that has not come."""
        self._updates.cancel_join()

    @exclusive
    @on_all_ranks
    def start_weight_update(self) -> None:
        """Begin an update of the weights, in place of one that is under way. No step runs until
        `finish_weight_update`.

        Raises:
            ValueError: as `load_weights`, of the model.
            RuntimeError: as `update_weights`.
        """
        self._require_weights("start_weight_update")
        self._updates.start()

    @exclusive
    @on_all_ranks
    def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        """Write a part of the new weights into the model.

        update_info: {"path"}, the absolute path of a checkpoint's folder that each rank can read;
            (one with packed weights holds the whole model, which is packed alike);
            or {"names", "dtype_names", "shapes"} of tensors that the trainer broadcasts to its
            group now, one by one in this order; or the same with {"ipc_handles_pickled"}, tensors
            in another process's memory of each rank's GPU, as vLLM's trainers name them. Names and
            tensors are those of `load_weights`, and those that belong together may come in several
            parts.

        Raises:
            ValueError: as `load_weights`, or what was sent differs from what was announced. The
                update is over. If nothing of it was written, the old weights are used; nothing is
                written of the first part where names, dtypes and shapes are wrong. Else steps
                raise WeightsUnfinishedError until all that was written was sent again.
            TrainerError: the trainer has left its group; likewise.
            RuntimeError: no update is under way.
        """
        try:
            self._require_weights("receive_weights")
        except EngineSuspendedError as error:
            self._updates.settle(update_info, error)
            raise
        self._updates.receive(update_info)

    @exclusive
    @defer_sigint()
    @on_all_ranks
    def finish_weight_update(self) -> None:
        """End an update, and do what `update_weights` does.

        Raises:
            ValueError: tensors are missing that belong to what was sent, or that have no value; the
                update goes on.
            RuntimeError: no update is under way.
        """
        self._require_weights("finish_weight_update")
        self._updates.finish()
        self._epochs.begin()

    def _require_weights(self, name: str) -> None:
        self._refuse_inside_step(name)
        self._refuse_closed(name)
        if self._weight_memory.is_released:
            raise EngineSuspendedError(
                f"{name}() was called while the weights have no memory, and nothing has changed: "
                "call reacquire_weights() first"
            )

    # Whole jobs --------------------------------------------------------------------------------

    @exclusive
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions | None] | None = None,
    ) -> list[GenerationResult]:
        """Answer prompts; returns one result for each, in order.

        `params` and `options` are each one for all prompts, or a sequence with one for each. A
        result's `samples` hold all n. All requests are checked before the first is queued. Requests
        queued before are run, too: their handles have the results.

        Raises:
            TypeError, ValueError: as `add_request`; the message names the prompt.
        """
        self._refuse_inside_step("generate")
        self._refuse_suspended("generate")
        with self._control.checked("generate()"):
            groups = self.request_builder.build_all(prompts, params, options)
        requests = [request for group in groups for request in group]
        try:
            for group in groups:
                self._add(group)
            for request in requests:
                while not request.closed:
                    self.step()
        except BaseException:
            with defer_sigint(), ExitStack() as ends:  # all of them, even if one raises
                ends.callback(self._forget_outputs, requests)
                for group in groups:
                    ends.callback(self._cancel_or_queue, group[0])
            raise
        return [group[0].result() for group in groups]

    def _forget_outputs(self, requests: list[Request]) -> None:
        for request in requests:
            self._changed.pop(request, None)
        own = {request.request_id for request in requests}
        self._outputs = [output for output in self._outputs if output.request_id not in own]

    @exclusive
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Stream:
        """Queue one prompt and return an iterator over its outputs; arguments as for `add_request`.
        With n > 1 it has the outputs of all samples, by `sample_index`, and ends behind the last
        one of all.

        Every step that adds to the answer, whoever runs it, leaves an output; `next` runs steps
        only when there is none. `close()`, or the end of `with`, cancels an unanswered request; if
        the stream is only dropped, the next step cancels it. An error of a step that `next` runs
        cancels it too, except EngineBusyError and EngineSuspendedError.

        Raises:
            TypeError, ValueError: the request cannot be served; nothing has changed.
            RuntimeError: the engine is closed.
        """
        self._refuse_closed("stream")
        with self._control.checked("stream()"):
            samples = self.request_builder.build(prompt, params, options)
        unread: deque[RequestOutput] = deque()
        for request in samples:
            self.output.write_text_of(request)
            request.unread = unread
        self._add(samples)
        # Where all ranks make the same calls, a stream is cancelled by `close` only: each rank's
        # garbage collector has a time of its own.
        ends_alone = self.ranks.size == 1 or self._control.leads
        dropped = self._abandoned if ends_alone else deque(maxlen=0)
        return Stream(samples[0], self.step, self.cancel_soon, dropped)

    @exclusive
    def cancel_soon(self, request: Request) -> None:
        """Cancel a request as `cancel` does, now, or before the next step where that is refused."""
        if self._is_stepping or self.is_suspended:
            self._abandoned.append(request)
        else:
            self.cancel(request)

    def _cancel_or_queue(self, request: Request) -> None:
        """Cancel a request; where other ranks follow, with the next step or call."""
        if self._control.leads:
            self._abandoned.append(request)
        elif self._control.has_failed:
            for sample_ in reversed(request.samples):
                self._cancel_sample(sample_)
        else:
            with self._control.inside("cancel()"):
                self._control.note("cancel()", {"request_id": request.request_id})
                self._cancel(request)

    def _cancel_abandoned(self) -> None:
        """Cancel the requests of dropped streams. Not while other ranks follow: `_tell` does it."""
        while self._abandoned and not self._control.leads:
            self._cancel(self._abandoned.popleft())

    @exclusive
    @defer_sigint()
    def cancel(self, request: Request) -> None:
        """End a request with all its samples; answered ones keep their answer. The computed tokens
        stay cached, with the last state if it is worth its room, for the next turn to resume from.
        No effect on a request that has ended. While other ranks follow this one (`lead`), it takes
        effect with the next step.

        Raises:
            ValueError: another engine's request; nothing has changed.
            TypeError: not a request.
            RuntimeError: a step of this engine is running, or it is suspended; nothing has changed.
        """
        if not isinstance(request, Request):
            raise TypeError(
                f"request must be what add_request returned, got {type(request).__name__}"
            )
        if request.origin is not self.request_builder:
            raise ValueError("this request was added to another engine: cancel it there")
        self._refuse_inside_step("cancel")
        if all(sample_.closed for sample_ in request.samples):
            return
        self._refuse_suspended("cancel")
        self._cancel_or_queue(request)

    @exclusive
    @defer_sigint()
    def end(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """End requests with what they have generated, and return their last outputs, with results
        whose `finish_reason` is "cancelled". Where all ranks make the same calls, `cancel`.

        Raises:
            RuntimeError: a step of this engine is running, or it is suspended; nothing has changed.
        """
        self._refuse_inside_step("end")
        self._refuse_suspended("end")
        unanswered = [s for request in requests for s in request.samples if not s.done]
        with self._control.inside("end()"):
            self._abandoned.extend(requests)
            self._tell() if self._control.leads else self._cancel_abandoned()
        return [self.output.take(sample) for sample in unanswered]

    def _cancel(self, request: Request) -> None:
        with ExitStack() as ends:  # all of them, even if one raises
            ends.callback(self._move)
            for sample_ in reversed(request.samples):
                ends.callback(self._cancel_sample, sample_)
        request.siblings = []

    def _cancel_sample(self, request: Request) -> None:
        if request.closed:
            return
        if not request.done:
            request.mark_answered("cancelled")
            self.output.finish(request)
            if request.report is None:
                request.report = PrefixReport(
                    request.num_prompt_tokens, 0, 0, MissReason.NOT_ADMITTED
                )
            self._changed.pop(request, None)
            if request.unread is not None:
                self.output.take(request)
            self._note_end(request)
        self.scheduler.cancel(request)

    # Many ranks --------------------------------------------------------------------------------

    @contextmanager
    def lead(self) -> Iterator[None]:
        """Context in which the first rank alone makes calls, and the others are in `follow`. Calls
        reach them with the next step, in one message. With one rank it does nothing.

        Without it all ranks make the same calls in the same order.

        Raises:
            RankError: the other ranks do not follow, or have made other calls before.
        """
        self._home.require("this engine")
        if not self.ranks.is_first:
            raise RuntimeError(
                f"lead() was called on rank {self.ranks.rank} of the model: call follow() there"
            )
        with self._control.lead(self._state(), self._has_unanswered):
            try:
                yield
            finally:
                if self._abandoned and self._control.leads and not self._control.has_failed:
                    self._tell()

    @exclusive
    def follow(self) -> None:
        """Run what the first rank runs, until it ends `lead`.

        Raises:
            RankError: the first rank does not lead, or has made other calls before.
            RankFailedError: a rank has failed or ended.
        """
        if self.ranks.is_first:
            raise RuntimeError("follow() was called on the first rank of the model: call lead()")
        for name, args, kwargs in self._control.calls(self._state(), self._has_unanswered):
            call = getattr(self, name)
            try:
                call(*args, **kwargs)
            except Exception as error:
                is_everywhere = isinstance(error, RestoreFailedError) or getattr(
                    call, "is_on_all_ranks", False
                )
                if self._control.has_failed or not is_everywhere:
                    self._control.report(error)
                    raise
                logger.info("%s() raised on all ranks: %s", name, error)

    @property
    def _has_unanswered(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.num_unanswered)

    def _state(self) -> tuple:
        """What ranks must have in common to go on together."""
        waiting, running = (
            [request.request_id for request in requests]
            for requests in (self.scheduler.waiting, self.scheduler.running)
        )
        next_id = self.request_builder.next_id
        return waiting, running, next_id, self.cache.digest(), self.is_suspended

    def _add_told(self, spec: RequestSpec) -> None:
        samples = self.request_builder.make(spec)
        self._followed[samples[0].request_id] = samples[0]
        self.scheduler.add(samples[0])

    def _cancel_told(self, request_id: int) -> None:
        self._cancel(self._followed[request_id])

    def _step_told(self, weights_changed: bool) -> None:
        self._control.told_change = weights_changed
        self.step()
        self._followed = {
            request_id: request
            for request_id, request in self._followed.items()
            if not all(sample.closed for sample in request.samples)
        }

    # Suspension --------------------------------------------------------------------------------

    @exclusive
    @on_all_ranks
    def suspend(self, keep_cache: str = "drop") -> None:
        """Give back the memory of the pool and the live slots until `resume`, for example to train
        the model in between. Requests stay, and new ones may be added; steps are refused. No effect
        on a suspended engine.

        keep_cache: "drop": the cache is emptied, also host memory and the folder of
            `config.cache_dir`. "host": its bytes wait in host memory, and everything goes on as it
            was. "disk": what is cached is written to that folder, as by `save_cache`, and is
            fetched from there when a request wants it; the host tier keeps its records. With "drop"
            and "disk" running requests are computed anew, as far as nothing of them is cached;
            tokens that they have generated stay.

        Raises:
            ValueError: there is no such `keep_cache`; or "disk" without `config.cache_dir`.
            MemoryError: "host", and host memory has no room.
            OSError: writing to the folder failed.
            RuntimeError: a step of this engine is running. In all cases the engine is not
                suspended, and but for "drop" nothing has changed.
        """
        self._control.note("suspend()", {"keep_cache": keep_cache})
        if keep_cache not in ("drop", "host", "disk"):
            raise ValueError(f"keep_cache is {keep_cache!r}; use 'drop', 'host' or 'disk'")
        self._refuse_inside_step("suspend")
        if self.is_suspended:
            return
        tier = self.offload.disk
        if keep_cache == "disk" and tier is None:
            raise ValueError(
                "keep_cache='disk' needs a folder to write to: set config.cache_dir, or use 'host'"
            )
        with defer_sigint() as let_in:
            if keep_cache == "disk":
                self._epochs.check()
                with self.ranks.together("writing the cache"):
                    self.offload.save_to(tier, let_in)
            self._cancel_abandoned()
            if keep_cache == "host":
                self.offload.fetches.give_up_all()
                self._keep_in_host_memory()
            elif keep_cache == "disk":
                self._epochs.start_over()
                self.offload.fetches.give_up_all()
                self.cache.clear()
            else:
                self._epochs.start_over()
                self._epochs.clear()
            self.runner.drop_graphs()
            self.memory.release()
            self.is_suspended = True

    def _keep_in_host_memory(self) -> None:
        """Copy the pages of requests and of the cache, and live slots of requests, on all ranks or
        on none."""
        pages = self.cache.allocator
        slots = [request.slot for request in self.scheduler.running]
        used = np.flatnonzero(pages.ref_counts + pages.cached_counts), np.array(slots, dtype=int)
        try:
            with self.ranks.together("keeping the cache in host memory"):
                self.memory.keep(used)
        except BaseException:
            self.memory.keep(None)
            raise

    @exclusive
    @defer_sigint()
    @on_all_ranks
    def resume(self) -> None:
        """End a suspension. No effect on an engine that is not suspended.

        Raises:
            MemoryError: the device has no room; the engine stays suspended.
            RuntimeError: the engine is closed, or has given back the weights.
        """
        self._require_weights("resume")
        if self.is_suspended:
            self._epochs.check()  # first: old bytes need not come back
            try:
                with self.ranks.together("taking the memory of the cache again"):
                    self.memory.reacquire()
                    self.memory.refill()
            except BaseException:
                self.memory.release()
                raise
            self.memory.keep(None)
            self.is_suspended = False

    @exclusive
    @defer_sigint()
    @on_all_ranks
    def release_weights(self, keep: bool = True) -> None:
        """Give back the memory of a suspended engine's weights, too, until `reacquire_weights`.

        keep: their values wait in host memory; else they are dropped, and all have to be sent.

        Raises:
            ValueError: it is not the weights' alone, as in a model that is trained.
            MemoryError: host memory has no room.
            RuntimeError: the engine is not suspended, or updates its weights. In all cases nothing
                has changed.
        """
        self._refuse_inside_step("release_weights")
        self._refuse_closed("release_weights")
        if not self.is_suspended:
            raise RuntimeError("release_weights() needs a suspended engine: call suspend() first")
        if (reason := self._updates.reason_to_wait) is not None:
            raise WeightsUnfinishedError(reason)
        if self._weight_memory.is_released:
            return
        self._epochs.check()  # what is seen now is not seen afterwards
        with self.ranks.together("giving back the weights"):
            self._weight_memory.release(keep)

    @exclusive
    @defer_sigint()
    @on_all_ranks
    def reacquire_weights(self) -> None:
        """End what `release_weights` has begun. If the values were dropped, steps are refused until
        an update, or `load_weights`, has given all of them. No effect on others.

        Raises:
            MemoryError: the device has no room; nothing has changed.
            RuntimeError: the engine is closed.
        """
        self._refuse_closed("reacquire_weights")
        with self.ranks.together("taking the memory of the weights again"):
            is_lost = self._weight_memory.reacquire()
        self._epochs.watch.accept()  # other addresses, and the same values
        if is_lost:
            self._updates.note_dropped()

    # Cache folders, closing --------------------------------------------------------------------

    @exclusive
    @on_all_ranks
    def save_cache(self, folder: str | PathLike[str] | None = None) -> CacheSaved:
        """Write the whole cache into a folder, the most valuable records first. An engine with the
        same model and configuration can use it as its `cache_dir`.

        folder: default `config.cache_dir`. Its records stay; if they and the new ones take more
            than `config.disk_cache_bytes`, the most valuable of both stay, and no fewer bytes than
            before.

        Ctrl-C takes effect between two states; those written before are usable. After a change of
        the weights nothing is cached.

        Raises:
            ValueError: no folder, or the mode is not "restore", or (`CacheFolderError`) the folder
                holds something else or cannot be made, also for lack of disk space.
            OSError: writing failed.
            RuntimeError: the engine is suspended, or this process is a fork of the one that opened
                `config.cache_dir`.
        """
        self._refuse_suspended("save_cache")
        tier = self.offload.disk
        if folder == "" or (folder is None and tier is None):
            raise ValueError(
                f"save_cache needs a folder, it is {folder!r}; None stands for the "
                f"config.cache_dir of an engine that has one and is not closed"
            )
        if self.cache.mode != "restore":
            raise ValueError(
                f"save_cache needs prefix_caching='restore', it is {self.cache.mode!r}: where "
                "every token is computed nothing is fetched"
            )
        with defer_sigint() as let_in:
            self._epochs.check()
            limit = self.config.disk_cache_bytes
            tier = self._folders.save(self.offload, folder, limit, let_in)
        return CacheSaved(tier.num_states, tier.num_blocks, tier.used_bytes)

    @exclusive
    @defer_sigint()
    @on_all_ranks
    def clear_cache(self) -> None:
        """Empty the cache: the pool, host memory and `config.cache_dir`.

        Raises:
            RuntimeError: requests are running or waiting, or the engine is suspended; nothing has
                changed.
            OSError: writing to the folder failed.
        """
        self._refuse_suspended("clear_cache")
        self._cancel_abandoned()
        running = self.scheduler.num_unanswered
        if running or self.scheduler.waiting:
            raise RuntimeError(
                f"{running} requests run and {len(self.scheduler.waiting)} wait: clear the cache "
                "when all are answered, or cancel them"
            )
        self.scheduler.retire_closing()
        self._epochs.clear()

    def close(self) -> None:
        """Complete the folder of `config.cache_dir` and unlock it, cancel unanswered requests, and
        give back the memory of pool, live slots and tiers. What needs them raises RuntimeError from
        now on; results, `stats` and `metrics` stay. The end of `with` does the same. Ctrl-C takes
        effect afterwards, a second one at once: then call it again. Other ranks of the model cannot
        step without this one. In a fork of its process it does nothing.

        Raises:
            RuntimeError: a step of this engine is running; nothing has changed.
        """
        if self._home.is_here:
            self._close()

    @exclusive
    @defer_sigint()
    def _close(self) -> None:
        self._refuse_inside_step("close")
        self._updates.leave()
        self.offload.close()
        self._epochs.start_over()
        for request in list(self.scheduler.waiting):
            for sample_ in (request, *request.siblings):
                self._cancel_sample(sample_)
        self.memory.keep(None)
        self.runner.drop_graphs()
        self.memory.release()
        self.is_suspended = self.is_closed = True
        self._control.close()

    def __enter__(self) -> "DynamicInferenceEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Inspection --------------------------------------------------------------------------------

    @exclusive
    def explain(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str = ""
    ) -> Explanation:
        """Explain, for `print`, which tokens of a prompt would be reused now, and why not more. For
        operators, not for tenants: it tells whether another salt knows the prompt.

        params: as for `add_request`: `add_BOS` adds a token to text, and with log-probs of the
        prompt all of it is computed.

        Raises:
            TypeError, ValueError: `add_request` would refuse this prompt, parameters or salt.
        """
        check_salt(salt)
        params = self.request_builder.check_params(params)
        tokens = self.request_builder.tokens_of(prompt, params)
        reason = recompute_reason(params)
        chunk = self.cache.longest_forward(len(tokens), self.config.max_tokens)
        return self.offload.explain(tokens, salt, reason, chunk)

    @exclusive
    def stats(self) -> Stats:
        """Counters since the start, and present sizes: a dict that `print` shows in groups."""
        counts = {
            **self.cache.stats(),
            "steps": self.num_steps,
            "forward_tokens": self.scheduler.num_forward_tokens,
            "prefill_tokens": self.scheduler.num_prefill_tokens,
            "generation_tokens": self.meter.num_generated,
            "draft_tokens": self.scheduler.num_drafts,
            "draft_tokens_accepted": self.scheduler.accepted_at.total(),
            **self.scheduler.draft_counts(),
            "preemptions": self.scheduler.num_preemptions,
            "step_failures": self.scheduler.num_failures,
            "request_restarts": self.scheduler.num_restarts,
            "weight_changes": self.epoch,
            "requests_running": len(self.scheduler.running),
            "requests_waiting": len(self.scheduler.waiting),
            "peak_pages_in_use": self.peak_pages_in_use,
            "pool_bytes": self.memory.pool.numel(),
            "pool_tokens": self.cache.spec.tokens_in(self.cache.allocator.num_pages - 1),
            "pool_states": self.cache.spec.states_in(self.cache.allocator.num_pages - 1),
            "kv_blocks_in_use": self.scheduler.num_kv_blocks,
            "live_slot_bytes": self.memory.slots.numel(),
            **self.runner.graph_counts(),
            "warm_up_ms": round(self.warm_up_seconds * 1000),
            **self.offload.counters(),
            "parked_bytes": self.runner.parked_bytes,
            "rank_bytes": self._control.sent_bytes,
        }
        return Stats(counts)

    @exclusive
    def requests(self, num_tokens: int = 0) -> list[RequestView]:
        """The requests that run, those that wait, and the last ones that ended, each group in its
        order, with the last `num_tokens` tokens of each prompt. For operators, as `explain`."""
        live = (*self.scheduler.running, *self.scheduler.waiting)
        return self._ended.views(live, self.cache.contents.edge_number, num_tokens)

    @exclusive
    def cache_tree(self, max_edges: int = 10_000, num_tokens: int = 0) -> TreeView:
        """The tree of cached prefixes: its edges, those used last if there are more than
        `max_edges`, with the first `num_tokens` tokens of each, and where each state is. For
        operators, as `explain`."""
        return self.cache.contents.view(self.offload.tier_of, max_edges, num_tokens)

    @exclusive
    def cache_changes(
        self, since: Version | None = None, limit: int | None = None, num_tokens: int = 0
    ) -> TreeChanges:
        """What has changed in the tree of cached prefixes since an earlier answer's `version`
        (None: all of it), with at most `limit` edges and the first `num_tokens` tokens of each.
        Unlike `cache_tree` it looks at nothing else."""
        return self.cache.contents.changes(since, limit, self.offload.tier_of, num_tokens)

    @exclusive
    def watch_cache(self, make: Callable[[PrefixCache], Listener]) -> Listener:
        """Make a listener of the cache, and let it follow from now on what is cached and evicted
        on this rank. Call it before the first request: what is cached is not told."""
        listener = make(self.cache)
        self.cache.watch(listener)
        return listener

    @exclusive
    def histograms(self) -> dict[str, list[int]]:
        """Counts of times, by the names of `metrics.HISTOGRAMS`: up to each of `meter.BOUNDS`, in
        seconds, and beyond."""
        return {name: list(each.counts) for name, each in self.meter.histograms.items()}

    @exclusive
    def metrics(self) -> str:
        """`stats`, and times as histograms, in the text format of Prometheus; see
        `inference/metrics/prometheus.py`."""
        config = self.config
        info = {
            "block_size": config.block_size_tokens,
            "cache_bytes": config.cache_bytes,
            "cache_dtype": str(config.kv_cache_dtype or "auto").removeprefix("torch."),
            "enable_prefix_caching": config.prefix_caching != "off",
            "gpu_memory_utilization": config.memory_fraction,
            "num_gpu_blocks": self.stats()["pool_tokens"] // config.block_size_tokens,
            "prefix_caching": config.prefix_caching,
            "state_encoding": config.state_encoding,
        }
        text = prometheus_text(self.stats(), self.meter.histograms)
        return text + requests_text(self.meter.num_ended, info)

    @exclusive
    def check_integrity(self) -> None:
        """Raise RuntimeError if an invariant of cache or scheduler is broken."""
        self.cache.check_integrity()
        self.scheduler.check_integrity()
