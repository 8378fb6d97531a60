"""Inspection: what an engine holds and does, as plain data. Nothing here changes it."""

import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn

from megatron_hybrid.cache.explain import Explanation
from megatron_hybrid.cache.index.journal import Version
from megatron_hybrid.cache.listener import CacheListener
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.tree_view import EdgeView, TreeChanges
from megatron_hybrid.inference.engine_parts import EngineParts
from megatron_hybrid.inference.exclusive import exclusive
from megatron_hybrid.inference.live_requests import LiveRequests
from megatron_hybrid.inference.metrics.prometheus import Stats, prometheus_text, requests_text
from megatron_hybrid.inference.requests.builder import Prompt
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.request import recompute_reason
from megatron_hybrid.inference.requests.view import RequestView
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.step_loop import StepLoop
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_specs import get_mixer
from megatron_hybrid.models.mixers.base import Mixer
from megatron_hybrid.ops import linear

Listener = TypeVar("Listener", bound=CacheListener)

_ROW_COUNTS = 1, 2, 3, 4, 5, 8, 16, 40, 64, 256
"""Rows of the products that `promises` tries."""


class Inspection:
    """Looks at an engine. Methods with the name of one of the engine's have its effect.

    Args:
        parts, live, steps: of the engine.
    """

    def __init__(self, parts: EngineParts, live: LiveRequests, steps: StepLoop):
        self._parts, self._live, self._steps = parts, live, steps
        self._guard = parts.guard

    @exclusive
    def explain(
        self, prompt: Prompt, params: SamplingParams | None, salt: str, adapter: str | None
    ) -> Explanation:
        parts, builder = self._parts, self._parts.request_builder
        loaded = builder.adapter_of(RequestOptions(salt=salt, adapter=adapter))
        salt = salt if loaded is None else loaded.salt + salt
        params = builder.check_params(params)
        tokens = builder.tokens_of(prompt, params)
        chunk = parts.cache.longest_forward(len(tokens), parts.config.max_tokens)
        return parts.offload.explain(tokens, salt, recompute_reason(params), chunk)

    @exclusive
    def promises(self) -> dict[str, list[str]]:
        model, config = self._parts.model, self._parts.config
        mixers = [each for each in model.decoder.modules() if isinstance(each, Mixer)]
        serving, training = reasons_of_config(model.config)
        serving += [reason for mixer in mixers for reason in mixer.cut_reasons()]
        training += [reason for mixer in mixers for reason in mixer.training_reasons()]
        device = self._parts.runner.memory.device
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

    @exclusive
    def stats(self) -> Stats:
        parts, scheduler, spec = self._parts, self._parts.scheduler, self._parts.cache.spec
        memory, num_pages = parts.runner.memory, parts.cache.allocator.num_pages - 1
        cached = parts.cache.stats()
        tables = [request.lease.block_table for request in scheduler.running]
        blocks = {page for table in tables for page in table[:, :1].flat}
        counts = {
            "hit_rate": cached["skipped_tokens"] / max(1, cached["prompt_tokens"]),
            **cached,
            "steps": self._steps.num_steps,
            "steps_ahead": self._steps.num_ahead,
            "forward_tokens": scheduler.num_forward_tokens,
            "prefill_tokens": scheduler.num_prefill_tokens,
            "generation_tokens": self._live.meter.num_generated,
            **scheduler.draft_planner.counts(scheduler.running),
            "preemptions": scheduler.num_preemptions,
            "step_failures": scheduler.num_failures,
            "request_restarts": scheduler.num_restarts,
            "weight_changes": parts.output.epoch,
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "peak_pages_in_use": self._steps.peak_pages_in_use,
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

    @exclusive
    def requests(self, num_tokens: int = 0) -> list[RequestView]:
        parts = self._parts
        live = (*parts.scheduler.running, *parts.scheduler.waiting)
        return self._live.ended.views(live, parts.cache.contents.edge_number, num_tokens)

    @exclusive
    def cache_tree(self, max_edges: int = 10_000, num_tokens: int = 0) -> list[EdgeView]:
        edges = self.cache_changes(num_tokens=num_tokens).edges
        return sorted(edges, key=lambda edge: (-edge.last_use, edge.start))[:max_edges]

    @exclusive
    def cache_changes(
        self, since: Version | None = None, limit: int | None = None, num_tokens: int = 0
    ) -> TreeChanges:
        tier_of = self._parts.offload.tier_of
        return self._parts.cache.contents.changes(since, limit, tier_of, num_tokens)

    @exclusive
    def watch_cache(self, make: Callable[[PrefixCache], Listener]) -> Listener:
        """Make a listener of the cache, and let it follow from now on what is cached and evicted
        on this rank. Call it before the first request: what is cached is not reported."""
        listener = make(self._parts.cache)
        self._parts.cache.watch(listener)
        return listener

    @exclusive
    def histograms(self) -> dict[str, tuple[list[int], list[float]]]:
        """Counts of times, by the names of `prometheus.HISTOGRAMS`: up to each of `meter.BOUNDS`,
        in seconds, and beyond; and the longest of each."""
        measured = self._live.meter.histograms.items()
        return {name: (list(each.counts), list(each.longest)) for name, each in measured}

    @exclusive
    def metrics(self) -> str:
        config, meter, stats = self._parts.config, self._live.meter, self.stats()
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

    @exclusive
    def check_integrity(self) -> None:
        self._parts.cache.check_integrity()
        self._parts.scheduler.check_integrity()


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
    """Try one weight of each shape: does a row have the same bits among few rows and many?"""
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
