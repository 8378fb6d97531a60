"""The routed experts of a mixture: one MLP each, their weights stacked.

Shape suffixes: n tokens, m pairs of a token and one of its experts, E experts, k experts per token,
h hidden, f the width of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.sharding.tensor_sharding import mark_tensor_parallel, shard
from megatron_hybrid.ops.ragged import ROW_ALIGNMENT


class StackedLinear(nn.Module):
    """E linear layers: weight [E, out, in] and bias [E, out] or None, this rank's pieces of them.

    Args:
        shape: (E, out, in), of the whole.
        dim: 1 or 2, which dimension of the weight is cut over the ranks.
        sections: see `mark_tensor_parallel`.
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
        mark_tensor_parallel(self.weight, dim, sections)
        if config.perform_initialization:
            full = torch.empty(shape)
            (config.init_method if dim == 1 else config.output_layer_init_method)(full)
            self.weight.data.copy_(shard(full, self.weight, rank, tp_size))
        self.register_parameter("bias", None)
        if config.add_bias_linear:
            self.bias = nn.Parameter(torch.zeros(local[:2], dtype=config.params_dtype))
            if dim == 1:
                mark_tensor_parallel(self.bias, 1, sections)

    def layers(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight [out, in] and bias [out] of each."""
        # One unbind: taking experts out one by one costs a gradient of full size each.
        biases = self.bias.unbind(0) if self.bias is not None else [None] * len(self.weight)
        return list(zip(self.weight.unbind(0), biases))


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
        """[T, h] -> [T, h]; a row's result does not depend on what other rows there are.

        Args:
            hidden_Th: n tokens, then padding rows, which get zeros.
            weights_nE: of each expert, fp32.
            chosen_nE: which experts, bool, the same number k for each token.
        """
        # Each rank weighs its own part of every sum, so the gradients of both add up over ranks.
        hidden_nh = copy_to_tensor_model_parallel_region(
            hidden_Th[: len(weights_nE)], self.tp_group
        )
        weights_nE = copy_to_tensor_model_parallel_region(weights_nE, self.tp_group)
        expert_m, token_m = chosen_nE.t().nonzero(as_tuple=True)  # expert by expert
        x_mh = hidden_nh[token_m]
        weights_m1 = weights_nE[token_m, expert_m].unsqueeze(-1)
        if self.config.moe_apply_probs_on_input:
            x_mh = (x_mh * weights_m1).to(x_mh.dtype)
        counts = torch.bincount(expert_m, minlength=chosen_nE.shape[1]).tolist()
        layers = zip(x_mh.split(counts), self.linear_fc1.layers(), self.linear_fc2.layers())
        y_mh = torch.cat([self._mlp(*layer) for layer in layers if len(layer[0])]).float()
        if not self.config.moe_apply_probs_on_input:
            y_mh = y_mh * weights_m1
        # A sum over each token's k experts in the order of their numbers, whatever the batch.
        by_token = token_m.argsort(stable=True)
        parts = y_mh[by_token].unflatten(0, (len(hidden_nh), -1)).unbind(1)
        y_nh = parts[0]
        for part in parts[1:]:
            y_nh = y_nh + part
        y_nh = reduce_from_tensor_model_parallel_region(y_nh.to(hidden_nh.dtype), self.tp_group)
        return F.pad(y_nh, (0, 0, 0, len(hidden_Th) - len(y_nh)))

    def _mlp(
        self,
        x_mh: Tensor,
        fc1: tuple[Tensor, Tensor | None],
        fc2: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        """One expert, [m, h] -> [m, h]."""
        padding = -len(x_mh) % ROW_ALIGNMENT
        x_mf = F.linear(F.pad(x_mh, (0, 0, 0, padding)), *fc1)
        config = self.config
        if config.gated_linear_unit:
            gate_mf, x_mf = x_mf.chunk(2, -1)
            if (limit := config.activation_func_clamp_value) is not None:
                gate_mf, x_mf = gate_mf.clamp(max=limit), x_mf.clamp(-limit, limit)
            if config.glu_linear_offset:
                x_mf = x_mf + config.glu_linear_offset
            x_mf = config.activation_func(gate_mf) * x_mf
        else:
            x_mf = config.activation_func(x_mf)
        return F.linear(x_mf, *fc2)[: len(x_mh)]
