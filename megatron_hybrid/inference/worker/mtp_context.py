"""PredictionContext: a step's batch as the MTP head sees it.

The row of a token has the token's embedding and the hidden state of the token before. In training
its position is that of the token before. Here it is the token's own, so that it depends on no later
token, and the head's blocks and states are shared like those of the model's layers. The result of
rotary embeddings is the same. The first token has no row, and no other token sees its position. A
recurrent state still includes it, with a hidden state of zeros.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from megatron_hybrid.models.mixers.mixer_context import LatentHeads, MixerContext
from megatron_hybrid.ops import AttentionPattern, SlotStates
from megatron_hybrid.ops.ragged import RaggedLayout


class PredictionContext:
    """The `MixerContext` of an MTP head, whose layers come after those of the model.

    Args:
        context: of the model; it has the keys, values and states.
        num_layers: of the model.
    """

    same_tokens_on_expert_ranks = True  # see MixerContext
    padding_mask_T = None

    def __init__(self, context: MixerContext, num_layers: int):
        self._context = context
        self._num_layers = num_layers
        self._copies: dict[tuple[int, str], Tensor] | None = None

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Make a context in which steps write to copies of states, as their tokens may be rejected.
        Keys and values need no copies, as they lie after all accepted tokens."""
        self._copies = {}
        try:
            yield
        finally:
            self._copies = None

    def ragged_layout(self) -> RaggedLayout:
        return self._context.ragged_layout()

    def token_positions(self) -> Tensor:
        return self._context.token_positions()

    def states(self, layer_number: int, name: str) -> SlotStates:
        states = self._context.states(self._num_layers + layer_number, name)
        if self._copies is None:
            return states
        key = layer_number, name
        if key not in self._copies:
            self._copies[key] = states.pool_S.index_select(0, states.slot_ids_R)
        rows = torch.arange(len(states.slot_ids_R), device=states.slot_ids_R.device)
        return SlotStates(self._copies[key], rows)

    def attend(
        self,
        layer_number: int,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKP: Tensor | None,
        pattern: AttentionPattern,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        number, seen = self._num_layers + layer_number, _without_first(pattern)
        return self._context.attend(number, q_THD, k_TKD, v_TKP, seen, sinks_H)

    def attend_latents(
        self,
        layer_number: int,
        q_THD: Tensor,
        latents_TL: Tensor,
        heads: LatentHeads,
        pattern: AttentionPattern,
    ) -> Tensor:
        number, seen = self._num_layers + layer_number, _without_first(pattern)
        return self._context.attend_latents(number, q_THD, latents_TL, heads, seen)


@lru_cache(maxsize=64)
def _without_first(pattern: AttentionPattern) -> AttentionPattern:
    return replace(pattern, skips_first=True)
