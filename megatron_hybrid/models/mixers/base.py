"""What a mixer is: the cache it declares, and the context that it runs in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_hybrid.ops.ragged import RaggedLayout


@dataclass(frozen=True)
class StateTensor:
    """One recurrent state of a layer."""

    name: str
    """What `read_state` and `write_state` call it."""
    shape: tuple[int, ...]
    """Shape per sequence, on this tensor-parallel rank."""
    dtype: torch.dtype
    """What it is stored in between calls."""


@dataclass(frozen=True)
class KVShape:
    """Keys and values of an attention layer."""

    num_heads: int
    """Key/value heads on this tensor-parallel rank."""
    head_dim: int
    window: int | None
    """Positions that a token sees, its own included; None: all."""


@dataclass(frozen=True)
class LayerCache:
    """What a layer needs kept between the calls of a sequence; nothing, for an MLP."""

    kv: KVShape | None = None
    states: tuple[StateTensor, ...] = ()


class MixerContext(Protocol):
    """What a mixer may ask of the context that it runs in.

    A ragged batch holds R sequences in T_padded = layout.num_tokens + layout.num_padding rows.
    `layer_number` counts from 1 within the pipeline stage.
    """

    def ragged_layout(self) -> RaggedLayout:
        """Lengths, start positions and captures of this call."""

    def token_positions(self) -> Tensor:
        """Absolute position of each row, [T_padded] int64; 0 for padding rows."""

    def read_state(self, layer_number: int, name: str) -> Tensor | None:
        """States before this call, [R, *shape]; None where all sequences start from nothing."""

    def write_state(
        self, layer_number: int, name: str, final: Tensor, captured: Tensor | None
    ) -> None:
        """States after this call, [R, *shape], and at the layout's captures, [n, *shape]."""

    def append_key_value_cache(self, layer_number: int, key: Tensor, value: Tensor) -> None:
        """Store this call's keys (after RoPE) and values, [T_padded, 1, K, D]."""

    def key_value_cache(self, layer_number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Key pages and value pages [num_pages, B, K, D], block table [R, M] int."""


class UncachedContext:
    """The context of a training or evaluation forward: whole sequences, nothing kept.

    Args:
        layout: the sequences, from position 0.
        device: where `token_positions` lies.
    """

    def __init__(self, layout: RaggedLayout, device: torch.device):
        self._layout = layout
        self._device = device

    def ragged_layout(self) -> RaggedLayout:
        """See `MixerContext`."""
        return self._layout

    def token_positions(self) -> Tensor:
        """See `MixerContext`."""
        return self._layout.token_positions(self._device)

    def read_state(self, layer_number: int, name: str) -> None:
        """See `MixerContext`: every sequence starts from nothing."""
        return None

    def write_state(
        self, layer_number: int, name: str, final: Tensor, captured: Tensor | None
    ) -> None:
        """See `MixerContext`: nothing is kept."""
