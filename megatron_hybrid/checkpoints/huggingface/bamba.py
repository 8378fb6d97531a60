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
        left_out = {"num_key_value_heads": 8, "partial_rotary_factor": 0.5}
        hf = {"rms_norm_eps": 1e-5, **left_out, **hf}
        fields.only(hf, hidden_act=("silu", "swish"))  # it is that of the convolution, too
        attention = hf.get("attn_layer_indices") or ()
        numbers = range(fields.required(hf, "num_hidden_layers"))
        mixers = "".join("*" if i in attention else "M" for i in numbers)
        biases = {f"{name}_bias": hf.get(f"{name}_bias") for name in ("attention", "mlp")}
        found = {
            **fields.transformer(hf, mixers, partial=True, **biases),
            **fields.mamba2(hf, hf["rms_norm_eps"]),
        }
        if (rotary_dim := hf.get("attn_rotary_emb")) is not None:
            # The released files' own key; transformers passes over it and rotates half.
            found["rotary_percent"] = rotary_dim / found["kv_channels"]
        return found
