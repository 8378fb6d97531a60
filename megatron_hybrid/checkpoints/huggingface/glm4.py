"""GLM-4 and GLM-4.5: RoPE over half of a head; sandwich norms, or experts as in DeepSeek-V3."""

from collections.abc import Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames
from megatron_hybrid.checkpoints.huggingface.deepseek_v3 import DeepseekV3


class Glm4(Adapter):
    model_types = ("glm4",)
    names = TensorNames(
        {**tensors.TRANSFORMER, "-": ("mlp", tensors.joined_mlp)},
        post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        left_out = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07}
        hf = {**left_out, "partial_rotary_factor": 0.5, **hf}
        return {
            **fields.transformer(hf, partial=True),
            "add_qkv_bias": hf.get("attention_bias", True),
            "norm_placement": "sandwich",
            "rotary_interleaved": True,
        }


class Glm4Moe(DeepseekV3):
    model_types = ("glm4_moe",)
    names = TensorNames(tensors.TRANSFORMER)
    mixer = "*"

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        left_out = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1}
        groups = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
        sizes = {"n_routed_experts": 128, "moe_intermediate_size": 1408}
        hf = {**left_out, **groups, **sizes, "partial_rotary_factor": 0.5, **hf}
        fields.only(hf, norm_topk_prob=True)
        mlps = self._mlps(hf)
        return {
            **fields.transformer(hf, mlps=mlps, partial=True),
            "add_qkv_bias": hf.get("attention_bias", False),
            "qk_layernorm": hf.get("use_qk_norm", False),
            **self._experts(hf, mlps),
        }
