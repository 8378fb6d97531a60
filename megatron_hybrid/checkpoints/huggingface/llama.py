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
    layer_norms,
    mlp_tensors,
    model_tensors,
)
from megatron_hybrid.models.config.hybrid_config import HybridConfig


class Llama(Adapter):
    """`LlamaForCausalLM`."""

    model_types = ("llama",)
    ignored = (r".*\.rotary_emb\.inv_freq",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Adapter.config`."""
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
        """See `Adapter.tensors`."""
        yield from model_tensors(config)
        for i in range(config.num_layers // 2):
            theirs = f"model.layers.{i}"
            mixer, mlp = (f"decoder.layers.{n}" for n in (2 * i, 2 * i + 1))
            yield from layer_norms(mixer, mlp, theirs)
            attention, dense = config.for_layer(2 * i + 1), config.for_layer(2 * i + 2)
            yield from attention_tensors(
                attention, f"{mixer}.self_attention", f"{theirs}.self_attn"
            )
            yield from mlp_tensors(dense, f"{mlp}.mlp", f"{theirs}.mlp")


ADAPTER = Llama()
