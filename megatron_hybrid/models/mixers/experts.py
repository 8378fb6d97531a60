"""The routed experts of a mixture: one MLP each.

Shape suffixes: as in `ops.experts`.
"""

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
from megatron_hybrid.models.mixers.token_dispatch import build_dispatcher
from megatron_hybrid.models.sharding.gathering import mark_experts
from megatron_hybrid.models.sharding.parallel_setup import ExpertGroups
from megatron_hybrid.models.sharding.tensor_sharding import Cut, mark_tensor_parallel, shard
from megatron_hybrid.ops import expert_mlps


class StackedLinear(nn.Module):
    """This rank's pieces of the E linear layers of its experts: weight [E, out, in] and bias
    [E, out] or None.

    Args:
        shape: (experts of all ranks, out, in), full.
        dim: 1 or 2, the dimension of the weight that is cut over the ranks.
        groups: the ranks that experts are split among.
        sections: full sizes of its blocks, each cut separately; None means one block.
    """

    def __init__(
        self,
        config: HybridConfig,
        shape: tuple[int, int, int],
        dim: int,
        groups: ExpertGroups,
        sections: tuple[int, ...] | None = None,
    ):
        super().__init__()
        rank, tp_size = groups.tp.rank(), groups.tp.size()
        own = groups.own(shape[0])
        local = [len(own), *shape[1:]]
        local[dim] //= tp_size
        self.weight = nn.Parameter(torch.empty(local, dtype=config.params_dtype))
        cut = Cut(dim, sections or (shape[dim],), tp_size)
        mark_tensor_parallel(self.weight, cut)
        if config.perform_initialization:
            full = torch.empty(shape)
            (config.init_method if dim == 1 else config.output_layer_init_method)(full)
            full = full[own.start : own.stop]
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

    Each expert-parallel rank has an equal part of the experts, in the order of their numbers.

    Args:
        config: sizes are `num_moe_experts`, `moe_ffn_hidden_size` and, where there is one,
            `moe_latent_size`; the MLP is gated and activated as the one of the symbol `-`.
        pg_collection: process groups; `tp` and, if given, `ep`, `expt_tp` and `tp_ep` are used.
    """

    def __init__(self, config: HybridConfig, pg_collection: ProcessGroupCollection):
        super().__init__()
        self.config = config
        self.tp_group = pg_collection.tp
        self.groups = ExpertGroups.of(pg_collection)
        num_experts, width = config.num_moe_experts, config.moe_ffn_hidden_size
        hidden = config.moe_latent_size or config.hidden_size
        # A rank holds its piece of each gate and its piece of each value, one after the other.
        sections = (width,) * (2 if config.gated_linear_unit else 1)
        self.linear_fc1 = StackedLinear(
            config, (num_experts, sum(sections), hidden), 1, self.groups, sections
        )
        self.linear_fc2 = StackedLinear(config, (num_experts, hidden, width), 2, self.groups)
        for parameter in self.parameters():
            mark_experts(parameter, num_experts)
            # Core sums its gradients over ranks of its own, and gives it an optimizer of its own:
            # in all layouts, so that each goes on from the checkpoints of any other.
            parameter.allreduce = False

    def forward(
        self,
        hidden_Th: Tensor,
        weights_nE: Tensor,
        chosen_nE: Tensor,
        same_tokens_on_expert_ranks: bool,
    ) -> Tensor:
        """Run the experts, [T, h] -> [T, h]; a row's result does not depend on other rows.

        Args:
            hidden_Th: n tokens, then padding rows, which get zeros; equal on tensor-parallel ranks.
            weights_nE: weight of each of all experts, fp32 or fp64.
            chosen_nE: the chosen experts, bool, at most `moe_router_topk` for each token.
            same_tokens_on_expert_ranks: see `MixerContext`.
        """
        num_tokens, num_rows = len(weights_nE), len(hidden_Th)
        dispatcher = build_dispatcher(self.config, self.groups, same_tokens_on_expert_ranks)
        if same_tokens_on_expert_ranks:
            group, start, end = self.groups.tp_ep, 0, num_tokens
        else:
            group = self.tp_group
            start, end = self._share(num_tokens)
        # Each rank weighs its own part of every sum, so the gradients of both add up over ranks.
        hidden_nh = copy_to_tensor_model_parallel_region(hidden_Th[:num_tokens], group)
        weights_nE = copy_to_tensor_model_parallel_region(weights_nE, group)
        x_mh, ends_E = dispatcher.dispatch(
            hidden_nh[start:end], weights_nE[start:end], chosen_nE[start:end]
        )
        y_mh = expert_mlps(
            x_mh,
            ends_E,
            self.linear_fc1.weight,
            self.linear_fc1.bias,
            self.linear_fc2.weight,
            self.linear_fc2.bias,
            partial(activated, self.config),
        )
        y_Th = F.pad(dispatcher.combine(y_mh), (0, 0, start, num_rows - end))
        return reduce_from_tensor_model_parallel_region(y_Th, group)

    def _share(self, num_tokens: int) -> tuple[int, int]:
        """Return (start, end) of the tokens that this rank brings to the experts. The
        tensor-parallel ranks all have the same tokens and take equal shares; ranks with pieces of
        the same experts take the same share."""
        num_shares = self.tp_group.size() // self.groups.tp.size()
        share = self.tp_group.rank() // self.groups.tp.size()
        return num_tokens * share // num_shares, num_tokens * (share + 1) // num_shares
