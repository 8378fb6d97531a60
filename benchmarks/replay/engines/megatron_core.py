"""megatron-core's own DynamicInferenceContext (0.19): its bookkeeping without model and device.

Import this module only where megatron-core has `mamba_slot_allocator`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from megatron.core.inference.config import PrefixCachingEvictionPolicy
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
from megatron.core.inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from megatron.core.inference.inference_request import compute_block_hashes_batched

from benchmarks.replay.geometry import Geometry

BLOCK_TOKENS = 256
"""Its default; a state is kept at no smaller one."""
SSM_CHUNK_TOKENS = 128
STATE_SHARES = (0.25, 0.5, 0.75)
"""Parts of the budget that are set aside for states (`prefix_caching_mamba_gb`)."""
MAX_LENGTH = 1 << 18


@dataclass(eq=False)
class Running:
    skipped_tokens: int
    blocks: torch.Tensor | None
    """int32 [M]; None: it does not fit into the pool even when it is alone."""


class MegatronCore:
    """Its allocators, `add_request` and the commit after a forward, on a context that was never
    given a model: tensors of states have no elements. Prompts run in one chunk, LRU eviction.
    """

    def __init__(self, geometry: Geometry, budget_bytes: float, state_share: float):
        if not geometry.state_layers:
            state_share = 0.0
        layers = geometry.attention_layers + geometry.window_layers  # windows keep all of their KV
        block_bytes = BLOCK_TOKENS * layers * geometry.kv_bytes_per_layer
        kv_blocks = int(budget_bytes * (1 - state_share) // block_bytes)
        self._context = make_context(kv_blocks + 1)  # it keeps a block for padding
        if state_share:
            slots = max(1, int(budget_bytes * state_share // geometry.recurrent_bytes()))
            add_state_slots(self._context, slots)
        self._allocator = self._context.kv_block_allocator
        self._running = 0

    def prepare(self, tokens: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(tokens.astype(np.int64))

    def begin(self, tokens: torch.Tensor, message_starts: Sequence[int] = ()) -> Running | None:
        context = self._context
        request = SimpleNamespace(
            request_id=0,
            prompt_tokens=tokens,
            remaining_prompt_tokens=tokens,
            remaining_prompt_length=len(tokens),
            finished_chunk_token_count=0,
            precomputed_block_hashes=compute_block_hashes_batched(tokens, BLOCK_TOKENS),
            num_cached_tokens=0,
            sampling_params=SimpleNamespace(num_tokens_to_generate=1),
            tracked_metadata=[],
            get_metadata_types=list,
        )
        if not context.check_availability(request)[2]:
            return None if self._running else Running(0, None)
        before = context.prefix_cache_prefill_skipped_tokens
        context.add_request(request)
        context._pending_mamba_restores.clear()
        context._pending_mamba_zeros.clear()
        skipped = context.prefix_cache_prefill_skipped_tokens - before
        row = context.request_to_kv_block_ids[0]
        blocks = row[: int(context.request_kv_block_counts[0])].clone()
        if context.mamba_slot_allocator is not None:
            self._commit()
        context.prefix_cache_lru_clock += 1
        row.fill_(-1)  # the row of a context serves one request after the other
        context.total_request_count = context.active_token_count = 0
        self._running += 1
        return Running(skipped, blocks)

    def _commit(self) -> None:
        """Do what follows the forward of a prefill. Where running requests hold all slots it
        raises, which would end the engine; here the request goes on and its states are not
        saved."""
        slots = self._context.mamba_slot_allocator
        counts = slots._intermediate_counts_cpu[:1].tolist()
        self._context.mamba_metadata.intermediate_count = sum(counts)
        self._context.mamba_metadata.per_request_intermediate_counts = counts
        free = slots.free_count
        try:
            slots.commit_intermediate_states()
        except RuntimeError:
            slots.free_count = free
            slots._clear_intermediate_state()

    def finish(self, handle: Running, tokens: torch.Tensor) -> None:
        blocks = handle.blocks
        if blocks is None:
            return
        self._running -= 1
        missing = -(-len(tokens) // BLOCK_TOKENS) - len(blocks)
        if missing > 0:  # blocks of answers are never found again
            more = self._allocator.allocate_memory_blocks(missing)
            if more is not None:
                blocks = torch.cat([blocks, more])
        self._allocator.release_memory_blocks(blocks)


def make_context(num_blocks: int) -> DynamicInferenceContext:
    """A context with room for one row, its tensors on the CPU."""
    context = DynamicInferenceContext.__new__(DynamicInferenceContext)
    attributes = {
        "is_tensor_state_allocated": True,
        "enable_prefix_caching": True,
        "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU,
        "prefix_cache_lru_clock": 0,
        "prefix_cache_hits": 0,
        "prefix_cache_blocks_matched": 0,
        "prefix_cache_prefill_computed_tokens": 0,
        "prefix_cache_prefill_skipped_tokens": 0,
        "lifetime_prefill_token_count": 0,
        "block_size_tokens": BLOCK_TOKENS,
        "mamba_chunk_size": SSM_CHUNK_TOKENS,
        "max_requests": 1,
        "max_tokens": MAX_LENGTH,
        "total_request_count": 0,
        "paused_request_count": 0,
        "num_prefill_requests": 0,
        "active_token_count": 0,
        "request_metadata_types": [],
        "request_metadata": {},
        "is_hybrid_model": False,
        "mamba_slot_allocator": None,
        "_pending_mamba_restores": [],
        "_pending_mamba_zeros": [],
        "request_to_kv_block_ids": torch.full((1, MAX_LENGTH // BLOCK_TOKENS), -1).int(),
    }
    for name in (
        "request_ids",
        "request_query_lengths",
        "request_in_prefill_status_tensor",
        "request_output_lengths",
        "request_kv_length_offsets",
        "request_kv_block_counts",
        "request_last_kv_block_id",
        "request_last_kv_block_offset",
    ):
        attributes[name] = torch.zeros(1, dtype=torch.int32)
    for name in (
        "token_to_pos_ids",
        "token_to_input_ids",
        "token_to_request_idx",
        "token_to_position_in_request",
        "token_to_block_idx",
        "token_to_local_position_within_kv_block",
    ):
        attributes[name] = torch.zeros(MAX_LENGTH, dtype=torch.int64)
    vars(context).update(attributes)
    context.kv_block_allocator = KVBlockAllocator(
        context,
        num_blocks,
        paused_count=0,
        enable_prefix_caching=True,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
    )
    return context


def add_state_slots(context: DynamicInferenceContext, slots: int) -> None:
    """Make a context one of a hybrid model with room for this many cached states."""
    context.is_hybrid_model = True
    context.max_mamba_intermediate_states_per_step = 3
    context.mamba_conv_states = context.mamba_ssm_states = torch.zeros(0, 1, 0)
    context.batch_dimensions = SimpleNamespace(prefill_req_count=1, decode_req_count=0)
    context.mamba_metadata = SimpleNamespace(
        allocate_slot=lambda: 0,
        request_to_mamba_state_idx=torch.zeros(1, dtype=torch.int32),
    )
    with mock.patch.object(torch.cuda, "current_device", return_value="cpu"):
        context.mamba_slot_allocator = MambaSlotAllocator(
            context, slots, 0, (0,), (0,), torch.float32, torch.float32
        )
    on_deregistered = context.mamba_slot_allocator.on_kv_blocks_deregistered
    context.kv_block_allocator.on_blocks_deregistered = on_deregistered
