"""Base of all mixers: declarations of cached state, classes of the parts, inputs."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn


@dataclass(frozen=True)
class StateTensor:
    """One recurrent state of a layer."""

    name: str
    """Name for `MixerContext.states`."""
    shape: tuple[int, ...]
    """Shape per sequence, on this tensor-parallel rank."""
    dtype: torch.dtype
    """dtype between calls."""
    decay: Tensor | None = field(default=None, compare=False)
    """Typical factor of each element per token, 0 to 1, broadcastable to `shape`, by which an
    encoding that rounds the state weighs errors. None means that the state is never rounded."""
    full_size: int | None = None
    """First dimension of the whole state, over all tensor-parallel ranks; None means `shape[0]`."""

    def __post_init__(self):
        if self.full_size is None:
            object.__setattr__(self, "full_size", self.shape[0])

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole state."""
        return self.full_size * math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class KVShape:
    """Keys and values of an attention layer. At most one of window and chunk is given."""

    num_heads: int
    """Key/value heads on this tensor-parallel rank."""
    head_dim: int
    """Width of a key."""
    window: int | None = None
    """Positions that a token sees, its own included; None means all of them."""
    chunk: int | None = None
    """The token at position t sees [t // chunk * chunk, t]; None means no chunks."""
    value_dim: int | None = None
    """Width of a value; None becomes that of a key. With 0 no values are kept, and the layer
    computes them from its keys (the latent cache of MLA)."""
    full_heads: int | None = field(default=None, compare=False)
    """Key/value heads of all tensor-parallel ranks, each once; None means `num_heads`."""

    def __post_init__(self):
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        if self.full_heads is None:
            object.__setattr__(self, "full_heads", self.num_heads)

    @property
    def is_local(self) -> bool:
        """Whether some tokens do not see all tokens before them."""
        return self.window is not None or self.chunk is not None


@dataclass(frozen=True)
class LayerCache:
    """State of one sequence that a layer keeps between calls; empty for an MLP."""

    kv: KVShape | None = None
    states: tuple[StateTensor, ...] = ()


@dataclass
class MixerSubmodules:
    """Classes of a mixer's parts: of plain torch, or of Transformer Engine."""

    input_projection: type
    """Column-parallel linear of the layer's input; may normalise it first."""
    column: type
    """Column-parallel linear of anything else."""
    row: type
    """Row-parallel linear."""


@dataclass(frozen=True)
class MixerPlace:
    """What every mixer is built with, in addition to its config."""

    submodules: MixerSubmodules
    layer_number: int
    """Number from 1, within the pipeline stage."""
    pg_collection: ProcessGroupCollection
    """Process groups, whose tensor-parallel ranks share out heads and channels; experts and shared
    blocks use those of expert- and pipeline-parallel ranks too."""

    def with_input_projection(self, projection: type) -> MixerPlace:
        """Return the place of a part whose input is normed already, or is not all of a layer's."""
        return replace(self, submodules=replace(self.submodules, input_projection=projection))


@dataclass(frozen=True)
class StackInputs:
    """Inputs of a pipeline stage in addition to the hidden states, for mixers that need them."""

    embedding_Th: Tensor | None
    """Word embedding, the input of the stack, of all ranks' rows; None on later stages of a model
    without shared blocks there."""
    per_layer_TJp: Tensor | None = None
    """Per-layer embedding of each token for the J layers of the symbol `P`; None without any, and
    on later stages. Of this rank's rows under sequence parallelism."""
    shared_blocks: dict[int, nn.Module] = field(default_factory=dict)
    """Blocks shared by layers, each entered by its first layer."""
    memories: dict[int, Tensor] = field(default_factory=dict)
    """Number of each Mamba-1 layer that others read -> its output before the gate, [T, channels],
    entered by that layer."""


def rank_generator(is_own: bool) -> AbstractContextManager:
    """Return a context in which core's generator for this rank draws what each tensor-parallel rank
    has its own part of; where it is not initialised (on a CPU), torch's draws that, too."""
    tracker = get_cuda_rng_tracker()
    return tracker.fork() if is_own and tracker.is_initialized() else nullcontext()


class Mixer(MegatronModule):
    """Base of all mixers: `forward(hidden_Th, context) -> (output_Th, bias or None)`.

    Each is built with the config of its layer and a `MixerPlace`.
    """

    input_projection: str | None = None
    """Name of the one projection of all of the layer's input, if there is one."""

    norms_input = False
    """Whether the mixer applies the norm in front of it by itself."""

    takes_stack_inputs = False
    """Whether `forward` takes the `StackInputs` as a third argument."""

    splits_rows = False
    """Whether the mixer takes and gives this rank's rows under sequence parallelism; else it does
    not know of it, and gets the rows of all ranks."""

    recompute_name: str | None = None
    """Name in `recompute_modules` of the whole mixer, the norm in front of it included."""

    recompute_parts: tuple[str, ...] = ()
    """Names in `recompute_modules` of parts that the mixer recomputes by itself."""

    training_fields: tuple[str, ...] = ()
    """Fields of the config that change what it computes in training alone."""

    has_experts = False
    """Whether it sums over expert-parallel ranks."""

    def cache_requirements(self) -> LayerCache:
        """Describe the state of one sequence that is kept between calls."""
        return LayerCache()

    def cut_reasons(self) -> tuple[str, ...]:
        """Say why a row's last bits may depend on where its sequence is cut into calls. Without a
        reason they do not, on a CPU."""
        return ()

    def training_reasons(self) -> tuple[str, ...]:
        """Say why a row may differ in its last bits from that of a forward without a cache: by
        fields that act in training alone."""
        found = [(name, getattr(self.config, name)) for name in self.training_fields]
        return tuple(f"{name} is {value}, in training alone" for name, value in found if value)


def with_bias(output_Th: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias of a part to its output, if it has one."""
    return output_Th if bias is None else output_Th + bias
