"""Mamba-1, FalconMamba, which norms dt, B and C, and Mamba-2: nothing but such layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap
from megatron_hybrid.checkpoints.huggingface.fields import (
    dt_rank,
    model_fields,
    only,
    required,
    time_step_fields,
)
from megatron_hybrid.checkpoints.huggingface.tensors import (
    layer_tensors,
    mamba1_tensors,
    mamba2_tensors,
    model_tensors,
)
from megatron_hybrid.models.config.hybrid_config import HybridConfig


class Mamba(Adapter):
    """`MambaForCausalLM` and `FalconMambaForCausalLM`."""

    model_types = ("mamba", "falcon_mamba")

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Adapter.config`. `residual_in_fp32` is how transformers adds up in half precision;
        here the residual stream has the dtype of the model."""
        defaults = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
        hf = {**defaults, "initializer_range": 0.1, **hf}
        only(hf, hidden_act=("silu", "swish"))
        width = int(hf.get("expand", 2) * required(hf, "hidden_size"))
        return {
            **model_fields(hf, "layer_norm_epsilon"),
            "layer_pattern": "S" * required(hf, "num_hidden_layers"),
            "mamba1_inner_size": hf.get("intermediate_size") or width,
            "mamba1_state_dim": hf.get("state_size", 16),
            "mamba1_dt_rank": dt_rank(hf, "time_step_rank"),
            "mamba1_conv_kernel": hf.get("conv_kernel", 4),
            "mamba1_conv_bias": hf.get("use_conv_bias", True),
            "mamba1_proj_bias": hf.get("use_bias", False),
            "mamba1_norm": "weightless" if hf["model_type"] == "falcon_mamba" else "none",
            "mamba1_norm_epsilon": hf.get("mixer_rms_eps", 1e-6),
        }

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from model_tensors(config, "backbone.embeddings.weight", "backbone.norm_f.weight")
        parts = {"S": ("mixer", mamba1_tensors), "M": ("mixer", mamba2_tensors)}
        yield from layer_tensors(config, parts, ("norm",), "backbone.layers")


class Mamba2(Mamba):
    """`Mamba2ForCausalLM`."""

    model_types = ("mamba2",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Adapter.config`. `residual_in_fp32` is how transformers adds up in half precision;
        here the residual stream has the dtype of the model."""
        hf = {"layer_norm_epsilon": 1e-5, "initializer_range": 0.1, **hf}
        only(hf, hidden_act=("silu", "swish"))
        heads, head_dim = required(hf, "num_heads"), hf.get("head_dim", 64)
        if heads * head_dim != hf.get("expand", 2) * required(hf, "hidden_size"):
            raise ValueError(
                f"config.json has num_heads={heads} and head_dim={head_dim}, which do not make up "
                "the inner width expand * hidden_size"
            )
        return {
            **model_fields(hf, "layer_norm_epsilon"),
            "layer_pattern": "M" * required(hf, "num_hidden_layers"),
            "mamba_num_heads": heads,
            "mamba_head_dim": head_dim,
            "mamba_num_groups": hf.get("n_groups", 8),
            "mamba_state_dim": hf.get("state_size", 128),
            "mamba_conv_kernel": hf.get("conv_kernel", 4),
            "mamba_chunk_size": hf.get("chunk_size", 256),
            "mamba_conv_bias": hf.get("use_conv_bias", True),
            "mamba_proj_bias": hf.get("use_bias", False),
            "mamba_norm_epsilon": hf["layer_norm_epsilon"],
            **time_step_fields(hf),
        }
