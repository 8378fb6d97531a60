"""DynamicInferenceEngine: requests in, tokens out.

The engine checks requests, and hands its other calls to one object for each job: `live_requests`,
`step_loop`, `weight_calls`, `cache_calls`, `adapter_calls` and `rank_calls`. The cache decides
about sharing and eviction, the scheduler about the tokens of each step.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from os import PathLike
from typing import Annotated, Any

from torch import nn

from megatron_hybrid.cache.explain import Explanation
from megatron_hybrid.cache.index.journal import Version
from megatron_hybrid.cache.tree_view import EdgeView, TreeChanges
from megatron_hybrid.distributed.rank_control import RankControl
from megatron_hybrid.distributed.ranks import MAKING, ranks_of, replica_of
from megatron_hybrid.distributed.rendezvous import BEGIN_SECONDS, announce_failure
from megatron_hybrid.distributed.watchdog import STEP_SECONDS
from megatron_hybrid.inference.adapter_calls import AdapterCalls
from megatron_hybrid.inference.cache_calls import CacheCalls, CacheSaved
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine_parts import check_arguments, make_parts
from megatron_hybrid.inference.exclusive import exclusive
from megatron_hybrid.inference.inspection import metrics_of, promises_of, stats_of
from megatron_hybrid.inference.live_requests import LiveRequests
from megatron_hybrid.inference.metrics.prometheus import Stats
from megatron_hybrid.inference.rank_calls import RankCalls
from megatron_hybrid.inference.requests.builder import Prompt, TextTokenizer
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.request import (
    GenerationResult,
    Request,
    RequestOutput,
    recompute_reason,
)
from megatron_hybrid.inference.requests.view import RequestView
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.step_loop import StepLoop
from megatron_hybrid.inference.stream import Stream
from megatron_hybrid.inference.weight_calls import WeightCalls
from megatron_hybrid.inference.weights.updates import Pairs
from megatron_hybrid.utils.interrupts import defer_sigint
from megatron_hybrid.utils.other_names import names_arguments
from megatron_hybrid.utils.progress import progress as progress_bar
from megatron_hybrid.utils.validation import Range, check_field


@names_arguments()
class DynamicInferenceEngine(AbstractContextManager["DynamicInferenceEngine"]):
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
            with announce_failure(MAKING):
                if config is None:
                    config = InferenceConfig()
                model = check_arguments(model, tokenizer, config)
                seconds = config.rank_timeout or BEGIN_SECONDS
                self.ranks = ranks = ranks_of(model.pg_collection, seconds)
            self.replica = replica_of(model.pg_collection)
            """Number of this data-parallel replica of the model, and how many there are."""
            is_on_cpu = next(model.parameters()).device.type == "cpu"
            control = RankControl(ranks, config.rank_timeout or STEP_SECONDS, is_on_cpu)
            undo.callback(control.close)
            with control.inside(MAKING), ranks.raise_on_all(MAKING):
                parts = make_parts(model, tokenizer, config, ranks, control, undo)
            undo.pop_all()
        self._parts, self._guard, self._control = parts, parts.guard, control
        self._epochs = parts.epochs
        self.config, self.model, self.cache = parts.config, parts.model, parts.cache
        self.runner, self.offload, self.scheduler = parts.runner, parts.offload, parts.scheduler
        self.context, self.memory = parts.runner.context, parts.runner.memory
        self.request_builder, self.output = parts.request_builder, parts.output
        self.warm_up_seconds = parts.warm_up_seconds
        self.live = LiveRequests(parts)
        self.weights = WeightCalls(parts, self.live)
        self._steps = StepLoop(parts, self.live, self.weights, self.stats)
        self._cache_calls = CacheCalls(parts, self.live, self.weights)
        self.adapters = AdapterCalls(parts, self.live)
        """Low-rank adapters over the model: `load(name, folder)`, `unload(name)`, `loaded`."""
        others = self.weights, self._cache_calls, self.adapters
        self._rank_calls = RankCalls(parts, self.live, self._steps, *others)

    # Requests and steps

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
        self._guard.refuse_closed("add_request")
        with self._control.checked("add_request()"):
            samples = self.request_builder.build(prompt, params, options)
        if growing_text:
            for request in samples:
                self.output.write_text_of(request)
        self.live.add(samples)
        return samples[0]

    @property
    def epoch(self) -> int:
        """Generation epoch: number of times that the weights have changed."""
        return self.output.epoch

    @property
    def rank_failure(self) -> str | None:
        """Which rank of this engine has failed or ended, and how, or None. After a failure the
        engine cannot go on. Any thread may ask."""
        return self._control.failure

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""
        return self.live.has_work

    @property
    def num_steps(self) -> int:
        """Number of steps that have computed something, or have begun to."""
        return self._steps.num_steps

    @property
    def is_suspended(self) -> bool:
        """Whether the memory of the cache is given back."""
        return self._guard.is_suspended

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._guard.is_closed

    def step(self) -> list[RequestOutput]:
        """Run one step; return one output for each request that got a token or was answered in it.
        Streams get their outputs of every step, whoever runs it. If all requests wait for the disk,
        the step only waits a few milliseconds.

        If anything raises (such as a lack of memory for the forward), the running requests are
        queued again and start from the cache, which loses nothing; the next step returns outputs
        that were ready by then, too. After two such steps in a row they start one at a time; after
        the third, `take_failed` returns the request that makes steps fail. Ctrl-C takes effect
        after the step.

        Raises:
            RuntimeError: the model is in training mode, its weights are not whole
                (`WeightsUnfinishedError`), the engine is suspended, or a step of it is running;
                nothing has changed.
            RankFailedError: another rank has failed or ended.
        """
        return self._steps.step()

    @exclusive
    def take_failed(self) -> list[Request]:
        """Return the requests and samples to be cancelled after a step that raised, since they
        would make the next steps raise, too. All others go on with the next step as if nothing had
        happened. Call it once after such a step.

        They are those blamed for three failed steps in a row that added no token to them and
        computed nothing new of their prompts, and those whose output could not be made. If the step
        was refused, it is the first request, so that something changes; if a rank has failed, they
        are all requests.
        """
        return self._steps.take_failed()

    @exclusive
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions | None] | None = None,
        progress: bool = True,
    ) -> list[GenerationResult]:
        """Answer prompts, and return one result for each, in order.

        `params` and `options` are each one for all prompts, or a sequence with one for each. A
        result's `samples` hold all n. All requests are checked before the first is queued. Requests
        queued before are run, too, and their handles get the results. With `progress`, a terminal
        shows a bar if this takes seconds.

        Raises:
            TypeError, ValueError: as `add_request`; the message names the prompt.
        """
        self._guard.refuse_inside_step("generate")
        self._guard.refuse_suspended("generate")
        with self._control.checked("generate()"):
            groups = self.request_builder.build_all(prompts, params, options)
        requests = [request for group in groups for request in group]
        try:
            for group in groups:
                self.live.add(group)
            with progress_bar(
                "generating", len(requests), False, False, progress and self.ranks.is_first
            ) as advance:
                for request in requests:
                    while not request.closed:
                        self.step()
                        advance(0)
                    advance(1)
        except BaseException:
            with defer_sigint(), ExitStack() as ends:  # all of them, even if one raises
                ends.callback(self.live.forget_outputs, requests)
                for group in groups:
                    ends.callback(self.live.cancel_or_queue, group[0])
            raise
        return [group[0].result() for group in groups]

    @exclusive
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Stream:
        """Queue one prompt and return an iterator over its outputs. Arguments are those of
        `add_request`. With n > 1 it has the outputs of all samples, by `sample_index`, and ends
        after the last one of all.

        Every step that adds to the answer, whoever runs it, leaves an output; `next` runs steps
        only when there is none. `close()`, or the end of `with`, cancels an unanswered request; if
        the stream is only dropped, the next step cancels it. An error of a step that `next` runs
        cancels it too, except EngineBusyError and EngineSuspendedError.

        Raises:
            TypeError, ValueError: the request cannot be served; nothing has changed.
            RuntimeError: the engine is closed.
        """
        self._guard.refuse_closed("stream")
        with self._control.checked("stream()"):
            samples = self.request_builder.build(prompt, params, options)
        unread: deque[RequestOutput] = deque()
        for request in samples:
            self.output.write_text_of(request)
            request.unread = unread
        self.live.add(samples)
        # Where all ranks make the same calls, a stream is cancelled by `close` only: each rank's
        # garbage collector has a time of its own.
        ends_alone = self.ranks.size == 1 or self._control.leads
        dropped = self.live.abandoned if ends_alone else deque(maxlen=0)
        return Stream(samples[0], self.step, self.live.cancel_soon, dropped)

    def cancel(self, request: Request) -> None:
        """End a request with all its samples; answered ones keep their answer. The computed tokens
        stay cached, with the last state if it is worth its room, for the next turn to resume from.
        A request that has ended stays as it is. While other ranks follow this one (`lead`), the
        call takes effect with the next step.

        Raises:
            ValueError: it is another engine's request; nothing has changed.
            TypeError: it is not a request.
            RuntimeError: a step of this engine is running, or it is suspended; nothing has changed.
        """
        self.live.cancel(request)

    # Weights

    def update_weights(self) -> None:
        """Say that the model has new weights, and put it into eval mode. Call it after a training
        step, or after a write that the engine cannot notice (see `WeightWatch`); also while the
        engine is suspended, and on all ranks between the same steps.

        `epoch` rises by one. All that older weights computed is dropped from the pool, from host
        memory, from `config.cache_dir` and from parked requests. Requests keep their generated
        tokens; further ones are drawn with the new weights, which compute all tokens before anew.

        Raises:
            RuntimeError: a step of this engine is running, or it is closed, or it has given back
                the weights; nothing has changed.
            MemoryError: there is no memory for the work; the next step does it first.
        """
        self.weights.update_weights()

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

        The call replaces an update that is under way. After an update that failed, the weights are
        whole again when all that it wrote was given again.

        Raises:
            ValueError: the model does not have a name, a name comes without others that belong to
                it, a shape differs, a dtype is quantized, a tensor has two values, or another rank
                has other names, shapes, dtypes, values or another order. Of a mapping or a sequence
                nothing has been written then. Of another iterable the pairs before the error are
                written, and the rest is read and dropped; if anything was written, steps raise
                WeightsUnfinishedError until it is given again.
            TypeError: `pairs` are not names and whole tensors; the effect is that of a ValueError.
            Exception: the iterable raised it; the effect is that of a ValueError.
            RuntimeError, MemoryError: as `update_weights`.
        """
        self.weights.load_weights(pairs)

    @property
    def awaits_weights(self) -> bool:
        """Whether steps are refused until weights have come: an update is under way or has failed,
        or the weights were dropped."""
        return self.weights.unfinished is not None

    @property
    def weights_failure(self) -> str | None:
        """Why the weights are those of no model, and how to go on, after an update has failed, or
        None."""
        return self.weights.failure

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Meet a trainer in another process: join its group with all ranks of the model. Like the
        next three calls, make it on all ranks, or on the leading one. The names are vLLM's.

        init_info: fields of `transfer.GroupInfo`, such as {"master_address": "10.0.0.1",
            "master_port": 29500, "rank_offset": 1, "world_size": 3}.

        Raises:
            ValueError: the info is not valid; nothing has changed.
            TrainerError: the trainer has not come.
            RuntimeError: a step of this engine is running, or it is closed; nothing has changed.
        """
        self.weights.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        """Begin an update of the weights, in place of one that is under way. No step runs until
        `finish_weight_update`.

        Raises:
            ValueError: as `load_weights`, if it is due to the model.
            RuntimeError: as `update_weights`.
        """
        self.weights.start_weight_update()

    def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        """Write a part of the new weights into the model.

        update_info: {"path"}, the absolute path of a checkpoint's folder that each rank can read
            (one with packed weights holds the whole model, which is packed alike);
            or {"names", "dtype_names", "shapes"} of tensors that the trainer broadcasts to its
            group now, one by one in this order; or the same with {"ipc_handles_pickled"}, tensors
            in another process's memory of each rank's GPU, as vLLM's trainers name them. Names and
            tensors are those of `load_weights`, and those that belong together may come in several
            parts.

        Raises:
            ValueError: as `load_weights`, or what was sent differs from what was announced. The
                update is over. If nothing of it was written, the old weights are used; so it is
                where names, dtypes or shapes of the first part are wrong. Else steps raise
                WeightsUnfinishedError until all that was written is sent again.
            TrainerError: the trainer has left its group; the effect is that of a ValueError.
            RuntimeError: no update is under way.
        """
        self.weights.receive_weights(update_info)

    def finish_weight_update(self) -> None:
        """End an update, and do what `update_weights` does.

        Raises:
            ValueError: tensors are missing that belong to those that were sent, or that have no
                value; the update goes on.
            RuntimeError: no update is under way.
        """
        self.weights.finish_weight_update()

    def release_weights(self, keep: bool = True) -> None:
        """Give back the memory of a suspended engine's weights, too, until `reacquire_weights`.

        keep: whether their values wait in host memory; else they are dropped, and all of them have
            to be sent again.

        Raises:
            ValueError: others use the memory of the weights, too, as in a model that is trained.
            MemoryError: host memory has no room.
            RuntimeError: the engine is not suspended, or updates its weights. After each of these
                errors nothing has changed."""
        self.weights.release_weights(keep)

    def reacquire_weights(self) -> None:
        """Allocate the memory again that `release_weights` gave back, if it did. If the values were
        dropped, steps are refused until an update, or `load_weights`, has given all of them.

        Raises:
            MemoryError: the device has no room; nothing has changed.
            RuntimeError: the engine is closed.
        """
        self.weights.reacquire_weights()

    # Many ranks

    def lead(self) -> AbstractContextManager[None]:
        """Return a context in which the first rank alone makes calls, and the others are in
        `follow`. Calls reach them with the next step, in one message. With one rank it does
        nothing. Without this context all ranks make the same calls in the same order.

        Raises:
            RankError: the other ranks do not follow, or have made other calls before.
        """
        return self._rank_calls.lead()

    def follow(self) -> None:
        """Run what the first rank runs, until it ends `lead`.

        Raises:
            RankError: the first rank does not lead, or has made other calls before.
            RankFailedError: a rank has failed or ended.
        """
        self._rank_calls.follow()

    # Memory, cache folders, the end

    def suspend(self, keep_cache: str = "drop") -> None:
        """Give back the memory of the pool and the live slots until `resume`, for example to train
        the model in between. Requests stay, and new ones may be added; steps are refused. Nothing
        happens if the engine is suspended.

        keep_cache: "drop" empties the cache, also in host memory and in the folder of
            `config.cache_dir`. "host" keeps its bytes in host memory, and `resume` brings all of
            them back. "disk" writes it to that folder, as `save_cache` does, and requests fetch
            from there what they want; the host tier keeps its records. With "drop" and "disk" the
            parts of running requests that are not cached are computed anew; tokens that they have
            generated stay.

        Raises:
            ValueError: there is no such `keep_cache`; or it is "disk" without `config.cache_dir`.
            MemoryError: it is "host", and host memory has no room.
            OSError: writing to the folder failed.
            RuntimeError: a step of this engine is running. After each of these errors the engine is
                not suspended, and except with "drop" nothing has changed.
        """
        self._cache_calls.suspend(keep_cache)

    def resume(self) -> None:
        """End a suspension, if the engine is suspended.

        Raises:
            MemoryError: the device has no room; the engine stays suspended.
            RuntimeError: the engine is closed, or has given back the weights.
        """
        self._cache_calls.resume()

    def save_cache(self, folder: str | PathLike[str] | None = None) -> CacheSaved:
        """Write the whole cache into a folder, the most valuable records first. An engine with the
        same model and configuration can use it as its `cache_dir`.

        folder: default `config.cache_dir`. Its records stay. If they and the new ones take more
            than `config.disk_cache_bytes`, the most valuable of both stay, and no fewer bytes than
            before.

        Ctrl-C takes effect between two states; those written before are usable. After a change of
        the weights nothing is cached.

        Raises:
            ValueError: there is no folder, the mode is not "restore", or (`CacheFolderError`) the
                folder holds something else or cannot be made, also for lack of disk space.
            OSError: writing failed.
            RuntimeError: the engine is suspended, or this process is a fork of the one that opened
                `config.cache_dir`.
        """
        return self._cache_calls.save_cache(folder)

    def clear_cache(self) -> None:
        """Empty the cache: the pool, host memory and `config.cache_dir`.

        Raises:
            RuntimeError: requests are running or waiting, or the engine is suspended; nothing has
                changed.
            OSError: writing to the folder failed.
        """
        self._cache_calls.clear_cache()

    def close(self) -> None:
        """Complete the folder of `config.cache_dir` and unlock it, cancel unanswered requests, and
        give back the memory of pool, live slots and tiers. From then on, calls that need them raise
        RuntimeError; results, `stats` and `metrics` stay. The end of `with` does the same. Ctrl-C
        takes effect afterwards, a second one at once: then call it again. Other ranks of the model
        cannot step without this one. In a fork of its process it does nothing.

        Raises:
            RuntimeError: a step of this engine is running; nothing has changed.
        """
        if self._guard.home.is_here:
            self._close()

    @exclusive
    @defer_sigint()
    def _close(self) -> None:
        self._guard.refuse_inside_step("close")
        self.weights.leave()
        self.offload.close()
        self._steps.close()
        self._epochs.start_over()
        self.live.close()
        self.memory.keep(None)
        self._cache_calls.release_memory()
        self.adapters.close()
        self._guard.is_closed = True
        self._control.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    # Inspection

    @exclusive
    def explain(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        adapter: str | None = None,
    ) -> Explanation:
        """Explain, for `print`, which tokens of a prompt would be reused now, and why not more. It
        is for operators, not for tenants, as it shows whether another salt knows the prompt.

        params: as for `add_request`. `add_BOS` adds a token to text, and with log-probs of the
        prompt all of it is computed.

        Raises:
            TypeError, ValueError: `add_request` would refuse this prompt, parameters, salt or
                adapter.
        """
        builder = self.request_builder
        loaded = builder.adapter_of(RequestOptions(salt=salt, adapter=adapter))
        salt = salt if loaded is None else loaded.salt + salt
        params = builder.check_params(params)
        tokens = builder.tokens_of(prompt, params)
        chunk = self.cache.longest_forward(len(tokens), self.config.max_tokens)
        return self.offload.explain(tokens, salt, recompute_reason(params), chunk)

    @exclusive
    def promises(self) -> dict[str, list[str]]:
        """List the reasons why logits may differ in their last bits with this configuration.

        Returns:
            "serving": reasons in how a sequence is cut, resumed, drafted or decoded, or in other
            requests; "training": reasons why they may differ from `model(tokens)`, too. An empty
            list is the promise that they do not."""
        return promises_of(self.model, self.config, self.memory.device)

    @exclusive
    def stats(self) -> Stats:
        """Return counters since the start, and present sizes. `print` shows them in groups."""
        return stats_of(self._parts, self.live, self._steps)

    @exclusive
    def requests(self, num_tokens: int = 0) -> list[RequestView]:
        """List the requests that run, those that wait, and the last ones that ended, each group in
        its order, with the last `num_tokens` tokens of each prompt. For operators, as `explain`."""
        check_field("num_tokens", num_tokens, int)
        live = (*self.scheduler.running, *self.scheduler.waiting)
        return self.live.ended.views(live, self.cache.contents.edge_number, num_tokens)

    @exclusive
    def cache_tree(self, max_edges: int = 10_000, num_tokens: int = 0) -> list[EdgeView]:
        """List the edges of the tree of cached prefixes, parents first, with the first `num_tokens`
        tokens of each and where each state is. If there are more than `max_edges`, those used last
        are listed. For operators, as `explain`."""
        check_field("max_edges", max_edges, int)
        edges = self.cache_changes(num_tokens=num_tokens).edges
        return sorted(edges, key=lambda edge: (-edge.last_use, edge.start))[:max_edges]

    @exclusive
    def cache_changes(
        self, since: Version | None = None, limit: int | None = None, num_tokens: int = 0
    ) -> TreeChanges:
        """Return what has changed in the tree of cached prefixes since an earlier answer's
        `version`, or all of it, with at most `limit` edges and the first `num_tokens` tokens of
        each."""
        check_field("limit", limit, Annotated[int, Range(ge=1)] | None)
        check_field("num_tokens", num_tokens, int)
        return self.cache.contents.changes(since, limit, self.offload.tier_of, num_tokens)

    @exclusive
    def metrics(self) -> str:
        """Return `stats`, and times as histograms, in the text format of Prometheus; see
        `inference/metrics/prometheus.py`."""
        return metrics_of(self.stats(), self.config, self.live.meter)

    @exclusive
    def check_integrity(self) -> None:
        """Raise RuntimeError if an invariant of cache or scheduler is broken."""
        self.cache.check_integrity()
        self.scheduler.check_integrity()
