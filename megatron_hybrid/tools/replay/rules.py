"""What other engines keep by their documented rules, as a plain LRU cache over blocks.

Models of the rules, not measurements of the engines: `benchmarks/replay` runs the real managers of
those that can be installed. One pool for KV and states; states are exact. KV of local attention
(windows, chunks) is kept like that of full attention, and serves at every block end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.models.mixers.base import LayerCache
from megatron_hybrid.tools.replay.baseline import Running
from megatron_hybrid.tools.replay.lru import LeastRecentlyUsed

STEP_TOKENS = 8192
"""Of a prefill in one step; vLLM's default on large GPUs."""
UNIT = 16
"""vLLM's block where no layer has a state, and what a larger one is a multiple of."""
GRID = 64
"""Tokens between the positions of a prompt that SGLang's rule may save."""
ANSWER_GRID = 256
"""The same of an answer."""
MEGATRON_BLOCK = 256
"""Tokens of megatron-core's block."""


class _LastTokenComputed(LeastRecentlyUsed):
    """Nothing keeps the logits after a prompt's last token: it is always computed."""

    def begin(self, prompt: np.ndarray) -> Running | None:
        running = super().begin(prompt)
        if running is not None:
            last = self.tree.whole(len(prompt) - 1)
            running.skipped_tokens = min(running.skipped_tokens, last)
        return running


class BlockAligned(_LastTokenComputed):
    """States at the ends of blocks: the last one of the prompt and of the answer, the last one that
    was known, and where the prefill is cut by the token budget of a step."""

    def saved_of_prompt(self, skipped: int, junction: int, last: int) -> tuple[int, ...]:
        step = max(self.tree.block, self.tree.whole(STEP_TOKENS))
        return junction, last, *range(skipped + step, last, step)


class PromptStates(_LastTokenComputed):
    """States at the ends of blocks of prompts: the last one, and the last one that was known."""

    def saved_of_answer(self, prompt_tokens: int, num_tokens: int) -> tuple[int, ...]:
        return ()


class OneState(_LastTokenComputed):
    """One state of each prefill, at the last block end that was known if it is new, else at the
    last one of the prompt; and one of the answer, at the last multiple of ANSWER_GRID."""

    def saved_of_prompt(self, skipped: int, junction: int, last: int) -> tuple[int, ...]:
        return (junction,) if junction > skipped else (last,)

    def saved_of_answer(self, prompt_tokens: int, num_tokens: int) -> tuple[int, ...]:
        position = num_tokens // ANSWER_GRID * ANSWER_GRID
        return (position,) if position > prompt_tokens else ()


@dataclass(frozen=True)
class Rule:
    """One engine's rule for one model."""

    name: str
    what: str
    block_tokens: int
    """Tokens between the positions at which a prompt can resume."""
    build: Callable[[float], LeastRecentlyUsed]
    """A cache of so many bytes."""


def unified_block(state_bytes: int, kv_bytes: int) -> int:
    """Tokens of the block whose KV in one layer takes at least as much as one layer's state: vLLM
    (`align` mode) keeps KV blocks and states in pages of one size.

    Args:
        state_bytes: the largest state of one layer.
        kv_bytes: K and V of one token in one layer of full attention.
    """
    return max(1, -(-state_bytes // (UNIT * kv_bytes))) * UNIT


def rules(layers: Sequence[LayerCache], spec: CacheSpec) -> list[Rule]:
    """The rules of other engines for a model. Where nothing attends to everything there is no KV
    block to align.

    Args:
        layers: what each layer keeps (`model.cache_requirements()`).
        spec: the same in bytes.
    """
    kv_bytes = sum(group.num_layers * group.bytes_per_token for group in spec.groups)
    states = [
        sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in layer.states)
        for layer in layers
        if layer.states
    ]
    state_bytes = sum(states)
    grid = GRID if states else 1
    found = [
        Rule(
            f"{grid}-token grid" if states else "single tokens",
            "SGLang's: one state per prefill, at the last grid line that was known or else the "
            f"prompt's last; of answers every {ANSWER_GRID} tokens, the last is kept"
            if states
            else "SGLang's: KV token by token",
            grid,
            lambda budget: OneState(grid, kv_bytes, state_bytes, budget),
        ),
        Rule(
            f"{MEGATRON_BLOCK}-token blocks",
            "megatron-core's: states at block ends, the last that was known and the prompt's last"
            if states
            else "megatron-core's: KV in whole blocks",
            MEGATRON_BLOCK,
            lambda budget: PromptStates(MEGATRON_BLOCK, kv_bytes, state_bytes, budget),
        ),
    ]
    if spec.full_groups:
        layer_bytes = max(spec.groups[i].bytes_per_token for i in spec.full_groups)
        block = unified_block(max(states, default=0), layer_bytes)
        padded = len(states) * block * layer_bytes
        aligned = Rule(
            f"block-aligned, {block} tokens",
            "vLLM's (align mode): a block's KV fills the page of a state; states at block ends, "
            "the last that was known, the prompt's, the answer's, and those that end a step"
            if states
            else "vLLM's: KV in whole blocks",
            block,
            lambda budget: BlockAligned(block, kv_bytes, padded, budget),
        )
        found.insert(0, aligned)
    return found
