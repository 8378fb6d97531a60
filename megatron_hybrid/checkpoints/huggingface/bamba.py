"""Bamba: Mamba-2 and attention layers, each followed by a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames


class Bamba(Adapter):
    """`BambaForCausalLM`."""

    model_types = ("bamba",)
    names = TensorNames(
        {
            "M": ("mamba", tensors.mamba2),
            "*": ("self_attn", tensors.attention),
            "-": ("feed_forward", tensors.mlp),
        },
        norms=("input_layernorm", "pre_ff_layernorm"),
        final_norm="model.final_layernorm.weight",
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, **hf}
        fields.only(hf, hidden_act=("silu", "swish"))  # it is that of the convolution, too
        heads = fields.attention({"num_key_value_heads": 8, **hf})
        attention = hf.get("attn_layer_indices") or ()
        num_layers = fields.required(hf, "num_hidden_layers")
        symbols = ["*" if i in attention else "M" for i in range(num_layers)]
        found = {
            **fields.model(hf),
            **heads,
            **fields.rotary(hf, partial=True),
            **fields.mamba2(hf, hf["rms_norm_eps"]),
            "layer_pattern": "".join(f"{symbol}-" for symbol in symbols),
            "ffn_hidden_size": fields.required(hf, "intermediate_size"),
            "activation_func": fields.activation(hf),
            "add_bias_linear": hf.get("mlp_bias", False),
        }
        if (rotary_dim := hf.get("attn_rotary_emb")) is not None:
            # The released files' own key; transformers passes over it and rotates half.
            found["rotary_percent"] = rotary_dim / heads["kv_channels"]
        if "*" in symbols:
            biases = {"add_bias_linear": hf.get("attention_bias", False)}
            found["layer_overrides"] = {"*": biases}
        return found
