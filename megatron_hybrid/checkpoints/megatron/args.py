"""Megatron-LM's saved arguments -> fields of a HybridConfig, and back.

Megatron keeps its command line in each checkpoint. Its names are those of megatron-core's
TransformerConfig, with the exceptions here; fields of core's config become ours in `core_config`.
"""

from __future__ import annotations

import dataclasses
import re
from argparse import Namespace
from collections.abc import Collection, Mapping
from typing import Any

import torch.nn.functional as F

from megatron_hybrid.checkpoints.megatron.core_config import hybrid_config_fields, rotary_fields
from megatron_hybrid.checkpoints.megatron.pickles import Unknown
from megatron_hybrid.compat import MLATransformerConfig, activations
from megatron_hybrid.models.config.architecture import ArchitectureFields
from megatron_hybrid.models.config.common import CommonFields
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.config.mlp import MLPFields
from megatron_hybrid.models.layer_pattern import (
    LAYER_KINDS,
    STAGE_BOUNDARY,
    split_predictions,
)
from megatron_hybrid.models.parameter_names import canonical_name
from megatron_hybrid.ops.activations import gelu_tanh, quick_gelu, squared_relu

FIRST_OF_PART = "mtp.layers.0.enorm.weight"
"""A parameter that every MTP head has."""

_PATTERN_ARGUMENTS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Names of the layer pattern: from 0.17 on, and before."""

_RENAMED = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "num_experts": "num_moe_experts",
}
"""Argument -> field of core's config."""

_CORE_FIELDS = {field.name for field in dataclasses.fields(MLATransformerConfig)}

# A parameter that only this layer kind of core's hybrid models has.
_KIND_MARKS = {
    "M": "mixer.in_proj.",
    "G": "self_attention.in_proj.",
    "*": "self_attention.linear_qkv.",
    "+": "self_attention.linear_kv_down_proj.",
    "E": "mlp.router.",
    "-": "mlp.linear_fc1.",
}


def fields_of_args(args: Namespace, names: Collection[str], num_stages: int = 1) -> dict[str, Any]:
    """Fields of the HybridConfig of a checkpoint.

    `vocab_size` is the padded one, since arguments do not say how many tokens the tokenizer has;
    only of Megatron's NullTokenizer, which has no files, they do.

    Args:
        args: what Megatron saved.
        names: of the tensors, in core's spelling, a layer in each.
        num_stages: pipeline stages to load on; the pattern's boundaries are kept if they make as
            many.

    Raises:
        ValueError: a setting that HybridModel does not implement, or that cannot be read.
        KeyError: an argument is missing.
    """
    values = vars(args)
    if values.get("heterogeneous_layers_config_path"):
        raise ValueError(
            "heterogeneous_layers_config_path is "
            f"{values['heterogeneous_layers_config_path']!r}: layers that differ by such a file "
            "are not read."
        )
    pattern = _layer_pattern(values, names)
    if pattern is not None and pattern.count(STAGE_BOUNDARY) + 1 != num_stages:
        pattern = pattern.replace(STAGE_BOUNDARY, "")
    if pattern is not None and num_stages > 1:
        pattern = split_predictions(pattern)[0]
    # Core's hybrid layer specs leave out the norms of queries and keys, whatever the arguments say.
    marks = (".self_attention.q_layernorm.weight", ".self_attention.kv_layernorm.weight")
    has_head_norms = any(canonical_name(name).endswith(marks) for name in names)
    fields = hybrid_config_fields(
        _core_fields(values),
        layer_pattern=pattern,
        vocab_size=_vocab_size(values),
        share_embeddings_and_output_weights=not values["untie_embeddings_and_output_weights"],
        mtp_use_repeated_layer=bool(values.get("mtp_use_repeated_layer")),  # core's since 0.19
        qk_layernorm=has_head_norms,
        qk_l2_norm=bool(values.get("qk_l2_norm")) and pattern is None,
        **({} if values.get("multi_latent_attention") else _position_fields(values)),
    )
    for name, value in fields.items():
        if isinstance(value, Unknown):
            raise ValueError(f"{name} is {value!r}, of a class that is not known here.")
    return fields


def is_gpt(args: Namespace, names: Collection[str]) -> bool:
    """Return whether a checkpoint is of a GPTModel, not of a hybrid model."""
    return _layer_pattern(vars(args), names) is None


def _layer_pattern(values: Mapping[str, Any], names: Collection[str]) -> str | None:
    """A hybrid model's pattern in core's symbols, with the MTP heads that
    are among the tensors; None: the model is a GPTModel. Megatron before 0.17 could also place
    layers by ratios: then the tensors tell."""
    for argument in _PATTERN_ARGUMENTS:
        if pattern := values.get(argument):
            return pattern if FIRST_OF_PART in names else split_predictions(pattern)[0]
    if "decoder.final_norm.weight" not in names:
        return None
    symbols: dict[int, str] = {}
    for name in names:
        match = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        for symbol, mark in _KIND_MARKS.items() if match else ():
            if match[2].startswith(mark):
                symbols[int(match[1])] = symbol
    return "".join(symbols[number] for number in sorted(symbols))


def _core_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of core's config, as Megatron makes them from its arguments."""
    core = {name: value for name, value in values.items() if name in _CORE_FIELDS}
    core |= {ours: values[theirs] for theirs, ours in _RENAMED.items() if theirs in values}
    if values.get("group_query_attention") is False:
        core["num_query_groups"] = None
    if core.get("rope_type", "") is None:
        del core["rope_type"]  # core's default
    core["bias_activation_fusion"] = bool(
        values.get("bias_swiglu_fusion" if values.get("swiglu") else "bias_gelu_fusion")
    )
    if values.get("swiglu"):
        core |= {"activation_func": F.silu, "gated_linear_unit": True}
    elif values.get("quick_geglu"):
        core |= {"activation_func": activations.quick_gelu, "gated_linear_unit": True}
    elif values.get("squared_relu"):
        core["activation_func"] = activations.squared_relu
    return core


def _position_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return rotary_fields(
        values["position_embedding_type"],
        rotary_base=values.get("rotary_base", 10000.0),
        rotary_percent=values.get("rotary_percent", 1.0),
        seq_len_interpolation_factor=values.get("rotary_seq_len_interpolation_factor"),
        rope_scaling_factor=(
            values.get("rope_scaling_factor", 8.0) if values.get("use_rope_scaling") else None
        ),
        yarn={
            name.removeprefix("yarn_"): value
            for name, value in values.items()
            if name.startswith("yarn_")
        },
    )


def _vocab_size(values: Mapping[str, Any]) -> int:
    if values.get("tokenizer_type") == "NullTokenizer" and values.get("vocab_size"):
        return int(values["vocab_size"]) + 1  # and the end of a document
    return values["padded_vocab_size"]


# Writing -----------------------------------------------------------------------------------------


_WRITTEN = "MG*W-E"
"""Layer symbols that Megatron's hybrid models can hold, W as attention with a window."""

_WRITTEN_OF_GPT = ("G*W", "-E")
"""Those that a layer of a GPTModel can hold, attention and MLP."""


def args_of_config(config: HybridConfig) -> Namespace:
    """Arguments with which Megatron builds a model, a GPTModel if `is_gpt_model`: the inverse of
    `fields_of_args`.

    Raises:
        ValueError: Megatron has no argument for a field of the config.
    """
    symbols = config.pattern.symbols
    is_gpt = config.is_gpt_model
    kind = "GPT models" if is_gpt else "hybrid models"
    for number, symbol in enumerate(symbols):
        if symbol not in (_WRITTEN_OF_GPT[number % 2] if is_gpt else _WRITTEN):
            raise ValueError(
                f"layer_pattern has layers {symbol!r} ({LAYER_KINDS[symbol].meaning}), which "
                f"megatron-core's {kind} do not have, or not with the same parts."
            )
    groups = {group for symbol in symbols for group in LAYER_KINDS[symbol].fields}
    groups |= {ArchitectureFields, CommonFields, MLPFields}
    names = {field.name for group in groups for field in dataclasses.fields(group)} & _CORE_FIELDS
    names |= {"num_layers", "num_attention_heads"}
    own = {name: getattr(config, name) for name in sorted(names)}
    values = {
        **{name: value for name, value in own.items() if not callable(value)},
        **{theirs: getattr(config, ours) for theirs, ours in _RENAMED.items()},
        "mtp_use_repeated_layer": config.mtp_use_repeated_layer,
        "params_dtype": config.params_dtype,
        "bf16": config.bf16,
        "fp16": config.fp16,
        "padded_vocab_size": config.vocab_size,
        "untie_embeddings_and_output_weights": not config.share_embeddings_and_output_weights,
        "group_query_attention": config.num_query_groups is not None,
        **_activation_arguments(config),
        **_layer_arguments(config, symbols),
    }
    # A hybrid model's norms of queries and keys are no argument's matter: see `fields_of_args`.
    names = ["decoder.layers.0.self_attention.q_layernorm.weight"]
    names = names if is_gpt and config.qk_layernorm else []
    args = Namespace(**values)
    lost = config.differences(HybridConfig(**fields_of_args(args, names)))
    if lost:
        raise ValueError(
            f"{lost[0]} is {getattr(config, lost[0])!r}, which megatron-core's {kind} cannot be "
            "set to."
        )
    return args


def _layer_arguments(config: HybridConfig, symbols: str) -> dict[str, Any]:
    """Return what layers there are, and what differs between them."""
    if config.is_gpt_model:
        mixers, mlps = symbols[::2], symbols[1::2]
        values: dict[str, Any] = {"num_layers": len(mixers), "is_hybrid_model": False}
        if "E" in mlps:
            values["moe_layer_freq"] = 1 if "-" not in mlps else [int(m == "E") for m in mlps]
        if "G" in mixers:
            values["experimental_attention_variant"] = "gated_delta_net"
            values["linear_attention_freq"] = [int(mixer == "G") for mixer in mixers]
    else:
        mixers = symbols
        pattern = config.layer_pattern.replace("W", "*")
        values = {**dict.fromkeys(_PATTERN_ARGUMENTS, pattern), "is_hybrid_model": True}
    if "W" in mixers:
        values["window_size"] = (config.sliding_window - 1, 0)  # core does not count the token
        values["window_attn_skip_freq"] = [int(symbol == "W") for symbol in mixers]
    return values | _position_arguments(config, mixers)


def _activation_arguments(config: HybridConfig) -> dict[str, Any]:
    function, gated = config.activation_func, config.gated_linear_unit
    return {
        "swiglu": gated and function is F.silu,
        "quick_geglu": gated and function is quick_gelu,
        "squared_relu": function is squared_relu,
        "bias_gelu_fusion": function is gelu_tanh and config.add_bias_linear,
        "bias_swiglu_fusion": False,
    }


def _position_arguments(config: HybridConfig, symbols: str) -> dict[str, Any]:
    step = 2 if config.is_gpt_model else 1
    numbers = range(1, step * len(symbols) + 1, step)
    kinds = [config.for_layer(number).position_embedding_type for number in numbers]
    attends = [kind for kind, symbol in zip(kinds, symbols) if symbol in "*W"]
    values = {
        "position_embedding_type": "rope" if "rope" in attends else "none",
        "rotary_base": config.rotary_base,
        "rotary_percent": config.rotary_percent,
    }
    if {"rope", "none"} <= set(attends):
        values["no_rope_freq"] = [int(kind == "none") for kind in kinds]
    scaling = config.rotary_scaling or {}
    if scaling.get("rope_type") == "linear":
        values["rotary_seq_len_interpolation_factor"] = scaling["factor"]
    elif scaling.get("rope_type") == "llama3":
        values |= {"use_rope_scaling": True, "rope_scaling_factor": scaling["factor"]}
    return values
