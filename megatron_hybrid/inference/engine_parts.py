"""EngineParts: what an engine is made of, and how it is made."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn

from megatron_hybrid.cache.policy.protocol import POLICIES
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.distributed.rank_control import RankControl
from megatron_hybrid.distributed.ranks import Ranks
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.drafters import DRAFTERS, Drafts, DraftSources
from megatron_hybrid.inference.exclusive import CallGuard
from megatron_hybrid.inference.metrics.tracing import RequestTracer
from megatron_hybrid.inference.rank_checks import (
    check_equal_weights,
    refuse_fsdp,
    what_must_be_equal,
)
from megatron_hybrid.inference.requests.builder import RequestBuilder, TextTokenizer
from megatron_hybrid.inference.requests.output import OutputProcessor
from megatron_hybrid.inference.scheduling.scheduler import Scheduler
from megatron_hybrid.inference.weight_epochs import Epochs
from megatron_hybrid.inference.weights.fingerprint import open_folder
from megatron_hybrid.inference.worker.adapter_bank import AdapterBank
from megatron_hybrid.inference.worker.allocation import allocate
from megatron_hybrid.inference.worker.graph_runner import GraphRunner, prompt_sizes
from megatron_hybrid.inference.worker.model_runner import ModelRunner
from megatron_hybrid.inference.worker.warm_up import WARMED, measure_draft_costs, warm_up
from megatron_hybrid.models.hybrid_model import NO_MEMORY, HybridModel, unwrap
from megatron_hybrid.offload.offload import Offload
from megatron_hybrid.offload.page_mover import PageMover


@dataclass(frozen=True)
class EngineParts:
    """The parts that an engine's jobs work on."""

    guard: CallGuard
    ranks: Ranks
    control: RankControl
    config: InferenceConfig
    """The config, with the `cache_bytes` of the pool."""
    model: HybridModel
    cache: PrefixCache
    offload: Offload
    runner: ModelRunner
    """Has the context, and the memory of pool and live slots."""
    adapters: AdapterBank
    scheduler: Scheduler
    request_builder: RequestBuilder
    output: OutputProcessor
    epochs: Epochs
    tracer: RequestTracer | None
    warm_up_seconds: float


def check_arguments(
    given: nn.Module | Sequence[nn.Module], tokenizer: TextTokenizer | None, config: InferenceConfig
) -> HybridModel:
    if not isinstance(config, InferenceConfig):
        raise TypeError(f"config must be an InferenceConfig, got {type(config).__name__}")
    model = unwrap(given)
    if not isinstance(model, HybridModel):
        raise TypeError(
            f"model must be one of build_hybrid_model, load_pretrained, load_megatron or "
            f"from_megatron, bare or wrapped, got {type(given).__name__}"
        )
    if not model.has_memory:
        raise ValueError(NO_MEMORY)
    refuse_fsdp(given, model)
    if tokenizer is not None and not callable(getattr(tokenizer, "detokenize", None)):
        raise TypeError(
            f"tokenizer must be that of load_pretrained or one like it, with tokenize() and "
            f"detokenize(), or None; got {type(tokenizer).__name__}"
        )
    return model


def make_parts(
    model: HybridModel,
    tokenizer: TextTokenizer | None,
    config: InferenceConfig,
    ranks: Ranks,
    control: RankControl,
    undo: ExitStack,
) -> EngineParts:
    """Agree with the other ranks on sizes, and make the parts, which `undo` closes."""
    stage, tracer = model.pg_collection.pp.rank(), None
    if config.otlp_traces_endpoint and ranks.is_first:
        tracer = RequestTracer(config.otlp_traces_endpoint)
        undo.callback(tracer.close)
    ranks.require_equal(what_must_be_equal(config, model, stage))
    check_equal_weights(ranks, model)
    model.eval()
    adapters = AdapterBank(model, config, ranks)
    undo.callback(adapters.close)
    context, config, needs = allocate(model, config, ranks)
    memory = context.memory
    policy = POLICIES[config.cache_policy](memory.spec)
    cache = PrefixCache(memory.spec, len(memory.pool), config.prefix_caching, policy)
    disk = None
    if config.cache_dir is not None:
        disk = open_folder(config.cache_dir, ranks.name, model, memory.spec, config)
        undo.callback(disk.close)  # else the folder stays locked
    offload = Offload(
        cache, PageMover(memory.pool), config.host_cache_bytes, disk, config.disk_cache_bytes, ranks
    )
    graphs = None
    if (numbers := needs.graph_sizes) is not None:
        in_pieces = prompt_sizes(config.max_tokens, config.max_sequence_length)
        graphs = GraphRunner(model, context, numbers, in_pieces, ranks)
    runner = ModelRunner(
        model,
        context,
        offload.fetches.load,
        config.logprobs_mode,
        ranks,
        graphs,
        adapters,
        needs.has_copies,
    )
    scheduler = Scheduler(
        cache,
        offload.fetches,
        config.max_requests,
        config.max_tokens,
        config.short_prompt_share,
        _drafts(cache, runner, config),
        drafts_need_hidden=config.speculation == "mtp",
    )
    output = OutputProcessor(tokenizer)
    return EngineParts(
        CallGuard(),
        ranks,
        control,
        config,
        model,
        cache,
        offload,
        runner,
        adapters,
        scheduler,
        RequestBuilder(config, cache, tokenizer, model.config.vocab_size, adapters.require),
        output,
        Epochs(scheduler, offload, runner, output, config),
        tracer,
        _warm_up(runner, scheduler, config, control),
    )


def _drafts(cache: PrefixCache, runner: ModelRunner, config: InferenceConfig) -> Drafts | None:
    model, most, is_many = runner.model, runner.context.max_drafts, runner.ranks.size > 1
    if not most:
        return None
    drafter = DRAFTERS[config.speculation](DraftSources(cache, model, runner.predict))
    return Drafts(drafter, most, model.config.vocab_size, is_many)


def _warm_up(
    runner: ModelRunner, scheduler: Scheduler, config: InferenceConfig, control: RankControl
) -> float:
    """Run first steps, if `config` asks for them, and capture graphs. Return the seconds that the
    first steps took."""
    seconds = 0.0
    try:
        if config.warm_up and runner.memory.device.type in WARMED:
            seconds = warm_up(runner, config.max_tokens, config.prefix_caching == "restore")
        runner.capture_graphs()
        if config.warm_up and runner.context.max_drafts:
            scheduler.draft_planner.costs = measure_draft_costs(runner, config.max_tokens)
    except BaseException as error:
        control.report(error)  # other ranks may be in the same forward
        raise
    return seconds
