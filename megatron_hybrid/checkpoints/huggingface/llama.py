"""Llama 2 and 3: full attention and a gated MLP, the pure-attention control."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap
from megatron_hybrid.checkpoints.huggingface.fields import (
    activation,
    attention_fields,
    model_fields,
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


class Llama(Adapter):
    """`LlamaForCausalLM`."""

    model_types = ("llama",)
    ignored = (r".*\.rotary_emb\.inv_freq",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **model_fields(hf),
            **attention_fields(hf),
            **rotary_fields(hf),
            "layer_pattern": "*-" * required(hf, "num_hidden_layers"),
            "ffn_hidden_size": required(hf, "intermediate_size"),
            "activation_func": activation(hf),
            "layer_overrides": {
                symbol: {"add_bias_linear": True}
                for symbol, key in (("*", "attention_bias"), ("-", "mlp_bias"))
                if hf.get(key)
            },
        }

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from model_tensors(config)
        parts = {"*": ("self_attn", attention_tensors), "-": ("mlp", mlp_tensors)}
        yield from layer_tensors(config, parts)
