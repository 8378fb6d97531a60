"""Bamba: Mamba-2 and attention layers, each followed by a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap
from megatron_hybrid.checkpoints.huggingface.fields import (
    activation,
    attention_fields,
    mamba2_fields,
    model_fields,
    only,
    required,
    rotary_fields,
)
from megatron_hybrid.checkpoints.huggingface.tensors import (
    attention_tensors,
    layer_tensors,
    mamba2_tensors,
    mlp_tensors,
    model_tensors,
)
from megatron_hybrid.models.config.hybrid_config import HybridConfig


class Bamba(Adapter):
    """`BambaForCausalLM`."""

    model_types = ("bamba",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, **hf}
        only(hf, hidden_act=("silu", "swish"))  # it is that of the convolution, too
        heads = attention_fields({"num_key_value_heads": 8, **hf})
        attention = hf.get("attn_layer_indices") or ()
        symbols = ["*" if i in attention else "M" for i in range(required(hf, "num_hidden_layers"))]
        fields = {
            **model_fields(hf),
            **heads,
            **rotary_fields(hf, partial=True),
            **mamba2_fields(hf, hf["rms_norm_eps"]),
            "layer_pattern": "".join(f"{symbol}-" for symbol in symbols),
            "ffn_hidden_size": required(hf, "intermediate_size"),
            "activation_func": activation(hf),
            "add_bias_linear": hf.get("mlp_bias", False),
        }
        if (rotary_dim := hf.get("attn_rotary_emb")) is not None:
            # The released files' own key; transformers passes over it and rotates half.
            fields["rotary_percent"] = rotary_dim / heads["kv_channels"]
        if "*" in symbols:
            biases = {"add_bias_linear": hf.get("attention_bias", False)}
            fields["layer_overrides"] = {"*": biases}
        return fields

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from model_tensors(config, norm="model.final_layernorm.weight")
        parts = {
            "M": ("mamba", mamba2_tensors),
            "*": ("self_attn", attention_tensors),
            "-": ("feed_forward", mlp_tensors),
        }
        yield from layer_tensors(config, parts, ("input_layernorm", "pre_ff_layernorm"))
