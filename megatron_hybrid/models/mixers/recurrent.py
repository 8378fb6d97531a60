"""Base of the recurrent mixers: a projection in, a short convolution, a state, a projection out."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.derived_weights import from_weights
from megatron_hybrid.models.mixers.base import LayerCache, Mixer, MixerPlace, StateTensor
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import (
    build_input_projection,
    build_output_projection,
)
from megatron_hybrid.models.sharding.collectives import sum_gradient_of_copies
from megatron_hybrid.models.sharding.tensor_sharding import Cut, sharded_parameter
from megatron_hybrid.ops import causal_conv1d


class ShortConv(nn.Module):
    """Depthwise causal convolution; parameters as in a grouped `nn.Conv1d`.

    Args:
        cut: of the channels.
        tp_group: tensor-parallel ranks.
        kernel_size: width of the convolution.
        bias: whether it has one.
        dtype: dtype of the parameters.
        tail_dtype: dtype of the tail.
        activation: "silu" or None.
    """

    state_name = "conv"

    def __init__(
        self,
        cut: Cut,
        tp_group: dist.ProcessGroup,
        kernel_size: int,
        bias: bool,
        dtype: torch.dtype,
        tail_dtype: torch.dtype,
        activation: str | None,
    ):
        super().__init__()
        self.cut, self.tail_dtype, self.activation = cut, tail_dtype, activation
        # As nn.Conv1d draws them: fan-in is the kernel width, the convolution being depthwise.
        bound = 1.0 / math.sqrt(kernel_size)
        weight = torch.empty(cut.size, 1, kernel_size, dtype=dtype).uniform_(-bound, bound)
        self.weight = sharded_parameter(weight, cut, tp_group.rank())
        self.register_parameter("bias", None)
        if bias:
            full = torch.empty(cut.size, dtype=dtype).uniform_(-bound, bound)
            self.bias = sharded_parameter(full, cut, tp_group.rank())
        for parameter in self.parameters():
            sum_gradient_of_copies(parameter, tp_group)

    def state(self) -> StateTensor:
        """Describe the tail, the last K - 1 inputs: [C, K - 1], oldest first."""
        channels, _, width = self.weight.shape
        shape, full = (channels, width - 1), sum(self.cut.sections)
        return StateTensor(self.state_name, shape, self.tail_dtype, full_size=full)

    def forward(self, x_TC: Tensor, context: MixerContext, layer_number: int) -> Tensor:
        """Compute the activated convolution of each sequence, [T, C]."""
        return causal_conv1d(
            x_TC,
            self.weight.squeeze(1),
            self.bias,
            context.states(layer_number, self.state_name),
            context.ragged_layout(),
            activation=self.activation,
        )


class RecurrentMixer(Mixer):
    """Builds `in_proj` and `conv1d`, split over the tensor-parallel ranks by channels or heads.

    Args:
        sections: widths of the parts of `in_proj`'s output, by their names in core's distributed
            checkpoints.
        convolved: names of those that `conv1d` takes, as one; empty for no convolution.
        kernel_size: of the convolution.
        copies: by name, ranks that have a copy of each part of a section; 1 by default.
        bias: whether `in_proj` has one.
        conv_bias: whether `conv1d` has one.
        activation: of `conv1d`, "silu" or None.
        conv_dtype: of the parameters of `conv1d`; None means that of the config.
    """

    input_projection = "in_proj"

    splits_rows = True

    chunk_field: str | None = None
    """Field of the config with the rows that the recurrence takes at once; None if it has none."""

    def __init__(
        self,
        config: HybridConfig,
        place: MixerPlace,
        *,
        sections: Mapping[str, int],
        convolved: tuple[str, ...] = (),
        kernel_size: int = 0,
        copies: Mapping[str, int] | None = None,
        bias: bool = False,
        conv_bias: bool = False,
        activation: str | None = "silu",
        conv_dtype: torch.dtype | None = None,
    ):
        super().__init__(config)
        self.layer_number, self.pg_collection = place.layer_number, place.pg_collection
        self._place = place
        self.in_proj = build_input_projection(
            place.submodules.input_projection,
            config,
            tuple(sections.values()),
            place.pg_collection,
            section_names=tuple(sections),
            copies=copies and tuple(copies.get(name, 1) for name in sections),
            bias=bias,
        )
        if "query" in sections:  # as in attention, for optimizers that take matrices apart
            self.in_proj.weight.group_rows = tuple(sections.values())
        self.conv1d = None
        if not convolved:
            return
        tp, widths = place.pg_collection.tp, tuple(sections[name] for name in convolved)
        copied = copies and tuple(copies.get(name, 1) for name in convolved)
        self.conv1d = ShortConv(
            Cut(0, widths, tp.size(), convolved, copied),
            tp,
            kernel_size,
            bias=conv_bias,
            dtype=conv_dtype or config.params_dtype,
            tail_dtype=config.params_dtype,
            activation=activation,
        )

    def _build_output(self, width: int, bias: bool = False) -> nn.Module:
        """Build the output projection: `width` channels of all ranks -> hidden_size."""
        return build_output_projection(self._place, self.config, width, bias=bias)

    def _own_part(self, full: Tensor) -> nn.Parameter:
        """Cut this rank's heads or channels out of a parameter, along its first dimension."""
        tp = self.pg_collection.tp
        return sharded_parameter(full, Cut(0, (len(full),), tp.size()), tp.rank())

    def _decay_rates(self) -> Tensor:
        """Return -exp(A_log), fp32."""
        return from_weights(self, "A", lambda: -self.A_log.float().exp())

    def cache_requirements(self) -> LayerCache:
        """Describe the convolution tail and the state, as far as there are any."""
        tail = () if self.conv1d is None else (self.conv1d.state(),)
        return LayerCache(states=(*tail, *self.recurrent_states()))

    def recurrent_states(self) -> tuple[StateTensor, ...]:
        """Describe the states of the recurrence; the tail is not one of them."""
        return ()

    def cut_reasons(self) -> tuple[str, ...]:
        """Name chunks of several rows, and states that are rounded between calls."""
        reasons, dtype = [], self.config.recurrent_state_dtype
        size = 1 if self.chunk_field is None else getattr(self.config, self.chunk_field)
        if size > 1:
            reasons.append(f"{self.chunk_field} is {size}: with 1 a row's bits do not depend on it")
        if self.recurrent_states() and dtype != torch.float32:
            reasons.append(f"recurrent_state_dtype is {dtype}: states are rounded between calls")
        return tuple(reasons)

    def _state(
        self, name: str, shape: tuple[int, ...], full_size: int, decay: Tensor
    ) -> StateTensor:
        """Describe a state as `StateTensor` does; it is kept in the config's dtype for states."""
        return StateTensor(name, shape, self.config.recurrent_state_dtype, decay, full_size)
