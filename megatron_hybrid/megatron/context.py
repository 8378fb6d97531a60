"""Megatron's DynamicInferenceContext: a config, and a view of the engine once one uses it."""

from dataclasses import dataclass
from typing import Any

from megatron_hybrid.cache.report import PrefixReport
from megatron_hybrid.inference.engine import DynamicInferenceEngine as Engine
from megatron_hybrid.megatron.config import DEFAULT_MAX_TOKENS, InferenceConfig, check


@dataclass(frozen=True)
class BlockCounts:
    """Sizes of the pool, in KV blocks."""

    pool_size: int
    """All blocks, one of which is a dummy, as in Megatron."""
    active_count: int
    """Blocks that requests may use."""
    total_avail: int
    """Blocks that no running request uses: free ones, and cached ones that can be evicted."""


class DynamicInferenceContext:
    """Settings that `DynamicInferenceEngine` is built from; afterwards, its sizes and counters.

    Args:
        model_config: that of the model that will be served.
        inference_config: ours, or megatron-core's own.

    Raises:
        TypeError, ValueError: the settings are not supported; the message names the field.
    """

    async_sched_step_count = 0
    async_sched_compaction_step_count = 0
    cuda_graph_batch_dimensions_list: tuple = ()

    def __init__(self, model_config: Any, inference_config: InferenceConfig):
        self.config = InferenceConfig.of(inference_config)
        check(self.config)
        self.block_size_tokens = self.config.block_size_tokens
        self.enable_prefix_caching = self.config.enable_prefix_caching
        self.max_sequence_length = self.config.max_sequence_length
        self.max_tokens = self.config.max_tokens or DEFAULT_MAX_TOKENS
        self.unified_memory_level = self.config.unified_memory_level
        self.model_config = model_config
        self._engine: Engine | None = None
        self.reset_counters()

    def bind(self, engine: Engine) -> None:
        """Show this engine from now on.

        Raises:
            ValueError: the context already shows an engine.
        """
        if self._engine is not None:
            raise ValueError(
                "this DynamicInferenceContext belongs to another engine, which has its own memory: "
                "make one for each engine"
            )
        self._engine = engine
        self.reset_counters()

    def reset(
        self, preserve_prefix_cache: bool = False, *, preserve_counters: bool = False
    ) -> None:
        """Drop the cache, and start the counters anew; `engine.reset()` drops requests, too.

        Raises:
            RuntimeError: there are unfinished requests, or no engine yet.
        """
        engine = self._bound("reset()")
        if engine.has_work:
            raise RuntimeError("context.reset() drops no requests: call engine.reset()")
        if not preserve_prefix_cache:
            engine.clear_cache()
        if not preserve_counters:
            self.reset_counters()

    def count_admission(self, report: PrefixReport) -> None:
        """Count the tokens that an admitted request found in the cache."""
        self.prefix_cache_hits += report.shared_tokens > 0
        self.prefix_cache_blocks_matched += report.shared_tokens // self.block_size_tokens
        self.prefix_cache_prefill_skipped_tokens += report.skipped_tokens

    def reset_counters(self) -> None:
        """Count steps and tokens from now on."""
        self.prefix_cache_hits = 0
        self.prefix_cache_blocks_matched = 0
        self.prefix_cache_prefill_skipped_tokens = 0
        engine = self._engine
        self._first_step = 0 if engine is None else engine.num_steps
        self._first_token = 0 if engine is None else engine.scheduler.num_prefill_tokens

    def _bound(self, name: str) -> Engine:
        if self._engine is None:
            raise RuntimeError(
                f"context.{name} follows from the model: read it after "
                "DynamicInferenceEngine(controller, context)"
            )
        return self._engine

    @property
    def max_requests(self) -> int:
        return self._bound("max_requests").config.max_requests

    @property
    def step_count(self) -> int:
        """Steps since the start, or the last reset of the counters."""
        return self._bound("step_count").num_steps - self._first_step

    @property
    def lifetime_prefill_token_count(self) -> int:
        """Tokens that prefills computed since the start, or the last reset of the counters, without
        those that the cache saved."""
        engine = self._bound("lifetime_prefill_token_count")
        return engine.scheduler.num_prefill_tokens - self._first_token

    prefix_cache_prefill_computed_tokens = lifetime_prefill_token_count

    @property
    def is_tensor_state_allocated(self) -> bool:
        """Whether the pool has its device memory."""
        return self._engine is not None and not self._engine.is_suspended

    @property
    def kv_block_allocator(self) -> BlockCounts:
        cache = self._bound("kv_block_allocator").cache
        pages, columns = cache.allocator, max(1, cache.spec.kv_pages_per_block)
        blocks = (pages.num_pages - 1) // columns
        return BlockCounts(blocks + 1, blocks, (pages.num_free + pages.num_evictable) // columns)
