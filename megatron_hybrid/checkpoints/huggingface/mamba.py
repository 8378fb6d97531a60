"""Mamba-1, FalconMamba, which norms dt, B and C, and Mamba-2: nothing but such layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames


class Mamba(Adapter):
    """`MambaForCausalLM` and `FalconMambaForCausalLM`."""

    model_types = ("mamba", "falcon_mamba")
    names = TensorNames(
        {"S": ("mixer", tensors.mamba1), "M": ("mixer", tensors.mamba2)},
        norms=("norm",),
        layers="backbone.layers",
        embedding="backbone.embeddings.weight",
        final_norm="backbone.norm_f.weight",
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Adapter.config`. `residual_in_fp32` is how transformers adds up in half precision;
        here the residual stream has the dtype of the model."""
        defaults = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
        hf = {**defaults, "initializer_range": 0.1, **hf}
        fields.only(hf, hidden_act=("silu", "swish"))
        width = int(hf.get("expand", 2) * fields.required(hf, "hidden_size"))
        return {
            **fields.model(hf, "layer_norm_epsilon"),
            "layer_pattern": "S" * fields.required(hf, "num_hidden_layers"),
            "mamba1_inner_size": hf.get("intermediate_size") or width,
            "mamba1_state_dim": hf.get("state_size", 16),
            "mamba1_dt_rank": fields.dt_rank(hf, "time_step_rank"),
            "mamba1_conv_kernel": hf.get("conv_kernel", 4),
            "mamba1_conv_bias": hf.get("use_conv_bias", True),
            "mamba1_proj_bias": hf.get("use_bias", False),
            "mamba1_norm": "weightless" if hf["model_type"] == "falcon_mamba" else "none",
            "mamba1_norm_epsilon": hf.get("mixer_rms_eps", 1e-6),
        }


class Mamba2(Mamba):
    """`Mamba2ForCausalLM`."""

    model_types = ("mamba2",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Adapter.config`. `residual_in_fp32` is how transformers adds up in half precision;
        here the residual stream has the dtype of the model."""
        hf = {"layer_norm_epsilon": 1e-5, "initializer_range": 0.1, **hf}
        fields.only(hf, hidden_act=("silu", "swish"))
        heads, head_dim = fields.required(hf, "num_heads"), hf.get("head_dim", 64)
        if heads * head_dim != hf.get("expand", 2) * fields.required(hf, "hidden_size"):
            raise ValueError(
                f"config.json has num_heads={heads} and head_dim={head_dim}, which do not make up "
                "the inner width expand * hidden_size"
            )
        return {
            **fields.model(hf, "layer_norm_epsilon"),
            "layer_pattern": "M" * fields.required(hf, "num_hidden_layers"),
            "mamba_num_heads": heads,
            "mamba_head_dim": head_dim,
            "mamba_num_groups": hf.get("n_groups", 8),
            "mamba_state_dim": hf.get("state_size", 128),
            "mamba_conv_kernel": hf.get("conv_kernel", 4),
            "mamba_chunk_size": hf.get("chunk_size", 256),
            "mamba_conv_bias": hf.get("use_conv_bias", True),
            "mamba_proj_bias": hf.get("use_bias", False),
            "mamba_norm_epsilon": hf["layer_norm_epsilon"],
            **fields.time_steps(hf),
        }
