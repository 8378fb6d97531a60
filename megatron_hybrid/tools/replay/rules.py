"""Other engines' documented caching rules, each as a plain LRU cache over blocks.

Models of the rules, not measurements of the engines: `benchmarks/replay` runs the real managers of
installable engines. One pool holds KV and exact states. KV of local attention (windows, chunks) is
cached like that of full attention, and can be resumed from at every block end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.models.mixers.base import LayerCache
from megatron_hybrid.tools.replay.lru import LeastRecentlyUsed, Running
from megatron_hybrid.tools.replay.protocol import STEP_TOKENS

UNIT = 16
"""vLLM's block for models without states; larger blocks are multiples."""
GRID = 64
"""SGLang saves states of a prompt at multiples of this many tokens."""
ANSWER_GRID = 256
"""The same for an answer."""
MEGATRON_BLOCK = 256
"""Tokens of megatron-core's block."""


class _LastTokenComputed(LeastRecentlyUsed):
    """A cache that always computes a prompt's last token, since no logits are saved."""

    def begin(self, prompt: np.ndarray, message_starts: Sequence[int] = ()) -> Running | None:
        running = super().begin(prompt)
        if running is not None:
            last = self.tree.whole(len(prompt) - 1)
            running.skipped_tokens = min(running.skipped_tokens, last)
        return running


class BlockAligned(_LastTokenComputed):
    """States at block ends: the last one of the prompt, of the answer and of the known prefix, and
    the ends of steps."""

    def saved_of_prompt(self, skipped: int, junction: int, last: int) -> tuple[int, ...]:
        step = max(self.tree.block, self.tree.whole(STEP_TOKENS))
        return junction, last, *range(skipped + step, last, step)


class PromptStates(_LastTokenComputed):
    """States at block ends of prompts: the last one, and the last one of the known prefix."""

    def saved_of_answer(self, prompt_tokens: int, num_tokens: int) -> tuple[int, ...]:
        return ()


class OneState(_LastTokenComputed):
    """One state of each prefill: at the last block end of the known prefix if it is after the
    restored one, else of the prompt; and one of the answer, at the last multiple of ANSWER_GRID."""

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
    """Distance of the positions from which a prompt can resume."""
    build: Callable[[float], LeastRecentlyUsed]
    """Makes a cache of so many bytes."""


def unified_block(state_bytes: int, kv_bytes: int) -> int:
    """Return the tokens of the smallest block whose KV in one layer is at least as large as one
    layer's state: vLLM (`align` mode) keeps KV blocks and states in pages of one size.

    Args:
        state_bytes: the largest state of one layer.
        kv_bytes: K and V of one token in one layer of full attention.
    """
    return max(1, -(-state_bytes // (UNIT * kv_bytes))) * UNIT


def rules(layers: Sequence[LayerCache], spec: CacheSpec) -> list[Rule]:
    """List the rules of other engines for a model. Without full attention there is no KV block to
    align.

    Args:
        layers: cached tensors of each layer (`model.cache_requirements()`).
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
