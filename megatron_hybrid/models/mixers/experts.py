"""The routed experts of a mixture: one MLP each.

Shape suffixes: as in `ops.experts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.mlp import activated
from megatron_hybrid.models.sharding.tensor_sharding import Cut, mark_tensor_parallel, shard
from megatron_hybrid.ops import routed_experts


class StackedLinear(nn.Module):
    """This rank's pieces of E linear layers: weight [E, out, in] and bias [E, out] or None.

    Args:
        shape: full (E, out, in).
        dim: 1 or 2, the dimension of the weight that is cut over the ranks.
        sections: full sizes of its blocks, each cut separately; None: one block.
    """

    def __init__(
        self,
        config: HybridConfig,
        shape: tuple[int, int, int],
        dim: int,
        pg_collection: ProcessGroupCollection,
        sections: tuple[int, ...] | None = None,
    ):
        super().__init__()
        rank, tp_size = pg_collection.tp.rank(), pg_collection.tp.size()
        local = [size // tp_size if i == dim else size for i, size in enumerate(shape)]
        self.weight = nn.Parameter(torch.empty(local, dtype=config.params_dtype))
        cut = Cut(dim, sections or (shape[dim],), tp_size)
        mark_tensor_parallel(self.weight, cut)
        if config.perform_initialization:
            full = torch.empty(shape)
            (config.init_method if dim == 1 else config.output_layer_init_method)(full)
            self.weight.data.copy_(shard(full, self.weight, rank))
        self.register_parameter("bias", None)
        if config.add_bias_linear:
            self.bias = nn.Parameter(torch.zeros(local[:2], dtype=config.params_dtype))
            if dim == 1:
                mark_tensor_parallel(self.bias, cut)


class SeparateLinear(nn.Module):
    """E linear layers with parameters of their own, named as in core's TEGroupedMLP: those of a
    model that megatron-core built, which cannot be stacked without a copy.

    Args:
        weights: this rank's piece of each layer's weight, [out, in].
        biases: this rank's piece of each layer's bias, [out]; none, or one for each weight.
    """

    def __init__(self, weights: Sequence[nn.Parameter], biases: Sequence[nn.Parameter] = ()):
        super().__init__()
        self._num_layers = len(weights)
        for kind, parameters in (("weight", weights), ("bias", biases)):
            for i, parameter in enumerate(parameters):
                self.register_parameter(f"{kind}{i}", parameter)

    @property
    def weight(self) -> list[Tensor]:
        """The weight of each layer."""
        return list(self._parameters.values())[: self._num_layers]

    @property
    def bias(self) -> list[Tensor] | None:
        """The bias of each layer."""
        return list(self._parameters.values())[self._num_layers :] or None


class Experts(nn.Module):
    """Every token's weighted sum of its experts.

    Args:
        config: sizes are `num_moe_experts`, `moe_ffn_hidden_size` and, where there is one,
            `moe_latent_size`; the MLP is gated and activated as the one of the symbol `-`.
        pg_collection: process groups; `tp` is used.
    """

    def __init__(self, config: HybridConfig, pg_collection: ProcessGroupCollection):
        super().__init__()
        self.config = config
        self.tp_group = pg_collection.tp
        num_experts, width = config.num_moe_experts, config.moe_ffn_hidden_size
        hidden = config.moe_latent_size or config.hidden_size
        # A rank holds its piece of each gate and its piece of each value, one after the other.
        sections = (width,) * (2 if config.gated_linear_unit else 1)
        self.linear_fc1 = StackedLinear(
            config, (num_experts, sum(sections), hidden), 1, pg_collection, sections
        )
        self.linear_fc2 = StackedLinear(config, (num_experts, hidden, width), 2, pg_collection)

    def forward(self, hidden_Th: Tensor, weights_nE: Tensor, chosen_nE: Tensor) -> Tensor:
        """[T, h] -> [T, h]; a row's result does not depend on other rows.

        Args:
            hidden_Th: n tokens, then padding rows, which get zeros.
            weights_nE: weight of each expert, fp32.
            chosen_nE: the chosen experts, bool, the same number k for each token.
        """
        # Each rank weighs its own part of every sum, so the gradients of both add up over ranks.
        hidden_nh = copy_to_tensor_model_parallel_region(
            hidden_Th[: len(weights_nE)], self.tp_group
        )
        weights_nE = copy_to_tensor_model_parallel_region(weights_nE, self.tp_group)
        y_nh = routed_experts(
            hidden_nh,
            weights_nE,
            chosen_nE,
            self.linear_fc1.weight,
            self.linear_fc1.bias,
            self.linear_fc2.weight,
            self.linear_fc2.bias,
            partial(activated, self.config),
            self.config.moe_apply_probs_on_input,
        )
        y_nh = reduce_from_tensor_model_parallel_region(y_nh, self.tp_group)
        return F.pad(y_nh, (0, 0, 0, len(hidden_Th) - len(y_nh)))
