"""Gemma 2 and Gemma 3 (text): sandwich norms of 1 + weight, windows between full attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap
from megatron_hybrid.checkpoints.huggingface.fields import (
    WINDOW_SYMBOLS,
    activation,
    attention_fields,
    model_fields,
    only,
    rotary_fields,
    symbols_of,
)
from megatron_hybrid.checkpoints.huggingface.tensors import (
    attention_tensors,
    mlp_tensors,
    model_tensors,
    same,
)
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_SHARED_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "vocab_size": 256000,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
}
"""What config.json files leave out, as transformers fills it in."""


class Gemma3(Adapter):
    """`Gemma3ForCausalLM`, the language model of `Gemma3ForConditionalGeneration`, and
    `Gemma2ForCausalLM`."""

    model_types = ("gemma3_text", "gemma2")
    composite_types = ("gemma3",)
    composite_tied = True
    ignored = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = _with_defaults(hf)
        only(hf, attention_bias=False, use_bidirectional_attention=(False, None))
        is_gemma3 = hf["model_type"] == "gemma3_text"
        if is_gemma3:
            only(hf, attn_logit_softcapping=None)  # transformers' Gemma 3 does not apply it
        pattern = symbols_of(_layer_types(hf), WINDOW_SYMBOLS, hf["num_hidden_layers"])
        rotary = {
            symbol: _rotary(hf, kind)
            for kind, symbol in WINDOW_SYMBOLS.items()
            if symbol in pattern
        }
        return {
            **model_fields(hf),
            **attention_fields(hf),
            "layer_pattern": "".join(f"{symbol}-" for symbol in pattern),
            "layer_overrides": rotary,
            "sliding_window": hf["sliding_window"],
            "embedding_multiplier": hf["hidden_size"] ** 0.5,
            "round_embedding_multiplier": True,
            "norm_placement": "sandwich",
            "layernorm_zero_centered_gamma": True,
            "qk_layernorm": is_gemma3,
            "softmax_scale": hf["query_pre_attn_scalar"] ** -0.5,
            "attention_logit_softcap": hf["attn_logit_softcapping"],
            "final_logit_softcap": hf["final_logit_softcapping"],
            "ffn_hidden_size": hf["intermediate_size"],
            "activation_func": activation(hf, "hidden_activation"),
        }

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from model_tensors(config)
        for i in range(config.num_layers // 2):
            theirs = f"model.layers.{i}"
            mixer, mlp = (f"decoder.layers.{n}" for n in (2 * i, 2 * i + 1))
            for ours, norm in (
                (f"{mixer}.input_layernorm", "input_layernorm"),
                (f"{mixer}.post_layernorm", "post_attention_layernorm"),
                (f"{mlp}.pre_mlp_layernorm", "pre_feedforward_layernorm"),
                (f"{mlp}.post_layernorm", "post_feedforward_layernorm"),
            ):
                yield same(f"{ours}.weight", f"{theirs}.{norm}.weight")
            yield from attention_tensors(config, f"{mixer}.self_attention", f"{theirs}.self_attn")
            yield from mlp_tensors(config, f"{mlp}.mlp", f"{theirs}.mlp")


def _with_defaults(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {**_SHARED_DEFAULTS, **_DEFAULTS[hf["model_type"]], **hf}


def _layer_types(hf: Mapping[str, Any]) -> list[str]:
    if hf.get("layer_types"):
        return hf["layer_types"]
    period = hf["sliding_window_pattern"]
    return [
        "sliding_attention" if i % period else "full_attention"
        for i in range(1, hf["num_hidden_layers"] + 1)
    ]


def _rotary(hf: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """Gemma 2 has one base; Gemma 3 one for each layer type, `rope_local_base_freq` in files of
    before transformers 5, whose `rope_scaling` is of full attention alone."""
    if hf["model_type"] == "gemma2":
        return rotary_fields(hf)
    own = (hf.get("rope_parameters") or {}).get(layer_type) or {}
    if layer_type == "full_attention":
        scaling = {**own, **(hf.get("rope_scaling") or {})}
        return rotary_fields({**hf, "rope_parameters": None, "rope_scaling": scaling}, 1e6)
    local = {"rope_theta": hf.get("rope_local_base_freq", 1e4), **own}
    return rotary_fields({"rope_parameters": local})


ADAPTER = Gemma3()
