"""Mixtures of experts: a router and routed experts, next to a shared expert or a whole MLP."""

from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_specs import build_norm
from megatron_hybrid.models.mixers.base import Mixer, MixerPlace, with_bias
from megatron_hybrid.models.mixers.experts import Experts
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.mlp import MLPMixer
from megatron_hybrid.models.mixers.projections import ReplicatedLinear, replicated_weight
from megatron_hybrid.models.mixers.router import TRAINING_FIELDS, Router
from megatron_hybrid.models.recompute import is_selected, recompute_if
from megatron_hybrid.ops.activations import sigmoid
from megatron_hybrid.ops.checks import compute_dtype


class MoEMixer(Mixer):
    """sum_e weight_e(x) MLP_e(x) over the chosen experts e, plus the shared expert's MLP(x).

    Parameter names are megatron-core's, but where that has one parameter per expert
    (`experts.local_experts.0.linear_fc1.weight`), here they are stacked
    (`experts.linear_fc1.weight`, [E, out, in]).
    """

    recompute_name = "moe"
    training_fields, has_experts = TRAINING_FIELDS, True
    recompute_parts = ("shared_experts",)

    def __init__(self, config: HybridConfig, place: MixerPlace):
        super().__init__(config)
        self.recomputes_shared = is_selected(config, "shared_experts")
        self.router = Router(config, place.layer_number, place.pg_collection)
        self.experts = Experts(config, place.pg_collection)
        if (latent := config.moe_latent_size) is not None:
            self.fc1_latent_proj = ReplicatedLinear(config, config.hidden_size, latent)
            self.fc2_latent_proj = ReplicatedLinear(config, latent, config.hidden_size)
        self.shared_experts = (
            SharedExperts(config, place) if config.moe_shared_expert_intermediate_size else None
        )

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, None]:
        """Return (output [T, hidden], None); padding rows get the shared expert alone."""
        weights_nE, chosen_nE = self.router(hidden_Th, context)
        latent = self.config.moe_latent_size is not None
        x_Th = self.fc1_latent_proj(hidden_Th) if latent else hidden_Th
        y_Th = self.experts(x_Th, weights_nE, chosen_nE, context.same_tokens_on_expert_ranks)
        if latent:
            y_Th = self.fc2_latent_proj(y_Th)
        if self.shared_experts is not None:
            y_Th = y_Th + recompute_if(self.recomputes_shared, self, self.shared_experts, hidden_Th)
        return y_Th, None


class SharedExperts(MLPMixer):
    """The expert of every token, with or without a gate."""

    def __init__(self, config: HybridConfig, place: MixerPlace):
        config = copy(config)
        config.ffn_hidden_size = config.moe_shared_expert_intermediate_size
        if (limit := config.moe_shared_expert_clamp_value) is not None:
            config.activation_func_clamp_value = limit or None
        # The layer's norm is applied before, as the router needs it, too.
        place = place.with_input_projection(place.submodules.column)
        super().__init__(config, place)
        gate = replicated_weight(config, 1, config.hidden_size)
        self.register_parameter("gate_weight", gate if config.moe_shared_expert_gate else None)

    def forward(self, hidden_Th: Tensor) -> Tensor:
        """Run the shared expert, [T, hidden] -> [T, hidden]."""
        output_Th = with_bias(*super().forward(hidden_Th, None))
        if self.gate_weight is not None:
            # Not F.linear: over one column, the bits of a row would depend on the number of rows.
            weight_h = self.gate_weight.to(compute_dtype(hidden_Th))
            logits_T1 = (hidden_Th * weight_h).sum(-1, keepdim=True)
            output_Th = sigmoid(logits_T1).to(output_Th.dtype) * output_Th
        return output_Th


class DenseAndExpertsMixer(Mixer):
    """norm(MLP(norm(x))) + norm(experts(norm(x))); the router has a norm of x, too (Gemma 4)."""

    recompute_name = "moe"
    training_fields, has_experts = TRAINING_FIELDS, True

    def __init__(self, config: HybridConfig, place: MixerPlace):
        super().__init__(config)
        for name in ("dense", "experts"):
            for when in ("pre", "post"):
                self.add_module(f"{when}_{name}_layernorm", build_norm(config))
        place = place.with_input_projection(place.submodules.column)
        self.dense = MLPMixer(config, place)
        self.router = Router(config, place.layer_number, place.pg_collection)
        self.router_scale = nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))
        self.expert_scale = nn.Parameter(
            torch.ones(config.num_moe_experts, dtype=config.params_dtype)
        )
        self.experts = Experts(config, place.pg_collection)

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, None]:
        """Return (output [T, hidden], None); padding rows get the MLP alone."""
        dense_Th = with_bias(*self.dense(self.pre_dense_layernorm(hidden_Th), context))
        weights_nE, chosen_nE = self.router(self._router_input(hidden_Th), context)
        y_Th = self.experts(
            self.pre_experts_layernorm(hidden_Th),
            weights_nE * self.expert_scale.to(weights_nE.dtype),
            chosen_nE,
            context.same_tokens_on_expert_ranks,
        )
        return self.post_dense_layernorm(dense_Th) + self.post_experts_layernorm(y_Th), None

    def _router_input(self, hidden_Th: Tensor) -> Tensor:
        """Divide rows by the root of their mean square, and scale them."""
        size = hidden_Th.shape[-1]
        normed_Th = F.rms_norm(
            hidden_Th.to(compute_dtype(hidden_Th)), (size,), eps=self.config.layernorm_epsilon
        )
        return normed_Th.to(hidden_Th.dtype) * self.router_scale * size**-0.5
