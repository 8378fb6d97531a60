"""Phi-3 and Phi-4: Llama with joined projections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import chained, grouped, joined, same
from megatron_hybrid.models.config.hybrid_config import HybridConfig


def joined_qkv(config: HybridConfig, ours: str, qkv: str, output: str) -> Iterator[TensorMap]:
    """Attention whose queries, keys and values are one projection. qkv, output: what they call the
    projections."""
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    parts = joined((heads * width, groups * width, groups * width))
    rows = grouped((heads // groups * width, width, width), groups)
    layout = chained(parts.inverse, rows)
    yield same(f"{ours}.linear_qkv.weight", f"{qkv}.weight", layout)
    yield same(f"{ours}.linear_proj.weight", f"{output}.weight")


def _attention(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    return joined_qkv(config, ours, f"{theirs}.qkv_proj", f"{theirs}.o_proj")


def joined_mlp(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    """A gated MLP whose gate_proj and up_proj are one on both sides."""
    yield same(f"{ours}.linear_fc1.weight", f"{theirs}.gate_up_proj.weight")
    yield same(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight")


class Phi3(Adapter):
    """`Phi3ForCausalLM`."""

    model_types = ("phi3",)
    names = TensorNames(
        {**dict.fromkeys("*W", ("self_attn", _attention)), "-": ("mlp", joined_mlp)}
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        mixers = fields.windows_everywhere(hf)
        found = fields.transformer({"rms_norm_eps": 1e-5, **hf}, mixers, partial=True)
        fields.only(found.get("rotary_scaling", {}), rope_type="default")  # it means LongRoPE
        return found
