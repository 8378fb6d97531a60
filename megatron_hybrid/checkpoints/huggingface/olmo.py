"""OLMo 2 and 3, EXAONE 4: norms of queries and keys, and norms after attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames

_NAMES = TensorNames(
    tensors.TRANSFORMER, post_norms=("post_attention_layernorm", "post_feedforward_layernorm")
)


class Olmo2(Adapter):
    """`Olmo2ForCausalLM`."""

    model_types = ("olmo2",)
    names = _NAMES

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"rms_norm_eps": 1e-5, **hf}
        return {
            **fields.transformer(hf, attention_bias=hf.get("attention_bias")),
            "norm_placement": "post",
            "qk_layernorm": True,
            "qk_layernorm_scope": "all_heads",
        }


class Olmo3(Adapter):
    """`Olmo3ForCausalLM`: windows, and full attention in every fourth layer."""

    model_types = ("olmo3",)
    names = _NAMES

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"rms_norm_eps": 1e-5, "sliding_window": 4096, **hf}
        mixers = fields.windows(hf, "sliding_attention", 4)
        bias = hf.get("attention_bias")
        found = {
            **fields.transformer({**hf, **fields.WITHOUT_ROPE}, mixers, attention_bias=bias),
            "norm_placement": "post",
            "qk_layernorm": True,
            "qk_layernorm_scope": "all_heads",
        }
        for kind, symbol in fields.WINDOW_SYMBOLS.items():
            if symbol in mixers:
                rotary = fields.rotary_of_type(hf, kind, ("rope_theta", 500000.0))
                found["layer_overrides"].setdefault(symbol, {}).update(rotary)
        return found


class Exaone4(Adapter):
    """`Exaone4ForCausalLM`: windows, and full attention without RoPE in every fourth layer."""

    model_types = ("exaone4",)
    names = _NAMES

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        left_out = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096}
        hf = {**left_out, "sliding_window_pattern": 4, **hf}
        mixers = None
        if hf["sliding_window"] is not None or hf.get("layer_types"):
            mixers = fields.windows(hf, "sliding_attention", hf["sliding_window_pattern"])
        found = fields.transformer(hf, mixers)
        if mixers is not None and hf["sliding_window"] is not None and "*" in mixers:
            found["layer_overrides"]["*"] = {"position_embedding_type": "none"}
        return {**found, "norm_placement": "post", "qk_layernorm": True}
