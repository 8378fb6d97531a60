"""Phi-3 and Phi-4: Llama with joined projections. Phi-4-mini-flash (SambaY, arXiv 2507.06607):
Mamba-1 and differential attention, then layers that read the memory of one Mamba-1 layer, or the
keys and values of one attention layer."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import same
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_joined_qkv = partial(tensors.attention, joined_qkv="qkv_proj")


class Phi3(Adapter):
    model_types = ("phi3",)
    names = TensorNames(
        {**dict.fromkeys("*W", ("self_attn", _joined_qkv)), "-": ("mlp", tensors.joined_mlp)}
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        mixers = fields.windows_everywhere(hf)
        found = fields.transformer({"rms_norm_eps": 1e-5, **hf}, mixers, partial=True)
        fields.only(found.get("rotary_scaling", {}), rope_type="default")  # it means LongRoPE
        return found


def _attention(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    yield from tensors.attention(config, ours, theirs, joined_qkv="Wqkv", output="out_proj")
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "subln.weight"):
        yield same(f"{ours}.differential.{name}", f"{theirs}.inner_cross_attn.{name}")


class Phi4Flash(Adapter):
    model_types = ("phi4flash",)
    names = TensorNames(
        {
            "S": ("attn", tensors.mamba1),
            **dict.fromkeys("*W", ("attn", _attention)),
            "J": ("attn", tensors.modules(in_proj="in_proj", out_proj="out_proj")),
            "-": ("mlp", tensors.modules(linear_fc1="fc1", linear_fc2="fc2")),
        },
        final_norm="model.final_layernorm.weight",
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, mb_per_layer=2, layer_norm_eps=1e-5, mamba_proj_bias=False)
        fields.only(hf, mlp_bias=False, lm_head_bias=False)
        sizes = "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
        for key, step in zip(sizes, (4, 2, 2)):
            if fields.required(hf, key) % step:
                raise ValueError(f"config.json has {key}={hf[key]}, not a multiple of {step}")
        half, *pairs = (hf[key] // 2 for key in sizes)  # two heads are the halves of one of ours
        hf = {"tie_word_embeddings": True, **hf, **dict(zip(sizes[1:], pairs)), "head_dim": None}
        overrides = {}
        for i in range(1, 2 * half, 2):
            source = {"kv_source_layer": 2 * half + 3} if i > half + 1 else {}
            start = {"differential_lambda": 0.8 - 0.6 * math.exp(-0.3 * i)}
            overrides[str(2 * i + 1)] = start | source
        return {
            **fields.transformer(hf, "SW" * (half // 2) + "S*" + "J*" * (half // 2 - 1)),
            **fields.mamba1(hf),
            "layer_overrides": overrides,
            "layernorm_epsilon": 1e-5,
            "position_embedding_type": "none",
            "normalization": "LayerNorm",
            "fp32_residual_connection": True,
            "add_qkv_bias": True,
            "attention_output_bias": True,
        }
