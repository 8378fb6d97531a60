"""Granite 3: Llama, or its attention and experts, with factors (MuP)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import same
from megatron_hybrid.models.config.hybrid_config import HybridConfig


def multipliers(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The factors of embeddings, residuals, scores and logits."""
    return {
        "embedding_multiplier": hf.get("embedding_multiplier", 1.0),
        "logits_multiplier": 1.0 / hf.get("logits_scaling", 1.0),
        "residual_multiplier": hf.get("residual_multiplier", 1.0),
        "softmax_scale": hf.get("attention_multiplier", 1.0),
    }


def experts(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    """Gate and value lie in one tensor, and experts in one, on both sides."""
    yield same(f"{ours}.router.weight", f"{theirs}.router.layer.weight")
    yield same(f"{ours}.experts.linear_fc1.weight", f"{theirs}.input_linear.weight")
    yield same(f"{ours}.experts.linear_fc2.weight", f"{theirs}.output_linear.weight")


class Granite(Adapter):
    """`GraniteForCausalLM`."""

    model_types = ("granite",)
    names = TensorNames(tensors.TRANSFORMER)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        biases = {key: hf.get(key) for key in ("attention_bias", "mlp_bias")}
        return {**fields.transformer(hf, **biases), **multipliers(hf)}


class GraniteMoe(Adapter):
    """`GraniteMoeForCausalLM`."""

    model_types = ("granitemoe",)
    names = TensorNames({**tensors.TRANSFORMER, "E": ("block_sparse_moe", experts)})

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        mlps = "E" * fields.required(hf, "num_hidden_layers")
        return {
            **fields.transformer(hf, mlps=mlps, attention_bias=hf.get("attention_bias")),
            **multipliers(hf),
            "num_moe_experts": hf.get("num_local_experts", 8),
            "moe_router_topk": hf.get("num_experts_per_tok", 2),
            "moe_ffn_hidden_size": fields.required(hf, "intermediate_size"),
        }
