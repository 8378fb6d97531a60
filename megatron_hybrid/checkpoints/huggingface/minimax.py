"""MiniMax-Text-01 and M1: lightning attention, sometimes full attention, and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import same, ungrouped
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_KINDS = ("linear_attention", "full_attention")
_FACTORS = {
    "A": ("linear_attn", "layernorm_linear_attention"),
    "*": ("full_attn", "layernorm_full_attention"),
    "E": ("mlp", "layernorm_mlp"),
}
"""Symbol -> what transformers, and what the published code call the factors of its residual sum."""


def _lightning(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    """Their queries, keys and values lie head by head."""
    dim, heads = config.linear_key_head_dim, config.linear_num_key_heads
    layout = ungrouped([[dim], [dim] * 3], heads)
    projections = (f"{theirs}.output_gate.weight", f"{theirs}.qkv_proj.weight")
    yield TensorMap((f"{ours}.in_proj.weight",), projections, layout)
    for name in ("norm", "out_proj"):
        yield same(f"{ours}.{name}.weight", f"{theirs}.{name}.weight")


class MiniMax(Adapter):
    """`MiniMaxForCausalLM`, and under its names of before `MiniMaxM1ForCausalLM`."""

    model_types = ("minimax", "minimax_m1", "minimax_text_01")
    names = TensorNames(
        {
            "A": ("self_attn", _lightning),
            "*": ("self_attn", tensors.attention),
            "E": ("block_sparse_moe", partial(tensors.moe, projections=("w1", "w3", "w2"))),
        }
    )
    ignored = (r".*\.self_attn\.(slope_rate|(query|key|diagonal)_decay)",)  # follow from the config

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, sliding_window=None, router_jitter_noise=0.0, shared_intermediate_size=0)
        fields.only(hf, postnorm=True)
        hf = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, **hf}
        number, heads = fields.required(hf, "num_hidden_layers"), fields.attention(hf)
        rotary_dim = hf.get("rotary_dim", heads["kv_channels"])
        is_partial = hf["model_type"] != "minimax"
        if is_partial:
            hf = {"partial_rotary_factor": rotary_dim / heads["kv_channels"], **hf}
        else:
            fields.only({"rotary_dim": rotary_dim}, rotary_dim=heads["kv_channels"])
        kinds = [_KINDS[kind] for kind in hf.get("attn_type_list") or ()]
        types = hf.get("layer_types") or kinds or [_KINDS[1 - i % 2] for i in range(number)]
        mixers = fields.symbols_of(types, dict(zip(_KINDS, "A*")), number)
        overrides: dict[str, Any] = {}
        for symbol, (name, published) in _FACTORS.items():
            alpha, beta = (
                float(hf.get(f"{name}_{which}_factor", hf.get(f"{published}_{which}", 1)))
                for which in ("alpha", "beta")
            )
            if symbol in (*mixers, "E"):
                overrides[symbol] = {"stream_multiplier": alpha, "residual_multiplier": beta}
        for i, symbol in enumerate(mixers):
            if symbol == "A":
                factor = 1 - i / (number - 1 + 1e-5) + 1e-5
                overrides[str(2 * i + 1)] = {"lightning_decay_factor": factor}
        return {
            **fields.transformer(
                hf, "".join(mixers), "E" * number, base=1000000.0, partial=is_partial
            ),
            "layer_overrides": overrides,
            "norm_placement": "stream",
            "linear_num_key_heads": heads["num_attention_heads"],
            "linear_key_head_dim": heads["kv_channels"],
            "linear_value_head_dim": heads["kv_channels"],
            "linear_norm_epsilon": 1e-6,  # in the code of these models, not in their config
            "num_moe_experts": hf.get("num_local_experts", 8),
            "moe_ffn_hidden_size": fields.required(hf, "intermediate_size"),
            "moe_router_topk": hf.get("num_experts_per_tok", 2),
        }
