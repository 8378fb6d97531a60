"""OLMo Hybrid: Gated DeltaNet layers with norms in front, attention layers with norms after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, Shapes, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import joined, same
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_NORMS = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
    "post_attention_layernorm": "feedforward_layer_norm",
}
"""Names in the released folders -> the same norms in folders that transformers wrote: it renames
those of both layer types, though the released names are those of the linear layers alone."""


def _conv_sizes(config: HybridConfig) -> tuple[int, int, int]:
    """Channels of queries, keys and values."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, keys, config.linear_num_value_heads * config.linear_value_head_dim


def _linear_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    sizes = _conv_sizes(config)
    heads = config.linear_num_value_heads
    yield TensorMap(
        (f"{ours}.in_proj.weight",),
        tuple(f"{theirs}.{name}_proj.weight" for name in "qkvgba"),
        joined((*sizes, sizes[2], heads, heads)),
    )
    yield TensorMap(
        (f"{ours}.conv1d.weight",),
        tuple(f"{theirs}.{name}_conv1d.weight" for name in "qkv"),
        joined(sizes),
    )
    yield same(f"{ours}.A_log", f"{theirs}.A_log")
    yield same(f"{ours}.dt_bias", f"{theirs}.dt_bias")
    yield same(f"{ours}.out_norm.weight", f"{theirs}.o_norm.weight")
    yield same(f"{ours}.out_proj.weight", f"{theirs}.o_proj.weight")


class OlmoHybrid(Adapter):
    """`OlmoHybridForCausalLM`."""

    model_types = ("olmo_hybrid",)
    names = TensorNames(
        {
            "G": ("linear_attn", _linear_tensors),
            "*": ("self_attn", tensors.attention),
            "-": ("mlp", tensors.mlp),
        },
        norms=("attention_layer_norm", "feedforward_layer_norm"),
        post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, attention_bias=False)
        fields.only(hf, hidden_act=("silu", "swish"))  # it is that of the convolution, too
        mixers = _mixers(hf)
        heads = fields.required(hf, "num_attention_heads")
        key_heads = hf.get("linear_num_key_heads") or heads
        key_dim = hf.get("linear_key_head_dim") or int(0.75 * hf["hidden_size"] / key_heads)
        behind = {"norm_placement": "post"}
        mlps = {str(2 * i): behind for i, symbol in enumerate(mixers, 1) if symbol == "*"}
        return {
            **fields.transformer({**hf, "rope_parameters": None}, "".join(mixers)),
            **_rotary_fields(hf),
            "layer_overrides": {"*": behind, **mlps},
            "qk_layernorm": True,
            "qk_layernorm_scope": "all_heads",
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": hf.get("linear_num_value_heads") or heads,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": hf.get("linear_value_head_dim") or 2 * key_dim,
            "linear_conv_kernel_dim": hf.get("linear_conv_kernel_dim", 4),
            "linear_allow_neg_eigval": hf.get("linear_allow_neg_eigval", True),
            "linear_norm_epsilon": 1e-5,  # in the code of the model, not in its config
        }

    def as_found(self, tensor_map: TensorMap, config: HybridConfig, shapes: Shapes) -> TensorMap:
        """See `Adapter.as_found`: transformers writes other names for norms, and cuts its one
        convolution into thirds, where queries, keys and values need not be of one size."""
        theirs = tensor_map.theirs
        if len(theirs) == 1 and theirs[0] not in shapes:
            layer, _, rest = theirs[0].removesuffix(".weight").rpartition(".")
            other = f"{layer}.{_NORMS.get(rest)}.weight"
            return replace(tensor_map, theirs=(other,)) if other in shapes else tensor_map
        if theirs[0].endswith("q_conv1d.weight") and all(name in shapes for name in theirs):
            found = [shapes[name][0] for name in theirs]
            if sum(found) == sum(_conv_sizes(config)):
                return replace(tensor_map, layout=joined(found))
        return tensor_map


_SYMBOLS = {"linear_attention": "G", "full_attention": "*"}


def _mixers(hf: Mapping[str, Any]) -> list[str]:
    """G or * for each of their layers."""
    types = fields.layer_types(hf, "linear_attention", 4)
    if hf.get("layer_types") is None and "full_attention" not in types:
        types[-1] = "full_attention"
    return fields.symbols_of(types, _SYMBOLS, hf["num_hidden_layers"])


def _rotary_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    rope = hf.get("rope_parameters")
    if rope is None or "rope_theta" not in rope:
        raise ValueError(
            f"config.json has rope_parameters={rope!r}, which some releases of transformers take "
            'for RoPE with base 10000 and others for none. Write {"rope_theta": null} for none, '
            "or the base"
        )
    if rope["rope_theta"] is None:
        return {"position_embedding_type": "none"}
    return fields.rotary(hf)
