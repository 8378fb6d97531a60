"""Jamba: Mamba-1 and attention layers, each followed by a gated MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap
from megatron_hybrid.checkpoints.huggingface.fields import (
    activation,
    attention_fields,
    dt_rank,
    model_fields,
    only,
    required,
)
from megatron_hybrid.checkpoints.huggingface.tensors import (
    attention_tensors,
    layer_tensors,
    mamba1_tensors,
    mlp_tensors,
    model_tensors,
    moe_tensors,
)
from megatron_hybrid.models.config.hybrid_config import HybridConfig


class Jamba(Adapter):
    """`JambaForCausalLM`."""

    model_types = ("jamba",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        # The activation is that of the convolution, too.
        only(
            hf,
            hidden_act=("silu", "swish"),
            mamba_inner_layernorms=True,
            sliding_window=None,
        )
        layers, experts = required(hf, "num_hidden_layers"), hf.get("num_experts", 16)
        mixers = _periodic(hf, "attn_layer", (8, 4), "*", "S", layers)
        mlps = _periodic(hf, "expert_layer", (2, 1), "E" if experts > 1 else "-", "-", layers)
        width = required(hf, "intermediate_size")
        fields = {
            **model_fields(hf),
            **attention_fields({"num_key_value_heads": 8, **hf}),
            "position_embedding_type": "none",
            "layer_pattern": "".join(mixer + mlp for mixer, mlp in zip(mixers, mlps)),
            "mamba1_inner_size": hf.get("mamba_expand", 2) * required(hf, "hidden_size"),
            "mamba1_state_dim": hf.get("mamba_d_state", 16),
            "mamba1_dt_rank": dt_rank(hf, "mamba_dt_rank"),
            "mamba1_conv_kernel": hf.get("mamba_d_conv", 4),
            "mamba1_conv_bias": hf.get("mamba_conv_bias", True),
            "mamba1_proj_bias": hf.get("mamba_proj_bias", False),
            "mamba1_norm": "weighted",
            "mamba1_norm_epsilon": hf.get("rms_norm_eps", 1e-6),
            "ffn_hidden_size": width,
            "activation_func": activation(hf),
        }
        if "E" in mlps:
            fields |= {
                "num_moe_experts": experts,
                "moe_ffn_hidden_size": width,
                "moe_router_topk": hf.get("num_experts_per_tok", 2),
                "moe_router_pre_softmax": True,
            }
        return fields

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from model_tensors(config, norm="model.final_layernorm.weight")
        parts = {
            "S": ("mamba", mamba1_tensors),
            "*": ("self_attn", attention_tensors),
            "-": ("feed_forward", mlp_tensors),
            "E": ("feed_forward", partial(moe_tensors, router="router")),
        }
        yield from layer_tensors(config, parts, ("input_layernorm", "pre_ff_layernorm"))


def _periodic(
    hf: Mapping[str, Any],
    name: str,
    default: tuple[int, int],
    chosen: str,
    other: str,
    num_layers: int,
) -> str:
    """`chosen` in layer `<name>_offset` and every `<name>_period`-th after it, else `other`."""
    period, offset = hf.get(f"{name}_period", default[0]), hf.get(f"{name}_offset", default[1])
    return "".join(chosen if i % period == offset else other for i in range(num_layers))
