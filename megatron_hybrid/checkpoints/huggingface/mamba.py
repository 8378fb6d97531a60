"""Mamba-1 and FalconMamba, which norms dt, B and C: nothing but Mamba-1 layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap
from megatron_hybrid.checkpoints.huggingface.fields import dt_rank, model_fields, only, required
from megatron_hybrid.checkpoints.huggingface.tensors import (
    layer_tensors,
    mamba1_tensors,
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
        parts = {"S": ("mixer", mamba1_tensors)}
        yield from layer_tensors(config, parts, ("norm",), "backbone.layers")


ADAPTER = Mamba()
