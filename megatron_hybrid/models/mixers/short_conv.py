"""The short causal convolution of the recurrent mixers, sharded by channels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_hybrid.models.mixers.base import StateTensor
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.sharding.tensor_sharding import Cut, mark_tensor_parallel
from megatron_hybrid.ops import causal_conv1d


class ShortConv(nn.Module):
    """Depthwise causal convolution; parameters as in a grouped `nn.Conv1d`.

    Args:
        sections: full sizes of the blocks of channels, each cut over the tensor-parallel ranks.
        section_names: core's names of these blocks.
        kernel_size: width of the convolution.
        bias: whether it has one.
        tp_size: number of tensor-parallel ranks.
        dtype: dtype of the parameters and of the tail.
        activation: "silu" or None.
    """

    state_name = "conv"

    def __init__(
        self,
        sections: Sequence[int],
        section_names: tuple[str, ...],
        kernel_size: int,
        bias: bool,
        tp_size: int,
        dtype: torch.dtype,
        activation: str | None = "silu",
    ):
        super().__init__()
        self.activation = activation
        channels = sum(sections) // tp_size
        # As nn.Conv1d draws them: fan-in is the kernel width, the convolution being depthwise.
        bound = 1.0 / math.sqrt(kernel_size)
        weight = torch.empty(channels, 1, kernel_size, dtype=dtype).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)
        cut = Cut(0, tuple(sections), tp_size, section_names)
        mark_tensor_parallel(self.weight, cut)
        if bias:
            self.bias = nn.Parameter(torch.empty(channels, dtype=dtype).uniform_(-bound, bound))
            mark_tensor_parallel(self.bias, cut)
        else:
            self.register_parameter("bias", None)

    def state(self) -> StateTensor:
        """The tail, the last K - 1 inputs: [C, K - 1], oldest first."""
        channels, _, width = self.weight.shape
        return StateTensor(self.state_name, (channels, width - 1), self.weight.dtype)

    def forward(self, x_TC: Tensor, context: MixerContext, layer_number: int) -> Tensor:
        """The activated convolution of each sequence, [T, C]."""
        return causal_conv1d(
            x_TC,
            self.weight.squeeze(1),
            self.bias,
            context.states(layer_number, self.state_name),
            context.ragged_layout(),
            activation=self.activation,
        )
