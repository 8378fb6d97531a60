"""Router: the experts of each token, with the parameters and the routing function of core's
TopKRouter (whose class keeps its tensors on CUDA)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.projections import replicated_weight

_CORE_EPSILON = 1e-20  # what core adds to the sum of the chosen sigmoid scores


class Router(nn.Module):
    """Scores all experts in fp32 and takes the best `moe_router_topk` of them. Its parameters are
    fp32 in a bf16 model too: rounded weights would choose other experts.

    Args:
        config: its `moe_router_*` fields are used; with `add_bias_linear` the logits have a bias.
    """

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.config = config
        num_experts = config.num_moe_experts
        self.weight = replicated_weight(
            config, num_experts, config.hidden_size, dtype=torch.float32
        )
        if config.add_bias_linear:
            self.bias = nn.Parameter(torch.zeros(num_experts))
        else:
            self.register_parameter("bias", None)
        if config.moe_router_enable_expert_bias:
            # core's finalize_model_grads updates the first by the counts in the second.
            self.register_buffer("expert_bias", torch.zeros(num_experts))
            self.register_buffer("local_tokens_per_expert", torch.zeros(num_experts), False)

    def forward(self, hidden_Th: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The weight of each expert for each token, fp32 [n, E], and the chosen ones, bool [n, E].

        Args:
            hidden_Th: all rows, with padding, so that a row's bits do not depend on their number.
            num_tokens: n, the number of leading rows that are tokens.
        """
        config = self.config
        bias = None if self.bias is None else self.bias.float()
        logits_TE = F.linear(hidden_Th.float(), self.weight.float(), bias)
        expert_bias = self.expert_bias.float() if config.moe_router_enable_expert_bias else None
        weights_TE, chosen_TE = topk_routing_with_score_function(
            logits_TE,
            config.moe_router_topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=config.moe_router_score_function,
            expert_bias=expert_bias,
        )
        if config.moe_router_topk_epsilon > _CORE_EPSILON:
            sums = (logits_TE.sigmoid() * chosen_TE).sum(-1, keepdim=True)
            weights_TE = weights_TE * (sums / (sums + config.moe_router_topk_epsilon))
        weights_nE, chosen_nE = weights_TE[:num_tokens], chosen_TE[:num_tokens]
        if expert_bias is not None and self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.local_tokens_per_expert += chosen_nE.sum(0)
        return weights_nE, chosen_nE
