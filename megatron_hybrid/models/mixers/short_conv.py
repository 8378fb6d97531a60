"""The short causal convolution of the recurrent mixers, sharded by channels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hybrid.models.mixers.base import StateTensor
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.sharding.collectives import sum_gradient_of_copies
from megatron_hybrid.models.sharding.tensor_sharding import Cut, sharded_parameter
from megatron_hybrid.ops import causal_conv1d


class ShortConv(nn.Module):
    """Depthwise causal convolution; parameters as in a grouped `nn.Conv1d`.

    Args:
        sections: full sizes of the blocks of channels, each cut over the tensor-parallel ranks.
        section_names: core's names of these blocks.
        kernel_size: width of the convolution.
        bias: whether it has one.
        tp_group: tensor-parallel ranks.
        dtype: dtype of the parameters and of the tail.
        activation: "silu" or None.
        copies: see `Cut`.
    """

    state_name = "conv"

    def __init__(
        self,
        sections: Sequence[int],
        section_names: tuple[str, ...],
        kernel_size: int,
        bias: bool,
        tp_group: dist.ProcessGroup,
        dtype: torch.dtype,
        activation: str | None = "silu",
        copies: tuple[int, ...] | None = None,
    ):
        super().__init__()
        self.activation = activation
        self.cut = cut = Cut(0, tuple(sections), tp_group.size(), section_names, copies)
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
        """The tail, the last K - 1 inputs: [C, K - 1], oldest first."""
        channels, _, width = self.weight.shape
        shape, full = (channels, width - 1), sum(self.cut.sections)
        return StateTensor(self.state_name, shape, self.weight.dtype, full_size=full)

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
