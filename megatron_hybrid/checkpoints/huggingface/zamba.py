"""Zamba: Mamba-1 layers of several heads, some after a transformer block that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap
from megatron_hybrid.checkpoints.huggingface.layouts import alternating, reshaped, same
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_SYMBOLS = {"linear_attention": "S", "mamba": "S", "hybrid": "V"}


def _mamba_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    heads, channels = config.mamba1_num_heads, config.mamba1_inner_size
    head_dim, rank, states = channels // heads, config.mamba1_dt_rank, config.mamba1_state_dim
    width = rank + 2 * states
    yield same(f"{ours}.in_proj.weight", f"{theirs}.in_proj.weight", alternating(0))
    names = ["conv1d.weight", "out_proj.weight"]
    for name in [*names, "conv1d.bias"] if config.mamba1_conv_bias else names:
        yield same(f"{ours}.{name}", f"{theirs}.{name}")
    for name, own, given in (
        ("x_proj_weight", (heads * width, head_dim), (heads, width, head_dim)),
        ("dt_proj_weight", (channels, rank), (heads, head_dim, rank)),
        ("dt_proj_bias", (channels,), (heads, head_dim)),
        ("A_log", (channels, states), (heads, head_dim, states)),
        ("D", (channels,), (heads, head_dim)),
    ):
        yield same(f"{ours}.{name}", f"{theirs}.{name}", reshaped(own, given))


class Zamba(Adapter):
    """`ZambaForCausalLM`."""

    model_types = ("zamba",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, **hf}
        fields.only(hf, mamba_proj_bias=False, hidden_mamba_act=("silu", "swish"))
        # Without it, transformers does not tie the shared block either.
        fields.only(hf, tie_word_embeddings=True)
        hidden = fields.required(hf, "hidden_size")
        fields.only(hf, attention_hidden_size=(2 * hidden, None))
        layers, heads = (fields.required(hf, f"num_{each}") for each in _COUNTS)
        head_dim = hf.get("attention_head_dim") or 2 * hidden // heads
        mamba_heads = hf.get("n_mamba_heads", 2)
        if mamba_heads < 2:
            raise ValueError(f"config.json has n_mamba_heads={mamba_heads}; it takes 2 or more")
        symbols = fields.symbols_of(_types(hf, layers), _SYMBOLS, layers)
        return {
            **fields.model(hf),
            "position_embedding_type": "none",
            "layer_pattern": "".join(symbols),
            "num_attention_heads": heads,
            "num_query_groups": hf.get("num_key_value_heads") or heads,
            "kv_channels": head_dim,
            "softmax_scale": (head_dim / 2) ** -0.5,
            "ffn_hidden_size": fields.required(hf, "intermediate_size"),
            "activation_func": fields.activation(hf, default="gelu"),
            "shared_block_adapter_rank": None,
            "mamba1_num_heads": mamba_heads,
            "mamba1_inner_size": hf.get("mamba_expand", 2) * hidden,
            "mamba1_state_dim": hf.get("mamba_d_state", 16),
            "mamba1_conv_kernel": hf.get("mamba_d_conv", 4),
            "mamba1_dt_rank": fields.dt_rank(hf, "mamba_dt_rank"),
            "mamba1_conv_bias": hf.get("mamba_conv_bias", True),
        }

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from tensors.model(config, final_norm="model.final_layernorm.weight")
        is_first = True
        for i, symbol in enumerate(config.pattern.symbols):
            ours, theirs = f"decoder.layers.{i}", f"model.layers.{i}"
            if symbol == "S":
                yield same(f"{ours}.norm.weight", f"{theirs}.input_layernorm.weight")
                yield from _mamba_tensors(config, f"{ours}.mixer", f"{theirs}.mamba")
                continue
            if is_first:  # it has the block
                yield from _block_tensors(config, f"{ours}.mixer.block", f"{theirs}.shared_transf")
            is_first = False
            mamba = f"{theirs}.mamba_decoder"
            yield same(f"{ours}.mixer.linear.weight", f"{theirs}.linear.weight")
            yield same(f"{ours}.mixer.norm.weight", f"{mamba}.input_layernorm.weight")
            yield from _mamba_tensors(config, f"{ours}.mixer.mamba", f"{mamba}.mamba")


_COUNTS = "hidden_layers", "attention_heads"


def _types(hf: Mapping[str, Any], layers: int) -> list[str]:
    if (types := hf.get("layers_block_type") or hf.get("layer_types")) is not None:
        return types
    period, offset = hf.get("attn_layer_period", 6), hf.get("attn_layer_offset", 4)
    rest = ("hybrid" if i % period == offset else "mamba" for i in range(layers - 3))
    return ["mamba", "mamba", "hybrid", *rest]


def _block_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    yield same(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight")
    yield from tensors.attention(config, f"{ours}.self_attention", f"{theirs}.self_attn")
    yield same(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.pre_ff_layernorm.weight")
    yield from tensors.mlp(config, ours, f"{theirs}.feed_forward")
