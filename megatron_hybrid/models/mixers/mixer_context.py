"""MixerContext, the interface of a mixer to its context, and the context of uncached forwards.

A mixer does not know which context it runs in.
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from megatron_hybrid.ops import AttentionPattern, RaggedLayout, SlotStates, varlen_attention


class LatentHeads(Protocol):
    """The heads of latent attention over latents [T, r + d]; `rank` r is the width of the content.

    H heads, D the width of a query, P that of a head's value.
    """

    rank: int

    def expand(self, latents_TL: Tensor) -> tuple[Tensor, Tensor]:
        """Compute each head's own keys [T, H, D] and values [T, H, P]."""

    def absorb(self, q_THD: Tensor) -> Tensor:
        """Compute queries for the latents, [T, H, r + d]."""

    def values(self, o_THr: Tensor) -> Tensor:
        """Compute values [T, H, P] from each head's average of the latents' contents [T, H, r]."""


class MixerContext(Protocol):
    """The interface of a mixer to its context.

    A ragged batch holds R sequences in T = layout.num_tokens + layout.num_padding rows.
    `layer_number` counts from 1 within the pipeline stage.
    """

    same_tokens_on_expert_ranks: bool
    """Whether the expert-parallel ranks all run this batch, as those of one engine do. Then no
    token travels: each rank's experts take all tokens, and the ranks' outputs are summed. Else the
    ranks may have different tokens, as in training, where they are data-parallel ranks."""

    padding_mask_T: Tensor | None
    """Read in training alone: bool [T], True for rows that routers do not count, though their
    sequences have them; None means that all tokens count."""

    def ragged_layout(self) -> RaggedLayout:
        """Return the lengths, start positions and captures of this call."""

    def token_positions(self) -> Tensor:
        """Return the absolute position of each row, [T] int64; 0 for padding rows."""

    def states(self, layer_number: int, name: str) -> SlotStates | None:
        """Return the slots of a state for a recurrent op. None means that all sequences start from
        zeros and nothing is kept."""

    def attend(
        self,
        layer_number: int,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKP: Tensor | None,
        pattern: AttentionPattern,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of this call's tokens over all tokens of their sequences, [T, H, P].

        Args:
            layer_number: the layer whose keys and values are read.
            q_THD: queries, after RoPE.
            k_TKD, v_TKP: this call's keys (after RoPE) and values, which are kept for that layer;
                None if that layer, an earlier one, has stored them in this call.
            pattern: visible positions and form of scores.
            sinks_H: see `ops.paged_attention`.
        """

    def attend_latents(
        self,
        layer_number: int,
        q_THD: Tensor,
        latents_TL: Tensor,
        heads: LatentHeads,
        pattern: AttentionPattern,
    ) -> Tensor:
        """Compute latent attention, [T, H, P]: over expanded heads, or over the latents.

        Args:
            layer_number: of the layer, whose `KVShape` is one head of latents without values.
            q_THD: queries, after RoPE.
            latents_TL: this call's latents; they are kept.
            heads: expands latents, or absorbs queries.
            pattern: visible positions and form of scores.
        """


class UncachedContext:
    """The context of a training or evaluation forward: whole sequences, nothing kept.

    Args:
        layout: the sequences, from position 0.
        device: where `token_positions` lies.
        shared_kv_layers: numbers of the layers whose keys and values other layers read too.
        padding_mask_T: see `MixerContext`.
    """

    same_tokens_on_expert_ranks = False

    def __init__(
        self,
        layout: RaggedLayout,
        device: torch.device,
        shared_kv_layers: Collection[int] = (),
        padding_mask_T: Tensor | None = None,
    ):
        self.padding_mask_T = padding_mask_T
        self._layout = layout
        self._device = device
        self._shared_kv_layers = shared_kv_layers
        self._keys_values: dict[int, tuple[Tensor, Tensor]] = {}

    def ragged_layout(self) -> RaggedLayout:
        return self._layout

    def token_positions(self) -> Tensor:
        return self._layout.token_positions(self._device)

    def states(self, layer_number: int, name: str) -> None:
        """See `MixerContext`: every sequence starts from zeros, and nothing is kept."""
        return None

    def attend(
        self,
        layer_number: int,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKP: Tensor | None,
        pattern: AttentionPattern,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See `MixerContext`; shared keys and values are kept to the end of this forward."""
        if k_TKD is None:
            k_TKD, v_TKP = self._keys_values[layer_number]
        elif layer_number in self._shared_kv_layers:
            self._keys_values[layer_number] = k_TKD, v_TKP
        return varlen_attention(q_THD, k_TKD, v_TKP, self._layout, pattern, sinks_H)

    def attend_latents(
        self,
        layer_number: int,
        q_THD: Tensor,
        latents_TL: Tensor,
        heads: LatentHeads,
        pattern: AttentionPattern,
    ) -> Tensor:
        """See `MixerContext`: over expanded heads, which is less work than over latents."""
        return varlen_attention(q_THD, *heads.expand(latents_TL), self._layout, pattern)
