"""Xiaomi's MiMo-V2-Flash: windows with sinks between full attention, values narrower than keys."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames

_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": 129,
    "attention_value_scale": 0.707,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
}
_BASES = {
    "full_attention": ("rope_theta", 5_000_000.0),
    "sliding_attention": ("swa_rope_theta", 10_000.0),
}
"""Layer type -> key of its base of RoPE in released files, and the value where there is none."""


class MiMoV2Flash(Adapter):
    """`MiMoV2FlashForCausalLM`. Its MTP layers are not read."""

    model_types = ("mimo_v2_flash",)
    names = TensorNames(
        {
            **tensors.TRANSFORMER,
            "W": ("self_attn", partial(tensors.attention, sinks="attention_sink_bias")),
        }
    )
    module_names = ((r"\.attention_sink_bias\b", ".sinks"),)
    ignored = (r"model\.mtp\..*",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {**_DEFAULTS, **hf}
        fields.only(hf, attention_bias=False, norm_topk_prob=True, n_shared_experts=(None, 0))
        if hf.get("sliding_window_size") is not None:  # without the token itself
            hf["sliding_window"] = hf["sliding_window_size"] + 1
        mixers = fields.symbols_of(_types(hf), fields.WINDOW_SYMBOLS, hf["num_hidden_layers"])
        overrides = {
            symbol: fields.rotary_of_type(hf, kind, _BASES[kind], partial_rotary_factor=0.334)
            for kind, symbol in fields.WINDOW_SYMBOLS.items()
            if symbol in mixers
        }
        groups = 2 * hf["num_key_value_heads"]
        # As released files say what is so in the code.
        fields.only(hf, swa_num_key_value_heads=(groups, None))
        fields.only(hf, add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False)
        if "W" in mixers:
            overrides["W"] |= {"num_query_groups": groups, "softmax_type": "learnable"}
        sparse = hf.get("moe_layer_freq")
        mlps = fields.dense_mlps_first(hf, 1)
        if sparse is not None:
            mlps = "".join("E" if each else "-" for each in sparse)
        scale = hf["attention_value_scale"]
        return {
            **fields.transformer(
                {**hf, "rope_parameters": None}, "".join(mixers), mlps, partial=True
            ),
            "layer_overrides": overrides,
            "value_channels": hf["v_head_dim"],
            "value_multiplier": 1.0 if scale is None else scale,
            **fields.grouped_experts(
                num_experts=hf["n_routed_experts"],
                topk=hf["num_experts_per_tok"],
                width=hf["moe_intermediate_size"],
                num_shared=0,
                groups=hf.get("n_group") or 1,
                chosen_groups=hf.get("topk_group") or 1,
                scaling_factor=hf.get("routed_scaling_factor") or 1.0,
            ),
        }


def _types(hf: Mapping[str, Any]) -> list[str]:
    if (types := hf.get("layer_types")) is not None:
        return types
    if (given := hf.get("hybrid_layer_pattern")) is not None:
        return ["sliding_attention" if each else "full_attention" for each in given]
    numbers = range(fields.required(hf, "num_hidden_layers"))
    return ["sliding_attention" if i and (i + 1) % 6 else "full_attention" for i in numbers]
