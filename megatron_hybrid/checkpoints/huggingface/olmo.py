"""OLMo 2 and 3, EXAONE 4: norms of queries and keys, and norms after attention and MLP. OLMo
Hybrid: also Gated DeltaNet layers, with norms in front."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, Shapes, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import joined
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_NAMES = TensorNames(
    tensors.TRANSFORMER, post_norms=("post_attention_layernorm", "post_feedforward_layernorm")
)
_POST_NORMS = {"norm_placement": "post", "qk_layernorm": True}
_NORMS = {**_POST_NORMS, "qk_layernorm_scope": "all_heads"}


class Olmo2(Adapter):
    model_types = ("olmo2",)
    names = _NAMES

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"rms_norm_eps": 1e-5, **hf}
        return {**fields.transformer(hf, attention_bias=hf.get("attention_bias")), **_NORMS}


class Olmo3(Adapter):
    """`Olmo3ForCausalLM`: windows, and full attention in every fourth layer."""

    model_types = ("olmo3",)
    names = _NAMES

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"rms_norm_eps": 1e-5, "sliding_window": 4096, **hf}
        mixers = fields.windows(hf, "sliding_attention", 4)
        bias = hf.get("attention_bias")
        found = fields.transformer({**hf, **fields.WITHOUT_ROPE}, mixers, attention_bias=bias)
        bases = dict.fromkeys(fields.WINDOW_SYMBOLS, ("rope_theta", 500000.0))
        for symbol, rotary in fields.rotary_by_symbol(hf, mixers, bases).items():
            found["layer_overrides"].setdefault(symbol, {}).update(rotary)
        return {**found, **_NORMS}


class Exaone4(Adapter):
    """`Exaone4ForCausalLM`: windows, and full attention without RoPE in every fourth layer."""

    model_types = ("exaone4",)
    names = _NAMES

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        left_out = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096}
        hf = {**left_out, "sliding_window_pattern": 4, **hf}
        mixers = None
        if hf["sliding_window"] is not None or hf.get("layer_types"):
            mixers = fields.windows(hf, "sliding_attention", hf["sliding_window_pattern"])
        found = fields.transformer(hf, mixers)
        if mixers is not None and hf["sliding_window"] is not None and "*" in mixers:
            found["layer_overrides"]["*"] = {"position_embedding_type": "none"}
        return {**found, **_POST_NORMS}


def _conv_sizes(config: HybridConfig) -> tuple[int, int, int]:
    """Return the channels of queries, keys and values."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, keys, config.linear_num_value_heads * config.linear_value_head_dim


def _linear_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    sizes, heads = _conv_sizes(config), config.linear_num_value_heads
    widths = (*sizes, sizes[2], heads, heads)
    return tensors.delta_rule(config, ours, theirs, "qkvgba", widths, sizes)


_RENAMED_NORMS = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
    "post_attention_layernorm": "feedforward_layer_norm",
}
"""Names in the released folders -> the same norms in folders that transformers wrote: it renames
those of both layer types, though the released names are those of the linear layers alone."""


class OlmoHybrid(Adapter):
    model_types = ("olmo_hybrid",)
    names = replace(
        _NAMES,
        parts={**tensors.TRANSFORMER, "G": ("linear_attn", _linear_tensors)},
        norms=("attention_layer_norm", "feedforward_layer_norm"),
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, attention_bias=False)
        fields.only(hf, hidden_act=("silu", "swish"))  # it is that of the convolution, too
        types = fields.layer_types(hf, "linear_attention", 4)
        if hf.get("layer_types") is None and "full_attention" not in types:
            types[-1] = "full_attention"
        symbols = {"linear_attention": "G", "full_attention": "*"}
        mixers = fields.symbols_of(types, symbols, hf["num_hidden_layers"])
        heads = fields.required(hf, "num_attention_heads")
        key_heads = hf.get("linear_num_key_heads") or heads
        key_dim = hf.get("linear_key_head_dim") or int(0.75 * hf["hidden_size"] / key_heads)
        after = {"norm_placement": "post"}
        mlps = {str(2 * i): after for i, symbol in enumerate(mixers, 1) if symbol == "*"}
        return {
            **fields.transformer({**hf, "rope_parameters": None}, mixers),
            **_rotary_fields(hf),
            **_NORMS,
            "norm_placement": "pre",
            "layer_overrides": {"*": after, **mlps},
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": hf.get("linear_num_value_heads") or heads,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": hf.get("linear_value_head_dim") or 2 * key_dim,
            "linear_conv_kernel_dim": hf.get("linear_conv_kernel_dim", 4),
            "linear_allow_neg_eigval": hf.get("linear_allow_neg_eigval", True),
            "linear_norm_epsilon": 1e-5,  # in the code of the model, not in its config
        }

    def spellings(self, tensor_map: TensorMap, config: HybridConfig) -> Iterator[TensorMap]:
        """See `Adapter.spellings`: transformers writes other names for norms."""
        layer, _, norm = tensor_map.theirs[0].removesuffix(".weight").rpartition(".")
        if norm in _RENAMED_NORMS:
            yield replace(tensor_map, theirs=(f"{layer}.{_RENAMED_NORMS[norm]}.weight",))

    def as_found(self, tensor_map: TensorMap, config: HybridConfig, shapes: Shapes) -> TensorMap:
        """See `Adapter.as_found`: transformers cuts its one convolution into thirds, where queries,
        keys and values need not be of one size."""
        tensor_map = super().as_found(tensor_map, config, shapes)
        theirs = tensor_map.theirs
        if theirs[0].endswith("q_conv1d.weight") and all(name in shapes for name in theirs):
            found = [shapes[name][0] for name in theirs]
            if sum(found) == sum(_conv_sizes(config)):
                return replace(tensor_map, layout=joined(found))
        return tensor_map


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
