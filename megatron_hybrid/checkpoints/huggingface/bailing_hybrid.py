"""Ling 3: Kimi Delta Attention and gated latent attention, with experts after both; Ling 2.5:
lightning attention and latent attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import TensorNames
from megatron_hybrid.checkpoints.huggingface.deepseek_v3 import DeepseekV3
from megatron_hybrid.checkpoints.huggingface.kimi_linear import MIXERS, delta_attention_tensors
from megatron_hybrid.checkpoints.huggingface.lightning import lightning, lightning_fields

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
    has_partial_rotary = True
    names = TensorNames(
        {
            "K": ("attention", partial(delta_attention_tensors, output="dense")),
            "A": ("attention", lightning),
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
        hf = self._as_deepseek({"num_experts": 512, "moe_intermediate_size": 768, **hf})
        hf = {"rope_theta": 6_000_000.0, "q_lora_rank": None, **hf}
        if self._symbols(hf)["linear_attention"] == "A":
            found = {**super().config(hf), **lightning_fields(hf, self._mixers(hf))}
            found["layer_overrides"]["A"] = {"rotary_interleaved": False}
            return found
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

    def _as_deepseek(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json with DeepSeek-V3's keys."""
        width = (None, hf.get("moe_intermediate_size"))
        fields.only(hf, moe_shared_expert_intermediate_size=width)
        hf = {"num_shared_experts": 1, **hf}
        return hf | {other: hf[key] for key, other in _AS_DEEPSEEK.items() if key in hf}

    def _symbols(self, hf: Mapping[str, Any]) -> dict[str, str]:
        is_ling_2_5 = hf.get("architectures") == ["BailingMoeV2_5ForCausalLM"]
        return {**MIXERS, "linear_attention": "A"} if is_ling_2_5 else MIXERS

    def _mixers(self, hf: Mapping[str, Any]) -> str:
        number, period = fields.required(hf, "num_hidden_layers"), hf.get("layer_group_size", 6)
        types = list(fields.layer_types(hf, "linear_attention", period))
        if not hf.get("layer_types"):  # what is no whole group attends to all tokens
            types[number // period * period :] = ["full_attention"] * (number % period)
        return "".join(fields.symbols_of(types, self._symbols(hf), number))

    def _mlps(self, hf: Mapping[str, Any]) -> str:
        return fields.dense_mlps_first(hf, 2)

    def prediction_layers(self, hf: Mapping[str, Any], names: Collection[str] | None) -> str:
        return ""
