"""Llama 2 and 3: full attention and a gated MLP, the pure-attention control."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames


class Llama(Adapter):
    """`LlamaForCausalLM`."""

    model_types = ("llama",)
    names = TensorNames({"*": ("self_attn", tensors.attention), "-": ("mlp", tensors.mlp)})
    ignored = (r".*\.rotary_emb\.inv_freq",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **fields.model(hf),
            **fields.attention(hf),
            **fields.rotary(hf),
            "layer_pattern": "*-" * fields.required(hf, "num_hidden_layers"),
            "ffn_hidden_size": fields.required(hf, "intermediate_size"),
            "activation_func": fields.activation(hf),
            "layer_overrides": {
                symbol: {"add_bias_linear": True}
                for symbol, key in (("*", "attention_bias"), ("-", "mlp_bias"))
                if hf.get(key)
            },
        }
