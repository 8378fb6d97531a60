"""Falcon-H1: attention and Mamba-2 side by side in each layer, then a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.models.config.hybrid_config import HybridConfig


def _mixer_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    yield from tensors.attention(config, f"{ours}.attention", f"{theirs}.self_attn")
    yield from tensors.mamba2(config, f"{ours}.mamba", f"{theirs}.mamba")


class FalconH1(Adapter):
    """`FalconH1ForCausalLM`."""

    model_types = ("falcon_h1",)
    names = TensorNames(
        {"H": ("", _mixer_tensors), "-": ("feed_forward", tensors.mlp)},
        norms=("input_layernorm", "pre_ff_layernorm"),
        final_norm="model.final_layernorm.weight",
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"rms_norm_eps": 1e-5, "mamba_d_ssm": 1024, "num_key_value_heads": 8, **hf}
        # The activation is that of the convolution, too; the biases are those of the projections
        # into and out of the Mamba-2 part.
        fields.only(
            hf,
            hidden_act=("silu", "swish"),
            projectors_bias=hf.get("mamba_proj_bias", False),
            attn_layer_indices=None,
            mamba_use_mlp=True,
        )
        gate, down = hf.get("mlp_multipliers") or (1.0, 1.0)
        found = fields.transformer(hf, "H" * fields.required(hf, "num_hidden_layers"))
        return {
            **found,
            **fields.mamba2(hf, hf["rms_norm_eps"]),
            "layer_overrides": {"H": {"add_bias_linear": hf.get("attention_bias", False)}},
            "embedding_multiplier": hf.get("embedding_multiplier", 1.0),
            "logits_multiplier": hf.get("lm_head_multiplier", 1.0),
            # A factor of the keys is one of the scores.
            "softmax_scale": hf.get("key_multiplier", 1.0) * found["kv_channels"] ** -0.5,
            "attention_input_multiplier": hf.get("attention_in_multiplier", 1.0),
            "attention_output_multiplier": hf.get("attention_out_multiplier", 1.0),
            "mamba_input_multiplier": hf.get("ssm_in_multiplier", 1.0),
            "mamba_output_multiplier": hf.get("ssm_out_multiplier", 1.0),
            "mamba_section_multipliers": hf.get("ssm_multipliers") or [1.0] * 5,
            "mamba_gated_norm": _gated_norm(hf),
            "add_bias_linear": hf.get("mlp_bias", False),
            "mlp_gate_multiplier": gate,
            "mlp_output_multiplier": down,
        }


def _gated_norm(hf: Mapping[str, Any]) -> str:
    if not hf.get("mamba_rms_norm", False):
        return "none"
    return "norm_first" if hf.get("mamba_norm_before_gate", True) else "gate_first"
