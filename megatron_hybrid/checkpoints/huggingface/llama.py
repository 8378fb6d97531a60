"""Llama 2 and 3, and models that differ from them by biases: full attention and a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames


class Llama(Adapter):
    """`LlamaForCausalLM`."""

    model_types = ("llama",)
    names = TensorNames(tensors.TRANSFORMER)
    ignored = (r".*\.rotary_emb\.inv_freq",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        biases = {key: hf.get(key) for key in ("attention_bias", "mlp_bias")}
        return fields.transformer(hf, **biases)


class SeedOss(Adapter):
    """`SeedOssForCausalLM`."""

    model_types = ("seed_oss",)
    names = TensorNames(tensors.TRANSFORMER)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True, **hf}
        fields.only(hf, attention_out_bias=False)
        found = fields.transformer(hf, mlp_bias=hf.get("mlp_bias"))
        return {**found, "add_qkv_bias": hf["attention_bias"]}


class Ernie(Adapter):
    """`Ernie4_5ForCausalLM`."""

    model_types = ("ernie4_5",)
    names = TensorNames(tensors.TRANSFORMER)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        left_out = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
        hf = {**left_out, "tie_word_embeddings": True, **hf}
        biases = dict.fromkeys(("attention_bias", "mlp_bias"), hf.get("use_bias"))
        return {**fields.transformer(hf, base=500000.0, **biases), "rotary_interleaved": True}


class SmolLM3(Adapter):
    """`SmolLM3ForCausalLM`: every fourth layer has no RoPE."""

    model_types = ("smollm3",)
    names = TensorNames(tensors.TRANSFORMER)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"num_key_value_heads": 4, "tie_word_embeddings": True, **hf}
        mixers = None
        if hf.get("layer_types"):
            mixers = fields.windows(hf, "full_attention", 1)
        else:
            fields.only(hf, use_sliding_window=False)
        biases = {key: hf.get(key) for key in ("attention_bias", "mlp_bias")}
        found = fields.transformer(hf, mixers, base=2000000.0, **biases)
        interval = hf.get("no_rope_layer_interval", 4)
        numbers = range(1, hf["num_hidden_layers"] + 1)
        has_rope = hf.get("no_rope_layers") or [number % interval for number in numbers]
        for number, rotates in zip(numbers, has_rope):
            if not rotates:
                found["layer_overrides"][str(2 * number - 1)] = {"position_embedding_type": "none"}
        return found
