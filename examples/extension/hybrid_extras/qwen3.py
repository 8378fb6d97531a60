"""Qwen3, a Transformer with norms of queries and keys, from Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap
from megatron_hybrid.checkpoints.huggingface.fields import (
    activation,
    attention_fields,
    model_fields,
    only,
    required,
    rotary_fields,
)
from megatron_hybrid.checkpoints.huggingface.tensors import (
    attention_tensors,
    layer_tensors,
    mlp_tensors,
    model_tensors,
)
from megatron_hybrid.models.config.hybrid_config import HybridConfig


class Qwen3(Adapter):
    """`Qwen3ForCausalLM` without sliding windows."""

    model_types = ("qwen3",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        only(hf, use_sliding_window=False, attention_bias=False)
        return {
            **model_fields(hf),
            **attention_fields({"head_dim": 128, **hf}),
            **rotary_fields(hf),
            "qk_layernorm": True,
            "layer_pattern": "*-" * required(hf, "num_hidden_layers"),
            "ffn_hidden_size": required(hf, "intermediate_size"),
            "activation_func": activation(hf),
        }

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from model_tensors(config)
        parts = {"*": ("self_attn", attention_tensors), "-": ("mlp", mlp_tensors)}
        yield from layer_tensors(config, parts)
