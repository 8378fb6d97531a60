"""An MLP and a mixture of experts in parallel, each between its own norms (Gemma 4)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_specs import build_norm
from megatron_hybrid.models.mixers.base import Mixer, MixerPlace, with_bias
from megatron_hybrid.models.mixers.experts import Experts
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.mlp import MLPMixer
from megatron_hybrid.models.mixers.router import TRAINING_FIELDS, Router
from megatron_hybrid.ops.checks import compute_dtype


class DenseAndExpertsMixer(Mixer):
    """norm(MLP(norm(x))) + norm(experts(norm(x))); the router has a norm of x, too."""

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
        """[T, hidden] -> (output [T, hidden], None); padding rows get the MLP alone."""
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
        """Rows with a mean square of 1, scaled."""
        size = hidden_Th.shape[-1]
        normed_Th = F.rms_norm(
            hidden_Th.to(compute_dtype(hidden_Th)), (size,), eps=self.config.layernorm_epsilon
        )
        return normed_Th.to(hidden_Th.dtype) * self.router_scale * size**-0.5
