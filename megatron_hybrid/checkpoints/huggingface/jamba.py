"""Jamba: Mamba-1 and attention layers, each followed by a gated MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames


class Jamba(Adapter):
    """`JambaForCausalLM`."""

    model_types = ("jamba",)
    names = TensorNames(
        {
            "S": ("mamba", tensors.mamba1),
            "*": ("self_attn", tensors.attention),
            "-": ("feed_forward", tensors.mlp),
            "E": ("feed_forward", partial(tensors.moe, router="router")),
        },
        norms=("input_layernorm", "pre_ff_layernorm"),
        final_norm="model.final_layernorm.weight",
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        # The activation is that of the convolution, too.
        fields.only(
            hf,
            hidden_act=("silu", "swish"),
            mamba_inner_layernorms=True,
            sliding_window=None,
        )
        experts = hf.get("num_experts", 16)
        mixers = _periodic(hf, "attn_layer", 8, 4, "S*")
        mlps = _periodic(hf, "expert_layer", 2, 1, "-E" if experts > 1 else "--")
        width = fields.required(hf, "intermediate_size")
        found = {
            **fields.transformer({"num_key_value_heads": 8, **hf}, mixers, mlps),
            "position_embedding_type": "none",
            "mamba1_inner_size": hf.get("mamba_expand", 2) * fields.required(hf, "hidden_size"),
            "mamba1_state_dim": hf.get("mamba_d_state", 16),
            "mamba1_dt_rank": fields.dt_rank(hf, "mamba_dt_rank"),
            "mamba1_conv_kernel": hf.get("mamba_d_conv", 4),
            "mamba1_conv_bias": hf.get("mamba_conv_bias", True),
            "mamba1_proj_bias": hf.get("mamba_proj_bias", False),
            "mamba1_norm": "weighted",
            "mamba1_norm_epsilon": hf.get("rms_norm_eps", 1e-6),
            "ffn_hidden_size": width,
        }
        if "E" in mlps:
            found |= {
                "num_moe_experts": experts,
                "moe_ffn_hidden_size": width,
                "moe_router_topk": hf.get("num_experts_per_tok", 2),
                "moe_router_pre_softmax": True,
            }
        return found


def _periodic(hf: Mapping[str, Any], name: str, period: int, offset: int, symbols: str) -> str:
    """The second symbol for layer `<name>_offset` and every `<name>_period`-th after it, the first
    one for others."""
    period, offset = hf.get(f"{name}_period", period), hf.get(f"{name}_offset", offset)
    layers = range(fields.required(hf, "num_hidden_layers"))
    return "".join(symbols[i % period == offset] for i in layers)
