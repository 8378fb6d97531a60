"""Qwen 2 and 3: attention, in later layers within windows, and an MLP or experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import (
    Adapter,
    Shapes,
    TensorMap,
    TensorNames,
    language_part,
)
from megatron_hybrid.checkpoints.huggingface.layouts import same, transposed
from megatron_hybrid.models.config.hybrid_config import HybridConfig


def _with_window(hf: Mapping[str, Any], **left_out: Any) -> dict[str, Any]:
    """A config.json with what it leaves out, and no window where it does not use one."""
    hf = {"sliding_window": 4096, **left_out, **hf}
    return hf if hf.get("use_sliding_window") else {**hf, "sliding_window": None}


def _mixers(hf: Mapping[str, Any]) -> str | None:
    """* or W for each of their layers."""
    if hf.get("layer_types"):
        return fields.windows(hf, "full_attention", 1)
    if hf["sliding_window"] is None:
        return None
    num_layers = fields.required(hf, "num_hidden_layers")
    num_full = min(hf.get("max_window_layers", 28), num_layers)
    return "*" * num_full + "W" * (num_layers - num_full)


class Qwen2(Adapter):
    """`Qwen2ForCausalLM`, also in `Qwen2_5_VLForConditionalGeneration`, and with an MTP head that
    is not read `MiMoForCausalLM`: biases in the projections of queries, keys and values."""

    model_types = ("qwen2", "mimo", "qwen2_5_vl_text")
    composite_types = ("qwen2_5_vl",)
    names = TensorNames(tensors.TRANSFORMER)
    ignored = (r"model\.mtp_layers\..*", r"(model\.)?visual\..*")

    def text_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Adapter.text_config`; older files have no object of the language model alone."""
        if hf["model_type"] not in self.composite_types:
            return super().text_config(hf)
        part = language_part(hf) or {
            key: hf[key] for key in hf.keys() - {"architectures", "vision_config"}
        }
        part = {**part, "model_type": self.model_types[0]}
        if (part.get("rope_scaling") or {}).get("type") == "mrope":  # of a text it is plain RoPE
            del part["rope_scaling"]
        return super().text_config({**hf, "text_config": part})

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = _with_window(hf, num_key_value_heads=32)
        return {**fields.transformer(hf, _mixers(hf)), "add_qkv_bias": True}


class Qwen3(Adapter):
    """`Qwen3ForCausalLM`, also in `Qwen3VLForConditionalGeneration`: norms of queries and keys."""

    model_types = ("qwen3", "qwen3_vl_text")
    composite_types = ("qwen3_vl",)
    names = TensorNames(tensors.TRANSFORMER)
    ignored = (r"model\.visual\..*",)

    def text_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Adapter.text_config`: the language model is Qwen 3, and written as such."""
        return {**super().text_config(hf), "model_type": self.model_types[0]}

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = _with_window(hf, num_key_value_heads=32, head_dim=128)
        found = fields.transformer(hf, _mixers(hf), attention_bias=hf.get("attention_bias"))
        return {**found, "qk_layernorm": True}


def _experts(hf: Mapping[str, Any], number: int, topk: int, width: int) -> dict[str, Any]:
    return {
        "num_moe_experts": hf.get("num_experts", hf.get("num_local_experts", number)),
        "moe_router_topk": hf.get("num_experts_per_tok", topk),
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        "moe_ffn_hidden_size": hf.get("moe_intermediate_size", width),
    }


class Qwen3Moe(Qwen3):
    """`Qwen3MoeForCausalLM`, also in `Qwen3VLMoeForConditionalGeneration`: experts."""

    model_types = ("qwen3_moe", "qwen3_vl_moe_text")
    composite_types = ("qwen3_vl_moe",)

    def as_found(self, tensor_map: TensorMap, config: HybridConfig, shapes: Shapes) -> TensorMap:
        """See `Adapter.as_found`: beside a vision model the experts of a layer lie in two tensors,
        whose rows are inputs."""
        experts, found, _ = tensor_map.theirs[0].partition(".experts.0.")
        is_fc1 = len(tensor_map.theirs) > config.num_moe_experts
        stacked = f"{experts}.experts.{'gate_up_proj' if is_fc1 else 'down_proj'}"
        if found and stacked in shapes:
            return same(tensor_map.ours[0], stacked, transposed())
        return tensor_map

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = _with_window(hf, num_key_value_heads=4, intermediate_size=6144)
        mixers = fields.windows_everywhere(hf)
        bias = hf.get("attention_bias")
        found = fields.transformer(hf, mixers, fields.sparse_mlps(hf), attention_bias=bias)
        return {**found, "qk_layernorm": True, **_experts(hf, 128, 8, 768)}


class Qwen2Moe(Adapter):
    """`Qwen2MoeForCausalLM`: experts, and one that is shared."""

    model_types = ("qwen2_moe",)
    moe = partial(tensors.moe, shared="shared_expert")
    names = TensorNames({**tensors.TRANSFORMER, "E": ("mlp", moe)})

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, use_sliding_window=False)
        hf = _with_window(hf, num_key_value_heads=16, intermediate_size=5632)
        shared = hf.get("shared_expert_intermediate_size", 5632)
        return {
            **fields.transformer(hf, _mixers(hf), fields.sparse_mlps(hf)),
            "add_qkv_bias": hf.get("qkv_bias", True),
            **_experts(hf, 60, 4, 1408),
            "moe_shared_expert_intermediate_size": shared,
            "moe_shared_expert_gate": True,
        }
