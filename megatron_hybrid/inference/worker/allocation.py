"""What a new engine allocates: sizes that all ranks agree on, and the pool in the memory that is
left."""

import logging
from dataclasses import dataclass, replace

import torch

from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.distributed.ranks import Ranks
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.memory.budget import Part, has_room, pool_pages, step_bytes
from megatron_hybrid.inference.memory.cache_pool import (
    CachePool,
    agree_on_spec,
    cache_spec_of,
    full_bytes,
)
from megatron_hybrid.inference.scheduling.scheduler import max_captures
from megatron_hybrid.inference.worker.context import (
    DynamicInferenceContext,
    input_bytes,
    input_fields,
)
from megatron_hybrid.inference.worker.graph_runner import graph_sizes, planned_bytes, refusal
from megatron_hybrid.inference.worker.mtp_drafter import cached_layers, require_mtp
from megatron_hybrid.inference.worker.warm_up import measured_step_bytes
from megatron_hybrid.models.flops import token_flops
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.offload.offload import check_capacities
from megatron_hybrid.ops.linear import can_reorder
from megatron_hybrid.ops.ragged import row_alignment

logger = logging.getLogger(__name__)
LIVE_SLOTS = "live slots"


@dataclass(frozen=True)
class Needs:
    """What an engine asks for besides weights, pool and the largest step."""

    num_drafts: int
    """Most drafts of a request in a step."""
    num_captures: int
    """Most states captured inside a forward, those before drafts among them."""
    num_slots: int
    graph_sizes: dict[int, list[int]] | None
    """Numbers of decodes that have a CUDA graph, if there are graphs."""
    has_copies: bool
    """Whether there is room for copies of weights (`reordered_weight`)."""
    parts: list[Part]


def needs_of(
    model: HybridModel, spec: CacheSpec, config: InferenceConfig, device: torch.device
) -> Needs:
    """Sum up what an engine asks for on a device. "meta" stands for any device but a CPU."""
    sizes = config.max_requests, config.max_tokens, config.max_sequence_length
    longest = min(config.num_speculative_tokens, config.max_sequence_length - 1)
    drafts = longest if config.speculation != "off" else 0
    # A state before each draft, besides those to save.
    captures = max_captures(spec, *sizes[:2]) + drafts * config.max_requests
    # For rows of no request: they fill up a graph, or have ended in the step before.
    num_fillers = int(config.cuda_graphs or config.async_scheduling)
    on_host, on_device = input_bytes(input_fields(spec, *sizes, captures, drafts), device)
    lengths, graphed = "max_sequence_length or max_requests", None
    parts = [
        Part(config.max_requests * spec.slot_bytes, LIVE_SLOTS, "max_requests"),
        Part(num_fillers * spec.slot_bytes, "a slot of no request", "max_requests"),
        Part(on_device, "inputs of a step", lengths),
        Part(on_host, "copies of them", lengths, on_host=True),
        Part(config.host_cache_bytes, "the host tier", "host_cache_bytes", on_host=True),
    ]
    if config.cuda_graphs:
        graphed = graph_sizes(*sizes[:2], drafts)
        asked = planned_bytes(model, spec, graphed, *sizes[1:])
        parts.append(Part(asked, "CUDA graphs", "max_requests, or turn cuda_graphs off"))
    # At most: an embedding that is not the output layer, too, is not multiplied.
    copies = sum(p.nbytes for p in model.parameters() if p.dim() == 2 and can_reorder(p))
    if has_copies := not config.cuda_graphs and copies > 0 and has_room(copies, device):
        parts.append(Part(copies, "weights in the layout of products", "cache_bytes"))
    return Needs(drafts, captures, config.max_requests + num_fillers, graphed, has_copies, parts)


def allocate(
    model: HybridModel, config: InferenceConfig, ranks: Ranks
) -> tuple[DynamicInferenceContext, InferenceConfig, Needs]:
    """Allocate what an engine needs. Call it on all ranks of the model.

    Returns:
        The context, whose `memory` has the pool and the live slots; the config, with the
        `cache_bytes` of the pool; and the needs that all of it was made for.

    Raises:
        ValueError: the model cannot draft as `config` asks for, or a size is too small.
        MemoryError: a device, or a host, has no room for what `config` asks for.
    """
    parameter = next(model.parameters())
    dtype, device = config.kv_cache_dtype or parameter.dtype, parameter.device
    uses_mtp = config.speculation == "mtp"
    if uses_mtp:
        require_mtp(model)
    layers, model_layers = cached_layers(model, config), model.cache_requirements()
    spec = _agreed_spec(model, config, dtype, ranks)
    sizes = config.max_requests, config.max_tokens, config.max_sequence_length
    has_graphs = config.cuda_graphs
    if has_graphs and (reason := refusal(model, device)) is not None:
        has_graphs = False
        if ranks.is_first:
            logger.warning("decodes run without CUDA graphs: %s", reason)
    needs = needs_of(model, spec, replace(config, cuda_graphs=has_graphs), device)
    captures = needs.num_captures
    alignment = row_alignment(device, splits_rows=model.config.sequence_parallel)

    def new_context(num_pages: int) -> DynamicInferenceContext:
        memory = CachePool(
            spec,
            layers,
            model.config.hidden_size,
            dtype,
            num_pages,
            needs.num_slots,
            device,
            config.state_encoding,
            hidden_dtype=parameter.dtype,
        )
        before_mtp = len(model_layers) if uses_mtp else None
        more = before_mtp, config.max_adapters > 0, alignment
        return DynamicInferenceContext(memory, *sizes, captures, needs.num_drafts, *more)

    step = 0
    if config.cache_bytes is None and device.type == "cuda":
        least = replace(config, cache_bytes=2 * spec.page_bytes)
        num_pages = pool_pages(least, device, spec.page_bytes, step, needs.parts, ranks)
        with ranks.raise_on_all(f"a step of max_tokens={config.max_tokens}"):
            context = new_context(num_pages)
            step = measured_step_bytes(model, context, captures, config.max_tokens, ranks)
            del context
    elif config.cache_bytes is None:
        step = step_bytes(model, spec, captures, *sizes)
    num_pages = pool_pages(config, device, spec.page_bytes, step, needs.parts, ranks)
    if config.cache_bytes is None:
        config = replace(config, cache_bytes=num_pages * spec.page_bytes)
    on_disk = None if config.cache_dir is None else config.disk_cache_bytes
    check_capacities(spec, config.host_cache_bytes, on_disk)
    context = new_context(num_pages)
    if ranks.is_first:
        logger.info(
            "the pool of %.2f GiB on %s holds %d tokens, or %d states",
            context.memory.pool.numel() / 2**30,
            device,
            spec.tokens_in(num_pages - 1),
            spec.states_in(num_pages - 1),
        )
    return context, config, needs


def _agreed_spec(
    model: HybridModel, config: InferenceConfig, dtype: torch.dtype, ranks: Ranks
) -> CacheSpec:
    """Return the cache spec, the same on all ranks. It includes the MTP head if that drafts."""
    model_layers = model.cache_requirements()
    own, of_model = (
        cache_spec_of(
            layers,
            model.config.hidden_size,
            dtype,
            config.block_size_tokens,
            config.state_encoding,
            hidden_dtype=next(model.parameters()).dtype,
        )
        for layers in (cached_layers(model, config), model_layers)
    )
    full = full_bytes(model_layers, of_model, dtype)
    stage = model.pg_collection.pp.rank()
    spec = agree_on_spec(own, full, *token_flops(model), ranks, stage)
    if config.speculation == "mtp":
        # States are saved at the positions at which they are without drafts.
        interval_bytes = of_model.interval_bytes if spec.model_bytes is None else spec.model_bytes
        spec = replace(spec, model_bytes=interval_bytes)
    return spec
