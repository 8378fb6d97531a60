"""Cohere's Command R7B and A: attention and MLP side by side, RoPE within windows alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_SYMBOLS = {"sliding_attention": "R", "full_attention": "Q"}


def _mixer_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    yield from tensors.attention(config, f"{ours}.attention", f"{theirs}.self_attn")
    yield from tensors.mlp(config, f"{ours}.mlp", f"{theirs}.mlp")


class Cohere2(Adapter):
    model_types = ("cohere2",)
    names = TensorNames(dict.fromkeys("QR", ("", _mixer_tensors)), norms=("input_layernorm",))

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 4096, **hf}
        # The width of a head follows from those of the model: transformers passes over it.
        width, heads = fields.required(hf, "hidden_size"), hf.get("num_attention_heads", 64)
        fields.only(hf, attention_bias=False, use_qk_norm=False, head_dim=(width // heads, None))
        types = fields.layer_types(hf, "sliding_attention", hf.get("sliding_window_pattern", 4))
        symbols = fields.symbols_of(types, _SYMBOLS, hf["num_hidden_layers"])
        return {
            **fields.model(hf, "layer_norm_eps"),
            **fields.attention(hf),
            **fields.rotary(hf),
            "layer_pattern": symbols,
            "layer_overrides": {"Q": {"position_embedding_type": "none"}} if "Q" in symbols else {},
            "sliding_window": hf["sliding_window"] if "R" in symbols else None,
            "rotary_interleaved": True,
            "normalization": "LayerNorm",
            "layernorm_bias": False,
            "ffn_hidden_size": hf.get("intermediate_size", 22528),
            "activation_func": fields.activation(hf),
            "logits_multiplier": hf.get("logit_scale", 0.0625),
        }
