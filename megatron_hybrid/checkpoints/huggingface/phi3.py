"""Phi-3 and Phi-4: Llama with joined projections."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import chained, grouped, joined, same
from megatron_hybrid.models.config.hybrid_config import HybridConfig


def joined_qkv(
    config: HybridConfig, ours: str, theirs: str, qkv: str = "qkv_proj", output: str = "o_proj"
) -> Iterator[TensorMap]:
    """Attention whose queries, keys and values are one projection. qkv, output: what they call the
    projections."""
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    keys_and_values = [1] * config.num_kv_projections
    sizes = [size * width for size in (heads // groups, *keys_and_values)]
    layout = chained(joined([size * groups for size in sizes]).inverse, grouped(sizes, groups))
    for kind in tensors.kinds_of_qkv(config):
        yield same(f"{ours}.linear_qkv.{kind}", f"{theirs}.{qkv}.{kind}", layout)
    yield same(f"{ours}.linear_proj.weight", f"{theirs}.{output}.weight")
    if config.has_attention_output_bias:
        yield same(f"{ours}.linear_proj.bias", f"{theirs}.{output}.bias")


joined_mlp = tensors.modules(linear_fc1="gate_up_proj", linear_fc2="down_proj")
"""A gated MLP whose gate_proj and up_proj are one on both sides."""


class Phi3(Adapter):
    """`Phi3ForCausalLM`."""

    model_types = ("phi3",)
    names = TensorNames(
        {**dict.fromkeys("*W", ("self_attn", joined_qkv)), "-": ("mlp", joined_mlp)}
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        mixers = fields.windows_everywhere(hf)
        found = fields.transformer({"rms_norm_eps": 1e-5, **hf}, mixers, partial=True)
        fields.only(found.get("rotary_scaling", {}), rope_type="default")  # it means LongRoPE
        return found
