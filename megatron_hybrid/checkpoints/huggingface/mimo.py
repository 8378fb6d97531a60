"""Xiaomi's MiMo-V2-Flash: windows with sinks between full attention, values narrower than keys."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames

_HEADS = {"num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "sliding_window": 129}
_EXPERTS = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
_BASES = {
    "full_attention": ("rope_theta", 5_000_000.0),
    "sliding_attention": ("swa_rope_theta", 10_000.0),
}
"""Layer type -> key of its base of RoPE in released files, and the value where there is none."""


class MiMoV2Flash(Adapter):
    """`MiMoV2FlashForCausalLM`. Its MTP layers are not read."""

    model_types = ("mimo_v2_flash",)
    windows = partial(tensors.attention, sinks="attention_sink_bias")
    names = TensorNames({**tensors.TRANSFORMER, "W": ("self_attn", windows)})
    module_names = ((r"\.attention_sink_bias\b", ".sinks"),)
    ignored = (r"model\.mtp\..*",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {**_HEADS, "rms_norm_eps": 1e-5, "attention_value_scale": 0.707, **hf}
        fields.only(hf, attention_bias=False, norm_topk_prob=True, n_shared_experts=(None, 0))
        # As released files say what is so in the code.
        groups, number = 2 * hf["num_key_value_heads"], fields.required(hf, "num_hidden_layers")
        fields.only(hf, swa_num_key_value_heads=(groups, None))
        fields.only(hf, add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False)
        if hf.get("sliding_window_size") is not None:  # without the token itself
            hf["sliding_window"] = hf["sliding_window_size"] + 1
        local = hf.get("hybrid_layer_pattern") or [i and (i + 1) % 6 for i in range(number)]
        types = ["sliding_attention" if each else "full_attention" for each in local]
        types = hf.get("layer_types") or types
        mixers = fields.symbols_of(types, fields.WINDOW_SYMBOLS, number)
        overrides = fields.rotary_by_symbol(hf, mixers, _BASES, partial_rotary_factor=0.334)
        if "W" in mixers:
            overrides["W"] |= {"num_query_groups": groups, "softmax_type": "learnable"}
        mlps, sparse = fields.dense_mlps_first(hf, 1), hf.get("moe_layer_freq")
        if sparse is not None:
            mlps = "".join("E" if each else "-" for each in sparse)
        scale = hf["attention_value_scale"]
        return {
            **fields.transformer({**hf, "rope_parameters": None}, mixers, mlps, partial=True),
            "layer_overrides": overrides,
            "value_channels": hf["v_head_dim"],
            "value_multiplier": 1.0 if scale is None else scale,
            **fields.grouped_experts(hf, **_EXPERTS),
        }
