"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), with the parameters of
core's MLASelfAttention."""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_specs import build_norm
from megatron_hybrid.models.mixers.base import (
    KVShape,
    LayerCache,
    Mixer,
    MixerPlace,
    rank_generator,
)
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import (
    ReplicatedLinear,
    build_input_projection,
    build_output_projection,
)
from megatron_hybrid.models.mixers.rotary import build_rotary
from megatron_hybrid.models.packed_weight import unpacked
from megatron_hybrid.models.recompute import is_selected, recompute_if
from megatron_hybrid.models.sharding.collectives import gather_rows
from megatron_hybrid.ops import AttentionPattern, activate
from megatron_hybrid.ops.linear import full_rows


class LatentAttentionMixer(Mixer):
    """Causal attention with keys and values computed from one short latent vector per token.

    With a latent c_t (`kv_lora_rank` wide), a head's key is [W_uk c_t, r_t] and its value W_uv c_t;
    r_t, which RoPE rotates, is the same for all heads. Only [c_t, r_t] is cached: as a head's
    q . (W_uk c) is (q W_uk) . c, cached attention runs on the latents, with one key/value head, and
    applies W_uv afterwards (the "absorbed" form of the same function). Heads are split over the
    tensor-parallel ranks, the latent is replicated.
    """

    recompute_name = "attention"
    training_fields = ("attention_dropout",)
    recompute_parts = ("core_attn", "mla_up_proj")

    splits_rows = True

    def __init__(self, config: HybridConfig, place: MixerPlace):
        super().__init__(config)
        self.layer_number = place.layer_number
        # The projection lies inside of attention, so that one is not recomputed without the other.
        self.recomputes_attention = is_selected(config, "core_attn", "mla_up_proj")
        self.tp_group = place.pg_collection.tp
        self.num_heads = config.num_attention_heads // self.tp_group.size()
        self.rank = config.kv_lora_rank
        self.head_dims = [config.qk_head_dim, config.qk_pos_emb_head_dim]
        self.value_dim = config.v_head_dim
        self.pattern = AttentionPattern(
            config.softmax_scale or sum(self.head_dims) ** -0.5,
            softcap=config.attention_logit_softcap,
        )
        self.training_pattern = replace(self.pattern, dropout=config.attention_dropout)
        self.rotary = build_rotary(config, config.qk_pos_emb_head_dim)

        def up_projection(config: HybridConfig, input_size: int, width: int):
            spec, widths = place.submodules.column, (config.num_attention_heads * width,)
            groups = place.pg_collection
            return build_input_projection(spec, config, widths, groups, input_size=input_size)

        def norm(width: int):
            if not config.latent_norm:
                return IdentityOp()
            return build_norm(config, width, config.latent_norm_epsilon)

        if config.q_lora_rank is None:
            self.linear_q_proj = up_projection(config, config.hidden_size, sum(self.head_dims))
        else:
            self.linear_q_down_proj = ReplicatedLinear(
                config, config.hidden_size, config.q_lora_rank
            )
            self.q_layernorm = norm(config.q_lora_rank)
            for parameter in self.q_layernorm.parameters():
                # Its gradient is whole on each rank, but under sequence parallelism. core's
                # finalize_model_grads would sum those of all ranks, as a norm of each rank's own
                # heads in `*` layers has this name too.
                parameter.average_gradients_across_tp_domain = not config.sequence_parallel
            self.linear_q_up_proj = up_projection(config, config.q_lora_rank, sum(self.head_dims))
        self.linear_kv_down_proj = ReplicatedLinear(
            config, config.hidden_size, self.rank + config.qk_pos_emb_head_dim
        )
        self.kv_layernorm = norm(self.rank)
        # What is cached are the latents of all rows.
        self.linear_kv_up_proj = up_projection(
            config.with_all_rows(), self.rank, config.qk_head_dim + self.value_dim
        )
        if config.latent_output_gate:
            self.linear_gate = up_projection(config, config.hidden_size, 1)
        outputs = config.num_attention_heads * self.value_dim
        self.linear_proj = build_output_projection(
            place, config, outputs, bias=config.add_bias_linear
        )

    def cache_requirements(self) -> LayerCache:
        """Describe the cached latents: keys of one head, which contain its values."""
        return LayerCache(kv=KVShape(1, self.rank + self.head_dims[1], value_dim=0))

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], bias or None)."""
        if self.config.q_lora_rank is None:
            q, _ = self.linear_q_proj(hidden_Th)
        else:
            q, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_Th)))
        q_nope, q_rope = q.unflatten(-1, (self.num_heads, -1)).split(self.head_dims, -1)
        latent, k_rope = self.linear_kv_down_proj(hidden_Th).split(
            [self.rank, self.head_dims[1]], -1
        )
        latents_TL = torch.cat((self.kv_layernorm(latent), k_rope), -1)
        if self.config.sequence_parallel:
            latents_TL = gather_rows(latents_TL, self.tp_group, whole_gradient=True)
        if self.rotary is not None:
            layout, positions_T = context.ragged_layout(), context.token_positions()
            cos_sin = self.rotary.cos_sin_of_batch(layout, positions_T, q_rope.dtype)
            q_rope = self.rotary.rotate(q_rope, cos_sin)
            latent, k_rope = latents_TL.split([self.rank, self.head_dims[1]], -1)
            k_rope = self.rotary.rotate(k_rope.unsqueeze(1), cos_sin)
            latents_TL = torch.cat((latent, k_rope.squeeze(1)), -1)
        q_THD = torch.cat((q_nope, q_rope), -1)
        pattern = self.training_pattern if self.training else self.pattern
        args = self.layer_number, q_THD, latents_TL, self, pattern
        with rank_generator(pattern.dropout > 0):
            o_THP = recompute_if(self.recomputes_attention, self, context.attend_latents, *args)
        if self.config.latent_output_gate:
            gate_TH, _ = self.linear_gate(hidden_Th)
            gate_THP = gate_TH.unsqueeze(-1).expand_as(o_THP)
            o_THP = activate(gate_THP, torch.sigmoid, o_THP, in_fp32=True)
        return self.linear_proj(o_THP.flatten(1))

    def expand(self, latents_TL: Tensor) -> tuple[Tensor, Tensor]:
        """See `LatentHeads`."""
        latent, k_rope = latents_TL.split([self.rank, self.head_dims[1]], -1)
        kv, _ = self.linear_kv_up_proj(latent)
        kv = kv.unflatten(-1, (self.num_heads, -1))
        k_nope, v_THP = kv.split([self.head_dims[0], self.value_dim], -1)
        # Each rank's heads give k_rope a part of its gradient, as the projection gives the latent.
        k_rope = copy_to_tensor_model_parallel_region(k_rope, group=self.tp_group)
        k_THD = torch.cat((k_nope, k_rope.unsqueeze(1).expand(-1, self.num_heads, -1)), -1)
        return k_THD, v_THP

    def training_reasons(self) -> tuple[str, ...]:
        """Add that latent attention has two forms."""
        form = "latent attention runs on latents where these are cached, else on heads"
        return form, *super().training_reasons()

    def absorb(self, q_THD: Tensor) -> Tensor:
        """See `LatentHeads`."""
        q_nope, q_rope = q_THD.split(self.head_dims, -1)
        keys, _ = self._up_weights()
        q_latent = torch.einsum("thn,hnr->thr", full_rows(q_nope), keys)[: len(q_nope)]
        return torch.cat((q_latent, q_rope), -1)

    def values(self, o_THr: Tensor) -> Tensor:
        """See `LatentHeads`."""
        _, values = self._up_weights()
        return torch.einsum("thr,hpr->thp", full_rows(o_THr), values)[: len(o_THr)]

    def _up_weights(self) -> tuple[Tensor, Tensor]:
        """Return W_uk [H, n, r] and W_uv [H, P, r]."""
        weight = unpacked(self.linear_kv_up_proj.weight).unflatten(0, (self.num_heads, -1))
        return weight.split([self.head_dims[0], self.value_dim], 1)
