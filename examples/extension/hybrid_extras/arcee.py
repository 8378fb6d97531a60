"""Arcee, a Transformer with plain MLPs, from Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames


class Arcee(Adapter):
    """`ArceeForCausalLM`."""

    model_types = ("arcee",)
    names = TensorNames({"*": ("self_attn", tensors.attention), "-": ("mlp", tensors.mlp)})

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, attention_bias=False, mlp_bias=False)
        return {
            **fields.model(hf),
            **fields.attention(hf),
            **fields.rotary(hf),
            "gated_linear_unit": False,
            "layer_pattern": "*-" * fields.required(hf, "num_hidden_layers"),
            "ffn_hidden_size": fields.required(hf, "intermediate_size"),
            "activation_func": fields.activation(hf, default="relu2"),
        }
