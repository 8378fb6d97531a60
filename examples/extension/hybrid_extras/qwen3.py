"""Qwen3, a Transformer with norms of queries and keys, from Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames


class Qwen3(Adapter):
    """`Qwen3ForCausalLM` without sliding windows."""

    model_types = ("qwen3",)
    names = TensorNames({"*": ("self_attn", tensors.attention), "-": ("mlp", tensors.mlp)})

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, use_sliding_window=False, attention_bias=False)
        return {
            **fields.model(hf),
            **fields.attention({"head_dim": 128, **hf}),
            **fields.rotary(hf),
            "qk_layernorm": True,
            "layer_pattern": "*-" * fields.required(hf, "num_hidden_layers"),
            "ffn_hidden_size": fields.required(hf, "intermediate_size"),
            "activation_func": fields.activation(hf),
        }
