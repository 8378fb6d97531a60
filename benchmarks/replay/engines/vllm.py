"""vLLM's KVCacheManager and the alignment rule of its scheduler, without its model runner.

Tried with vLLM 0.33, whose bookkeeping imports without a GPU. Import this module only where vLLM
is installed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import lcm
from types import SimpleNamespace

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from benchmarks.replay.geometry import Geometry
from megatron_hybrid.tools.replay.protocol import STEP_TOKENS, WINDOW_STEP_TOKENS, Attempts

BLOCK_TOKENS = 16
"""Its block size where no state forces a larger one, and the unit of that larger one."""
MAX_LENGTH = 1 << 20
CHECKPOINT_ALIGNMENTS: dict[str | None, tuple[int | None, ...]] = {
    None: (None,),
    "mamba-1": (None,),
    "mamba-2": (1,),
    "gdn": (None, 64),
}
"""By kind of state layer, what its layers declare to the scheduler: a kernel gives out a state
inside a forward at multiples of so many tokens. None: a forward has to end where a state is to be
kept. GDN has 64 with FlashInfer's prefill, the default on NVIDIA GPUs from Hopper on; the block is
then a multiple of 64 tokens."""


@dataclass(eq=False)
class Running:
    skipped_tokens: int
    request: Request | None
    """None: it does not fit into the pool even when it is alone."""


class Vllm:
    """One KVCacheManager, every block of which is one page of each layer of a group.

    A state of one layer has to fit into a page, so the block grows to as many tokens as a state
    has bytes ("align" mode). As with every engine here, one state of each running request comes on
    top of the budget; in between nothing is cached in these blocks. What a request came from stays
    as long as it runs, and takes a part of the budget, as all that is cached.

    Args:
        alignment: one of `CHECKPOINT_ALIGNMENTS` for the geometry.
        fine: its opt-in `prefix_match_unit`, here 16 tokens: what was saved at the end of a prompt
            is found in units of 16 tokens instead of whole blocks.
        junctions: its opt-in `enable_mamba_shared_prefix_checkpoint` in addition to `fine`: a state
            is also saved where a prompt leaves another one. vLLM has it only with the drafts of
            EAGLE or MTP; their memory, and the tokens that they compute again, are not counted.
    """

    def __init__(
        self,
        geometry: Geometry,
        budget_bytes: float,
        in_flight: int,
        alignment: int | None,
        fine: bool = False,
        junctions: bool = False,
    ):
        groups, layers, block = make_groups(geometry, alignment, junctions)
        block_bytes = layers * block * geometry.kv_bytes_per_layer
        states = sum(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
        # The null block; of each group the running states, and one that is given out inside a
        # forward (prompts are computed one after the other).
        inside = alignment is not None
        self._in_flight, self._request_blocks = in_flight, states
        extra = 1 + self._request_blocks * in_flight + states * inside
        config = KVCacheConfig(int(budget_bytes // block_bytes) + extra, [], groups)
        init_none_hash(sha256)
        unit = BLOCK_TOKENS if fine or junctions else block
        self._hasher = get_request_block_hasher(unit, sha256)
        self._manager = KVCacheManager(
            config,
            MAX_LENGTH,
            scheduler_block_size=block,
            hash_block_size=unit,
            enable_mamba_shared_prefix_checkpoint=junctions,
        )
        self._block = block
        self._aligned = states > 0
        self._scheduler = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=block),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            max_num_scheduled_tokens=WINDOW_STEP_TOKENS if geometry.window_layers else STEP_TOKENS,
            block_size=block,
            hash_block_size=unit,
            use_eagle_block_drop=False,
            num_hash_lookahead_tokens=0,
            mamba_partial_cache_hit=self._manager.coordinator.enable_partial_hash_hits,
            mamba_has_prefill_checkpoint_blocks=inside,
            mamba_prefill_checkpoint_alignment=alignment,
            mamba_shared_prefix_checkpoint=self._manager.mamba_shared_prefix_checkpoint,
        )
        self._params = SamplingParams(max_tokens=MAX_LENGTH)
        self._names = count()
        self._running = 0
        self._held_back: list[KVCacheBlock] = []
        self._attempts = Attempts()

    def prepare(self, tokens: np.ndarray) -> list[int]:
        # Here, since it is none of its own bookkeeping and must not be timed.
        self._hold_back(max(0, self._in_flight - self._running - 1))
        return tokens.tolist()

    def _hold_back(self, num_requests: int) -> None:
        """Keep out of the pool what so many more requests would take for their states."""
        pool, held = self._manager.block_pool, self._held_back
        more = num_requests * self._request_blocks - len(held)
        if more > 0:
            held += pool.get_new_blocks(min(more, pool.get_num_free_blocks()))
        elif more < 0:
            pool.free_blocks(held[more:])
            del held[more:]

    def begin(self, prompt: list[int], message_starts: Sequence[int] = ()) -> Running | None:
        request = Request(
            str(next(self._names)), prompt, self._params, None, block_hasher=self._hasher
        )
        manager = self._manager
        blocks, skipped, request.shared_prefix_boundary = manager.get_computed_blocks(request)
        computed = skipped
        while computed < len(prompt):
            tokens = min(self._scheduler.max_num_scheduled_tokens, len(prompt) - computed)
            first = request.num_computed_tokens == 0
            if self._aligned:
                tokens = Scheduler._mamba_block_aligned_split(
                    self._scheduler, request, tokens, skipped if first else 0
                )
            found = (skipped, blocks) if first else (0, None)
            if not self._step(request, tokens, *found):
                manager.free(request)
                self._attempts.refused(prompt, skipped)
                return None if self._running else Running(0, None)
            computed = request.num_computed_tokens
        self._running += 1
        return Running(self._attempts.admitted(prompt, skipped), request)

    def finish(self, handle: Running, tokens: list[int]) -> None:
        request = handle.request
        if request is None:
            return
        self._running -= 1
        request.append_output_token_ids(tokens[request.num_prompt_tokens :])
        while request.num_computed_tokens < len(tokens):
            # As many single decode steps as leave the block table as it is, in one.
            start = request.num_computed_tokens
            end = min(len(tokens), (start // self._block + 1) * self._block)
            if not self._step(request, end - start):
                break
        self._manager.free(request)

    def _step(self, request: Request, tokens: int, found: int = 0, blocks=None) -> bool:
        """One forward pass of a request; False: no room."""
        manager = self._manager
        manager.new_step_starts()
        if manager.allocate_slots(request, tokens, found, blocks) is None:
            return False
        manager.take_new_block_ids()
        manager.take_boundary_state_offloads()
        _, copied = manager.take_kv_cache_block_copies()
        if copied:
            manager.block_pool.free_blocks(copied)
        request.num_computed_tokens += found + tokens
        return True


def make_groups(
    geometry: Geometry, alignment: int | None, drafts: bool = False
) -> tuple[list[KVCacheGroupSpec], int, int]:
    """Groups of equally many layers with pages of one size; layers of a group, block size. drafts:
    the groups of states belong to a model that drafts."""
    kv = {
        "num_kv_heads": geometry.kv_heads,
        "head_size": geometry.head_dim,
        "dtype": torch.bfloat16,
    }
    block = BLOCK_TOKENS
    if geometry.state_layers:
        state = geometry.recurrent_bytes() // geometry.state_layers
        block = lcm(BLOCK_TOKENS, alignment or 1)
        block *= -(-state // (block * geometry.kv_bytes_per_layer))
    specs = [(geometry.attention_layers, FullAttentionSpec(block_size=block, **kv))]
    if geometry.window_layers:
        window = SlidingWindowSpec(block_size=block, sliding_window=geometry.window, **kv)
        specs.append((geometry.window_layers, window))
    if geometry.state_layers:
        mamba = MambaSpec(
            block_size=block,
            shapes=(geometry.conv_shape, geometry.ssm_shape),
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=block * geometry.kv_bytes_per_layer,
            mamba_cache_mode="align",
            num_prefill_checkpoint_blocks=int(alignment is not None),
            prefill_checkpoint_alignment=alignment,
        )
        specs.append((geometry.state_layers, mamba))
    layers = min(number for number, _ in specs)
    return (
        [
            KVCacheGroupSpec(
                [f"{type(spec).__name__}.{i}"],
                spec,
                is_eagle_group=drafts and isinstance(spec, MambaSpec),
            )
            for number, spec in specs
            for i in range(-(-number // layers))
        ],
        layers,
        block,
    )
