"""What an engine holds and does, as plain data. Nothing here changes it."""

import os
from collections.abc import Iterator

import torch
from torch import nn

from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine_parts import EngineParts
from megatron_hybrid.inference.live_requests import LiveRequests
from megatron_hybrid.inference.metrics.meter import Meter
from megatron_hybrid.inference.metrics.prometheus import Stats, prometheus_text, requests_text
from megatron_hybrid.inference.step_loop import StepLoop
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.layer_specs import get_mixer
from megatron_hybrid.models.mixers.base import Mixer
from megatron_hybrid.ops import linear

_ROW_COUNTS = 1, 2, 3, 4, 5, 8, 16, 40, 64, 256
"""Rows of the products that `promises_of` tries."""


def stats_of(parts: EngineParts, live: LiveRequests, steps: StepLoop) -> Stats:
    """Return counters since the start, and present sizes."""
    scheduler, spec = parts.scheduler, parts.cache.spec
    memory, num_pages = parts.runner.memory, parts.cache.allocator.num_pages - 1
    cached = parts.cache.stats()
    tables = [request.lease.block_table for request in scheduler.running]
    blocks = {page for table in tables for page in table[:, :1].flat}
    counts = {
        "hit_rate": cached["skipped_tokens"] / max(1, cached["prompt_tokens"]),
        **cached,
        "steps": steps.num_steps,
        "steps_ahead": steps.num_ahead,
        "forward_tokens": scheduler.num_forward_tokens,
        "prefill_tokens": scheduler.num_prefill_tokens,
        "generation_tokens": live.meter.num_generated,
        **scheduler.draft_planner.counts(scheduler.running),
        "preemptions": scheduler.num_preemptions,
        "step_failures": scheduler.num_failures,
        "request_restarts": scheduler.num_restarts,
        "weight_changes": parts.output.epoch,
        "requests_running": len(scheduler.running),
        "requests_waiting": len(scheduler.waiting),
        "peak_pages_in_use": steps.peak_pages_in_use,
        "pool_bytes": memory.pool.numel(),
        "pool_tokens": spec.tokens_in(num_pages),
        "pool_states": spec.states_in(num_pages),
        "kv_blocks_in_use": len(blocks),
        "live_slot_bytes": memory.slots.numel(),
        **parts.runner.graph_counts(),
        "warm_up_ms": round(parts.warm_up_seconds * 1000),
        **parts.offload.counters(),
        "parked_bytes": parts.runner.parked_bytes,
        "rank_bytes": parts.ranks.sent_bytes,
    }
    return Stats(counts)


def metrics_of(stats: Stats, config: InferenceConfig, meter: Meter) -> str:
    """Format all metrics as Prometheus's text."""
    info = {
        "block_size": config.block_size_tokens,
        "cache_bytes": config.cache_bytes,
        "cache_dtype": str(config.kv_cache_dtype or "auto").removeprefix("torch."),
        "enable_prefix_caching": config.prefix_caching != "off",
        "gpu_memory_utilization": config.memory_fraction,
        "num_gpu_blocks": stats["pool_tokens"] // config.block_size_tokens,
        "prefix_caching": config.prefix_caching,
        "state_encoding": config.state_encoding,
    }
    return prometheus_text(stats, meter.histograms) + requests_text(meter.num_ended, info)


def promises_of(
    model: HybridModel, config: InferenceConfig, device: torch.device
) -> dict[str, list[str]]:
    """List why logits may differ in their last bits, see `DynamicInferenceEngine.promises`."""
    mixers = [each for each in model.decoder.modules() if isinstance(each, Mixer)]
    serving, training = reasons_of_config(model.config)
    serving += [reason for mixer in mixers for reason in mixer.cut_reasons()]
    training += [reason for mixer in mixers for reason in mixer.training_reasons()]
    serving += _unequal_products(model) if device.type == "cpu" else [f"it runs on {device}"]
    if (mode := os.environ.get("MKL_CBWR", "")).startswith("COMPATIBLE"):
        serving.append(f"MKL_CBWR is {mode!r}: attention's products depend on their rows")
    kept = model.cache_requirements()
    is_rounded = any(state.decay is not None for each in kept for state in each.states)
    if is_rounded and config.prefix_caching == "restore" and config.state_encoding != "exact":
        serving.append(f"state_encoding is {config.state_encoding!r}: saved states are rounded")
    has_keys = any(each.kv is not None for each in kept)
    if config.kv_cache_dtype not in (None, model.config.params_dtype) and has_keys:
        training.append(f"kv_cache_dtype is {config.kv_cache_dtype}")
    return {"serving": [*dict.fromkeys(serving)], "training": [*dict.fromkeys(training)]}


def reasons_of_config(config: HybridConfig) -> tuple[list[str], list[str]]:
    """Return why bits may differ in serving and in training: sums of ranks, and hidden dropout."""
    tp = config.tensor_model_parallel_size
    has_experts = any(get_mixer(symbol).has_experts for symbol in config.symbols)
    ep = config.expert_model_parallel_size if has_experts else 1
    added, training = tp * ep if tp > 1 else 1, []
    if ep > 1 and config.params_dtype != torch.float32:
        training.append(f"expert_model_parallel_size is {ep}: a trainer rounds experts' sums apart")
    if config.hidden_dropout:
        training.append(f"hidden_dropout is {config.hidden_dropout}, in training alone")
    serving = [f"{added} ranks add up a row, in an order that depends on its place"]
    return serving if added > 2 else [], training


@torch.inference_mode()
def _unequal_products(model: nn.Module) -> Iterator[str]:
    """Try one weight of each shape, and yield those whose rows have other bits among few rows."""
    weights = {(each.shape[-2:], each.dtype): each for each in model.parameters() if each.dim() > 1}
    for (shape, dtype), weight in weights.items():
        if min(shape) < 2 or not weight.is_floating_point():
            continue
        weight = weight.reshape(-1, *shape)[0]
        rows = torch.Generator().manual_seed(0)
        x = torch.randn(_ROW_COUNTS[-1], shape[1], generator=rows).to(dtype)
        whole = linear(x, weight)
        if not all(torch.equal(linear(x[:n], weight), whole[:n]) for n in _ROW_COUNTS):
            yield f"products of {shape[1]} x {shape[0]} in {dtype} depend on their number of rows"
