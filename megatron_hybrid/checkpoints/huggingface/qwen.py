"""Qwen 2 and 3: attention, in later layers within windows, and an MLP or experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames


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
    """`Qwen2ForCausalLM`: biases in the projections of queries, keys and values."""

    model_types = ("qwen2",)
    names = TensorNames(tensors.TRANSFORMER)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = _with_window(hf, num_key_value_heads=32)
        return {**fields.transformer(hf, _mixers(hf)), "add_qkv_bias": True}


class Qwen3(Adapter):
    """`Qwen3ForCausalLM`: norms of queries and keys."""

    model_types = ("qwen3",)
    names = TensorNames(tensors.TRANSFORMER)

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


class Qwen3Moe(Adapter):
    """`Qwen3MoeForCausalLM`: experts."""

    model_types = ("qwen3_moe",)
    names = TensorNames(tensors.TRANSFORMER)

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
