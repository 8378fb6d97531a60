"""What a mixer is: the cache it declares, what it is built of, and the context that it runs in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

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
    decay: Tensor | None = field(default=None, compare=False)
    """What a token typically leaves of each element, 0 to 1, broadcastable to `shape`: an encoding
    may then round the state, and knows which errors last. None: it is kept as it is."""


@dataclass(frozen=True)
class KVShape:
    """Keys and values of an attention layer. At most one of window and chunk is given."""

    num_heads: int
    """Key/value heads on this tensor-parallel rank."""
    head_dim: int
    """Width of a key."""
    window: int | None = None
    """Positions that a token sees, its own included; None: not windowed."""
    chunk: int | None = None
    """The token at position t sees [t // chunk * chunk, t]; None: not chunked."""
    value_dim: int | None = None
    """Width of a value; None: that of a key, which then stands here. 0: no values are kept, the
    layer takes them from its keys (the latent cache of MLA)."""

    def __post_init__(self):
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)

    @property
    def is_local(self) -> bool:
        """Whether some tokens do not see all tokens before them."""
        return self.window is not None or self.chunk is not None


@dataclass(frozen=True)
class LayerCache:
    """What a layer needs kept between the calls of a sequence; nothing, for an MLP."""

    kv: KVShape | None = None
    states: tuple[StateTensor, ...] = ()


@dataclass
class MixerSubmodules:
    """The classes that a mixer builds its parts of: plain torch, or Transformer Engine's."""

    input_projection: type
    """Column-parallel linear of the layer's input; may normalise it first."""
    column: type
    """Column-parallel linear of anything else."""
    row: type
    """Row-parallel linear."""
    norm: type


@dataclass(frozen=True)
class StackInputs:
    """What the first pipeline stage knows beside the hidden states, for the mixers that ask."""

    embedding_Th: Tensor | None
    """The word embedding that the stack starts from; None on later stages."""
    per_layer_TJp: Tensor | None = None
    """What each of the J layers of the symbol `P` is told about each token; None without any."""
    shared_blocks: dict[int, nn.Module] = field(default_factory=dict)
    """The blocks that layers of the symbol `Z` share, each from its first layer on."""


class Mixer(MegatronModule):
    """Base of all mixers: `forward(hidden_Th, context) -> (output_Th, bias or None)`."""

    input_projection: str | None = None
    """Name of the one projection that takes all of the layer's input, where there is one."""

    norms_input = False
    """Whether it does itself what the norm in front of a mixer does."""

    takes_stack_inputs = False
    """Whether `forward` takes the `StackInputs` as a third argument."""

    def cache_requirements(self) -> LayerCache:
        """What is kept between the calls of a sequence."""
        return LayerCache()


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

    def append_key_value_cache(self, layer_number: int, key: Tensor, value: Tensor | None) -> None:
        """Store this call's keys (after RoPE) and values, [T_padded, 1, K, D] and [T_padded, 1, K,
        P]; None for values where `KVShape.value_dim` is 0."""

    def key_value_cache(self, layer_number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Key pages [num_pages, B, K, D], value pages [num_pages, B, K, P] (P is 0 where the layer
        keeps no values), block table [R, M] int. It may be asked for an earlier layer's."""


class UncachedContext:
    """The context of a training or evaluation forward: whole sequences, nothing kept.

    Args:
        layout: the sequences, from position 0.
        device: where `token_positions` lies.
        shared_kv_layers: numbers of the layers whose keys and values other layers read too.
    """

    def __init__(
        self, layout: RaggedLayout, device: torch.device, shared_kv_layers: Collection[int] = ()
    ):
        self._layout = layout
        self._device = device
        self._shared_kv_layers = shared_kv_layers
        self._keys_values: dict[int, tuple[Tensor, Tensor]] = {}

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

    def append_key_value_cache(self, layer_number: int, key: Tensor, value: Tensor) -> None:
        """See `MixerContext`: kept to the end of this forward, for the layers that share them."""
        if layer_number in self._shared_kv_layers:
            self._keys_values[layer_number] = key.squeeze(1), value.squeeze(1)

    def shared_keys_values(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer before, [T, K, D] each."""
        return self._keys_values[layer_number]
