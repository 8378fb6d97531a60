"""Llama 2 and 3, and models that differ from them by biases or experts alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import reshaped, same
from megatron_hybrid.models.config.hybrid_config import HybridConfig


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


def _moe(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    bias = "moe_statics.e_score_correction_bias"
    for each in tensors.moe(config, ours, theirs, expert_bias=bias):
        if each.theirs == (f"{theirs}.{bias}",):
            experts = config.num_moe_experts
            each = same(*each.ours, *each.theirs, reshaped((experts,), (1, experts)))
        yield each


class ErnieMoe(Adapter):
    """`Ernie4_5_MoeForCausalLM`: experts, chosen by their softmax scores and a bias."""

    model_types = ("ernie4_5_moe",)
    names = TensorNames({**tensors.TRANSFORMER, "E": ("mlp", _moe)})
    ignored = (r"model\.mtp_.*",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        left_out = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "intermediate_size": 12288}
        hf = {**left_out, "tie_word_embeddings": True, **hf}
        fields.only(hf, use_bias=False, moe_use_aux_free=(True, None))
        numbers = range(fields.required(hf, "num_hidden_layers"))
        first, last = hf.get("moe_layer_start_index", 1), hf.get("moe_layer_end_index", -1)
        interval, last = hf.get("moe_layer_interval", 1), len(numbers) - 1 if last == -1 else last
        mlps = ["E" if first <= i <= last and (i + 1) % interval == 0 else "-" for i in numbers]
        width = hf.get("moe_intermediate_size", 1536)
        return {
            **fields.transformer(hf, mlps="".join(mlps), base=500000.0),
            "rotary_interleaved": True,
            "num_moe_experts": hf.get("moe_num_experts", 64),
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": hf.get("moe_num_shared_experts", 2) * width
            or None,
            "moe_router_topk": hf.get("moe_k", 6),
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_epsilon": hf.get("moe_norm_min", 1e-12),
        }


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
