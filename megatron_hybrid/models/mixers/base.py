"""What a mixer is: the cache it declares, and what it is built of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn


@dataclass(frozen=True)
class StateTensor:
    """One recurrent state of a layer."""

    name: str
    """What `MixerContext.states` calls it."""
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
