"""Lightning attention as Ling 2.5 and Ring linear write it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields
from megatron_hybrid.checkpoints.huggingface.layouts import TensorMap, joined, same
from megatron_hybrid.models.config.hybrid_config import HybridConfig


def lightning(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    """Lightning attention, whose queries, keys and values are one projection."""
    width = config.linear_num_key_heads * config.linear_key_head_dim
    projections = (f"{theirs}.g_proj.weight", f"{theirs}.query_key_value.weight")
    yield TensorMap((f"{ours}.in_proj.weight",), projections, joined((width, 3 * width)))
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm", "norm": "g_norm"}
    for own, name in {**names, "out_proj": "dense"}.items():
        yield same(f"{ours}.{own}.weight", f"{theirs}.{name}.weight")


def lightning_fields(hf: Mapping[str, Any], mixers: str) -> dict[str, Any]:
    """Fields of lightning attention. mixers: a symbol for each of their layers."""
    fields.only(hf, linear_silu=False, use_qk_norm=True, use_qkv_bias=False, use_bias=False)
    fields.only(hf, rope_scaling=None)
    heads, last = fields.required(hf, "num_attention_heads"), max(len(mixers) - 1, 1)
    if heads & (heads - 1):
        raise ValueError(
            f"config.json has num_attention_heads={heads}, which is no power of 2: the decays of "
            "lightning attention are not supported for it"
        )
    head_dim = hf.get("head_dim") or fields.required(hf, "hidden_size") // heads
    factors = {i: 1 - (i - 1) / last + 1e-5 for i, mixer in enumerate(mixers) if mixer == "A"}
    return {
        "linear_num_key_heads": heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "lightning_rope": True,
        "lightning_norm_groups": hf.get("group_norm_size", 1),
        "layer_overrides": {
            str(2 * i + 1): {"lightning_decay_factor": factor} for i, factor in factors.items()
        },
    }
