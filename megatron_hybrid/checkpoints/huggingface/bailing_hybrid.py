"""Ling 3: Kimi Delta Attention and gated latent attention, with experts after both."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import TensorNames
from megatron_hybrid.checkpoints.huggingface.deepseek_v3 import DeepseekV3
from megatron_hybrid.checkpoints.huggingface.kimi_linear import MIXERS, delta_attention_tensors

_AS_DEEPSEEK = {
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "num_shared_experts": "n_shared_experts",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
}
"""Their keys -> those of DeepSeek-V3."""


class BailingHybrid(DeepseekV3):
    """`BailingHybridForCausalLM`. Its MTP head is not read."""

    model_types = ("bailing_hybrid",)
    names = TensorNames(
        {
            "K": ("attention", partial(delta_attention_tensors, output="dense")),
            "+": ("attention", partial(tensors.latent_attention, output="dense")),
            "-": ("mlp", tensors.mlp),
            "E": ("mlp", partial(tensors.moe, expert_bias="gate.expert_bias")),
        },
        embedding="model.word_embeddings.weight",
    )
    module_names = (
        (r"\bword_embeddings\b", "embed_tokens"),
        (r"\.attention\.", ".self_attn."),
        (r"self_attn\.f_proj\b", "self_attn.forget_gate.f_proj"),
        (r"self_attn\.dense\b", "self_attn.o_proj"),
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, moe_renormalize=True, rope_interleave=True)
        if (known := hf.get("architectures")) == ["BailingMoeV2_5ForCausalLM"]:
            raise ValueError(
                f"config.json has architectures={known}, which is Ling 2.5 or Ring 2.5, of "
                "lightning attention with RoPE; of 'bailing_hybrid', only Ling 3 is supported"
            )
        hf = {"rope_theta": 6_000_000.0, "moe_intermediate_size": 768, **hf}
        hf = {"num_experts": 512, "num_shared_experts": 1, "q_lora_rank": None, **hf}
        hf |= {other: hf[key] for key, other in _AS_DEEPSEEK.items() if key in hf}
        head_dim = hf.get("linear_head_dim", hf.get("head_dim", 128))
        heads = fields.required(hf, "num_attention_heads")
        return {
            **super().config(hf),
            "latent_output_gate": True,
            "kda_low_rank_gates": False,
            "kda_fp32_conv": True,
            "kda_decay_bound": hf.get("kda_lower_bound", -5.0)
            if hf.get("kda_safe_gate", True)
            else None,
            "linear_num_key_heads": hf.get("linear_num_heads", heads),
            "linear_key_head_dim": head_dim,
            "linear_value_head_dim": head_dim,
            "linear_conv_kernel_dim": hf.get("short_conv_kernel_size", 4),
        }

    def _mixers(self, hf: Mapping[str, Any]) -> str:
        period = hf.get("layer_group_size", 6)
        types = fields.layer_types(hf, "linear_attention", period)
        return "".join(fields.symbols_of(types, MIXERS, hf["num_hidden_layers"]))

    def _mlps(self, hf: Mapping[str, Any]) -> str:
        return fields.dense_mlps_first(hf, 2)

    def prediction_layers(self, hf: Mapping[str, Any], names: Collection[str] | None) -> str:
        return ""
