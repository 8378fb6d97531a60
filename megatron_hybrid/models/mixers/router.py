"""Router: the experts of each token, with the parameters and the routing function of core's
TopKRouter (whose class keeps its tensors on CUDA)."""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import (
    apply_router_token_dropping,
    topk_routing_with_score_function,
)
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.load_balancing import AuxiliaryLosses, is_counting
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import replicated_weight
from megatron_hybrid.ops.activations import sigmoid
from megatron_hybrid.ops.checks import compute_dtype
from megatron_hybrid.ops.linear import linear

TRAINING_FIELDS = (
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_router_force_load_balancing",
)
"""See `Mixer.training_fields`."""

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(nn.Module):
    """Scores all experts and takes the best `moe_router_topk` of them, in `moe_router_dtype`. Its
    parameters are fp32 in a bf16 model too: rounded weights would choose other experts.

    Args:
        config: its `moe_router_*` fields are used; with `add_bias_linear` the logits have a bias.
        layer_number: from 1, within the pipeline stage.
        pg_collection: process groups; see `AuxiliaryLosses`.
    """

    def __init__(
        self, config: HybridConfig, layer_number: int, pg_collection: ProcessGroupCollection
    ):
        super().__init__()
        self.config = config
        self._losses = AuxiliaryLosses(config, layer_number, pg_collection)
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

    def set_layer_number(self, layer_number: int) -> None:
        """Let core's tracker have the losses as those of this layer, from 1 in the whole model."""
        self._losses.layer_number = layer_number

    def reset_global_aux_loss_tracker(self) -> None:
        """Start anew, as core's finalize_model_grads asks at the end of each global batch."""
        self._losses.start_global_batch()

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor]:
        """Return the weight of each expert for each token, fp32 (fp64 of such tokens) [n, E], and
        the chosen ones, bool [n, E], `moe_router_topk` for each token. In training
        `moe_expert_capacity_factor` leaves some out; in evaluation and inference it does not, since
        a token's experts would depend on the others of its batch.

        Args:
            hidden_Th: n tokens, then padding rows, so that a row's bits do not depend on their
                number.
            context: the sequences of the tokens, and in training those that do not count.
        """
        num_tokens = context.ragged_layout().num_tokens
        if self.training and (eps := self.config.moe_input_jitter_eps):
            hidden_Th = hidden_Th * torch.empty_like(hidden_Th).uniform_(1 - eps, 1 + eps)
        dtype = _DTYPES.get(self.config.moe_router_dtype, hidden_Th.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits_TE = linear(hidden_Th.to(dtype), self.weight.to(dtype), bias)
        if self.training:
            weights_nE, chosen_nE = self._choose_in_training(logits_TE[:num_tokens], context)
        else:
            weights_TE, chosen_TE = self._choose(logits_TE)
            weights_nE, chosen_nE = weights_TE[:num_tokens], chosen_TE[:num_tokens]
        return weights_nE.to(compute_dtype(hidden_Th)), chosen_nE

    def _choose_in_training(
        self, logits_nE: Tensor, context: MixerContext
    ) -> tuple[Tensor, Tensor]:
        """Return the weights and the choice, [n, E], without pairs that are dropped, and with the
        losses attached."""
        config, has_losses = self.config, torch.is_grad_enabled()
        padding_n = context.padding_mask_T
        if padding_n is not None:
            padding_n = padding_n[: len(logits_nE)]
        logits_nE = self._forced(logits_nE)
        if has_losses:
            logits_nE = self._losses.attach_to_logits(logits_nE, padding_n)
        weights_nE, chosen_nE = self._choose(logits_nE)
        if config.moe_expert_capacity_factor is not None:
            weights_nE, chosen_nE = apply_router_token_dropping(
                weights_nE,
                chosen_nE,
                config.moe_router_topk,
                config.moe_expert_capacity_factor,
                config.moe_token_drop_policy,
            )
        if has_losses:
            weights_nE = self._losses.attach_to_weights(
                weights_nE, logits_nE, padding_n, context.ragged_layout()
            )
        if config.moe_router_enable_expert_bias and is_counting():
            counted_nE = chosen_nE if padding_n is None else chosen_nE & ~padding_n.unsqueeze(1)
            self.local_tokens_per_expert += counted_nE.sum(0)
        return weights_nE, chosen_nE

    def _choose(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each expert, and the chosen ones, bool, both [T, E]."""
        config = self.config
        by_sigmoid = config.moe_router_score_function == "sigmoid"
        has_bias = config.moe_router_enable_expert_bias
        by_scores = by_sigmoid or has_bias
        if by_scores:
            # core's own sigmoid gives a score other bits next to other rows, and its softmax takes
            # no bias. Its choice by the largest "logits" is that by scores. They are rounded once,
            # as by core 0.19.
            given, logits_TE = logits_TE, logits_TE.to(compute_dtype(logits_TE))
            scores_TE = sigmoid(logits_TE) if by_sigmoid else logits_TE.softmax(-1)
            logits_TE = scores_TE + self.expert_bias if has_bias else scores_TE
        weights_TE, chosen_TE = topk_routing_with_score_function(
            logits_TE,
            config.moe_router_topk,
            use_pre_softmax=config.moe_router_pre_softmax and not by_scores,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
        )
        if by_scores:
            weights_TE = scores_TE * chosen_TE
            if config.moe_router_topk > 1 and (by_sigmoid or not config.moe_router_pre_softmax):
                sums_T1 = weights_TE.sum(-1, keepdim=True)
                weights_TE = weights_TE / (sums_T1 + config.moe_router_topk_epsilon)
            if (factor := config.moe_router_topk_scaling_factor) is not None:
                weights_TE = weights_TE * factor
            weights_TE = weights_TE.type_as(given)
        return weights_TE, chosen_TE

    def _forced(self, logits_nE: Tensor) -> Tensor:
        """Return random logits where the config forces them, with the gradients of the given ones.
        torch's generator draws them, the same on all tensor-parallel ranks, which route the same
        tokens."""
        config = self.config
        deviation = config.moe_router_force_biased
        if deviation is None and not config.moe_router_force_load_balancing:
            return logits_nE
        random_nE = torch.randn_like(logits_nE)
        if deviation is not None:
            generator = None
            if deviation < 0:  # the same in each forward pass
                generator = torch.Generator(logits_nE.device)
                generator.manual_seed(self._losses.layer_number)
            bias_E = torch.empty_like(random_nE[0]).normal_(generator=generator)
            random_nE = random_nE + abs(deviation) * bias_E
        return random_nE + (logits_nE - logits_nE.detach())
