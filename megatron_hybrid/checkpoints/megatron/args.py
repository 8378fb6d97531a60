"""Megatron-LM's saved arguments -> fields of a HybridConfig, and back.

Megatron keeps its command line in each checkpoint. Its names are those of megatron-core's
TransformerConfig, with the exceptions here; fields of core's config become ours in `core_config`.
"""

import dataclasses
import logging
import math
import re
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from megatron_hybrid.checkpoints.megatron.core_config import hybrid_config_fields, rotary_fields
from megatron_hybrid.checkpoints.megatron.pickles import Unknown
from megatron_hybrid.compat import MLATransformerConfig, activations
from megatron_hybrid.models.config.architecture import ArchitectureFields
from megatron_hybrid.models.config.common import CommonFields
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.config.mlp import MLPFields
from megatron_hybrid.models.config.position import yarn_amplitude, yarn_scale
from megatron_hybrid.models.layer_pattern import LAYER_KINDS, STAGE_BOUNDARY, split_predictions
from megatron_hybrid.models.parameter_names import canonical_name
from megatron_hybrid.ops.activations import gelu_tanh, quick_gelu, squared_relu

logger = logging.getLogger(__name__)

FIRST_OF_MTP = "mtp.layers.0.enorm.weight"
"""A parameter that every MTP head has."""

_PATTERN_ARGUMENTS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Names of the layer pattern: from 0.17 on, and before."""

_RENAMED = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "num_experts": "num_moe_experts",
}
"""Argument -> field of core's config."""

_YARN_WITHOUT_PREFIX = ("rotary_scaling_factor", "mscale", "mscale_all_dim")
"""Arguments that YaRN has in common with latent attention."""

YARN_DEFAULTS = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
"""Arguments of YaRN, without their prefix -> what Megatron takes for None."""

_NEW_ARGUMENTS = {"null_tokenizer_eod_id": 18, "yarn_original_max_position_embeddings": 19}
"""Argument -> N of the first Megatron 0.N that has it: nothing else says which one saved."""

_INTERPOLATION = "rotary_seq_len_interpolation_factor"
_PASSED = {"use_rope_scaling": (0, math.inf), _INTERPOLATION: (19, 18), "yarn": (0, 18)}
"""Position argument or type -> N of the first Megatron 0.N whose training gives it to a GPTModel,
and to a hybrid model (`gpt_builders`, `mamba_builders`, `argument_utils`)."""

_SCALING_FACTOR = 8.0
"""Factor of Llama 3's scaling in Megatron's GPT models, to which it passes no other one."""

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
    """Convert the arguments to fields of the HybridConfig of a checkpoint.

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
    core = _core_fields(values)
    if FIRST_OF_MTP not in names or num_stages > 1:
        core["mtp_num_layers"] = None
    fields = hybrid_config_fields(
        core,
        layer_pattern=pattern,
        vocab_size=_vocab_size(values),
        share_embeddings_and_output_weights=not values["untie_embeddings_and_output_weights"],
        mtp_use_repeated_layer=bool(values.get("mtp_use_repeated_layer")),  # core's since 0.19
        qk_layernorm=has_head_norms(names),
        qk_l2_norm=bool(values.get("qk_l2_norm")) and pattern is None,
        **_position_fields(values, is_gpt=pattern is None),
    )
    for name, value in fields.items():
        if isinstance(value, Unknown):
            raise ValueError(f"{name} is {value!r}, of a class that is not known here.")
    return fields


def has_head_norms(names: Collection[str]) -> bool:
    """Return whether tensors of core have norms of queries and keys among them, which core's hybrid
    layer specs leave out, whatever its config says."""
    marks = (".self_attention.q_layernorm.weight", ".self_attention.kv_layernorm.weight")
    return any(canonical_name(name).endswith(marks) for name in names)


def _layer_pattern(values: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return a hybrid model's pattern in core's symbols, with MTP heads that are there; None for a
    GPTModel. Megatron before 0.17 could also place layers by ratios: then the tensors say."""
    for argument in _PATTERN_ARGUMENTS:
        if pattern := values.get(argument):
            return pattern if FIRST_OF_MTP in names else split_predictions(pattern)[0]
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
    """Return the fields of core's config, as Megatron makes them from its arguments."""
    core = dict(values)  # with fields of newer cores, and some of none
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


def _position_fields(values: Mapping[str, Any], is_gpt: bool) -> dict[str, Any]:
    if values.get("multi_latent_attention"):
        return {}
    values = {**values, **_unread_positions(values, is_gpt)}
    yarn = {
        name.removeprefix("yarn_"): value
        for name, value in sorted(values.items())  # those with the prefix last
        if name in _YARN_WITHOUT_PREFIX or (name.startswith("yarn_") and value is not None)
    }
    return rotary_fields(
        values["position_embedding_type"],
        rotary_base=values.get("rotary_base", 10000.0),
        rotary_percent=values.get("rotary_percent", 1.0),
        seq_len_interpolation_factor=values.get(_INTERPOLATION),
        rope_scaling_factor=_SCALING_FACTOR if values.get("use_rope_scaling") else None,
        yarn={**YARN_DEFAULTS, **yarn},
    )


def _unread_positions(values: Mapping[str, Any], is_gpt: bool) -> dict[str, Any]:
    """Map position arguments that Megatron does not give to the model to what it has instead."""
    kind, release = values["position_embedding_type"], _release(values)
    late = {name for name, since in _PASSED.items() if release < since[0 if is_gpt else 1]}
    unread: dict[str, Any] = {name: None for name in late if values.get(name)}
    if kind in late:
        unread["position_embedding_type"] = "none"  # such models take it, and turn nothing
    factor = values.get("rope_scaling_factor", _SCALING_FACTOR)
    if values.get("use_rope_scaling") and factor != _SCALING_FACTOR:
        unread["rope_scaling_factor"] = _SCALING_FACTOR
    return unread


def _release(values: Mapping[str, Any]) -> int:
    """Find N of the Megatron 0.N that saved these arguments: 18, 19 for newer, 0 for older ones."""
    return max((n for name, n in _NEW_ARGUMENTS.items() if name in values), default=0)


def warn_of_positions(source: object, args: Namespace, is_gpt: bool) -> None:
    """Log which position arguments have no effect, or not in all of Megatron's scripts."""
    values = vars(args)
    if values.get("multi_latent_attention"):  # which reads none of them
        return
    unread = _unread_positions(values, is_gpt)
    for name, instead in unread.items():
        text = "%s: %s is %r, but Megatron builds such models with %r; rotary_scaling sets others"
        logger.warning(text, source, name, values[name], instead)
    if values.get(_INTERPOLATION) and _INTERPOLATION not in unread:
        logger.warning("%s: Megatron trains with %s, and infers without", source, _INTERPOLATION)


def _vocab_size(values: Mapping[str, Any]) -> int:
    if values.get("tokenizer_type") == "NullTokenizer" and values.get("vocab_size"):
        has_end = _release(values) >= 18  # older ones add the end of a document
        return min(int(values["vocab_size"]) + (not has_end), values["padded_vocab_size"])
    return values["padded_vocab_size"]


# Writing -----------------------------------------------------------------------------------------


_WRITTEN = "MG*W-E"
"""Layer symbols that Megatron's hybrid models can hold, W as attention with a window."""

_WRITTEN_OF_GPT = ("G*W+", "-E")
"""Those that a layer of a GPTModel can hold, attention and MLP."""

_OF_CORE = {
    "norm_placement": "core has norms before attention and MLP alone",
    "qk_layernorm_scope": "core norms queries and keys a head at a time",
    "rotary_scaling": "Megatron's scripts take linear, YaRN and, of GPT models, Llama 3's by 8",
}
"""What core has in place of a field's other values."""


def is_written_as_gpt(config: HybridConfig) -> bool:
    """Return whether a checkpoint for Megatron holds a GPTModel: the model comes from one, or from
    Hugging Face and has attention and MLP in turn."""
    symbols = config.pattern.symbols
    return config.is_gpt_model or (
        config.huggingface_config is not None
        and len(symbols) % 2 == 0
        and all(symbol in _WRITTEN_OF_GPT[i % 2] for i, symbol in enumerate(symbols))
    )


def megatron_form(config: HybridConfig) -> HybridConfig:
    """Return a config that computes the same in fields that Megatron has, as far as it can.

    Output norms of Gated DeltaNet are centered as all norms there: `torch_dist` shifts their
    weights. Biases are in all projections of attention and MLPs, or in none: it adds zeros where
    one of the two has them alone. A residual stream to which layers add r times their output is r
    times one to which they add all of it; norms see the same numbers if their epsilon is divided by
    r^2.
    """
    overrides = config.layer_overrides
    numbers = [n for n, symbol in enumerate(config.pattern.symbols, 1) if symbol in "*W-"]
    has_bias = {config.for_layer(number).add_bias_linear for number in numbers}
    if len(has_bias) > 1 and set(config.symbols) <= {*"MG*W-"}:
        overrides = {
            layers: {name: value for name, value in fields.items() if name != "add_bias_linear"}
            for layers, fields in overrides.items()
        }
        config = replace(config, add_bias_linear=True, layer_overrides=overrides)
    factor = 1.0
    by_layer = {name for fields in overrides.values() for name in fields}
    if (
        set(config.layer_pattern) <= {*"M*W-E", STAGE_BOUNDARY}  # their norms read the stream
        and by_layer.isdisjoint(("residual_multiplier", "layernorm_epsilon", "norm_placement"))
        and config.norm_placement == "pre"
        and not (config.qk_layernorm or "qk_layernorm" in by_layer)
    ):
        factor = config.residual_multiplier
    return replace(
        config,
        linear_norm_zero_centered_gamma=None,
        residual_multiplier=config.residual_multiplier / factor,
        embedding_multiplier=config.embedding_multiplier / factor,
        layernorm_epsilon=config.layernorm_epsilon / factor**2,
    )


def args_of_config(config: HybridConfig) -> Namespace:
    """Return arguments with which Megatron builds a model, a GPTModel if `is_written_as_gpt`: the
    inverse of `fields_of_args`, of the config's `megatron_form`.

    Raises:
        ValueError: Megatron has no argument for a field of the config; all such fields are named.
    """
    config = megatron_form(config)
    symbols = config.pattern.symbols
    is_gpt = is_written_as_gpt(config)
    kind = "GPT models" if is_gpt else "hybrid models"
    for number, symbol in enumerate(symbols + "".join(config.pattern.predictions)):
        if symbol not in (_WRITTEN_OF_GPT[number % 2] if is_gpt else _WRITTEN):
            raise ValueError(
                f"layer_pattern has layers {symbol!r} ({LAYER_KINDS[symbol].meaning}), which "
                f"megatron-core's {kind} do not have, or not with the same parts."
            )
    if config.moe_router_enable_expert_bias and config.moe_router_score_function == "softmax":
        raise ValueError(
            "moe_router_enable_expert_bias is True with moe_router_score_function='softmax', but "
            "in megatron-core such a bias needs sigmoid scores."
        )
    args = Namespace(
        **{
            **_values_of_fields(config),
            **{theirs: getattr(config, ours) for theirs, ours in _RENAMED.items()},
            "mtp_num_layers": config.mtp_num_layers,
            "mtp_use_repeated_layer": config.mtp_use_repeated_layer,
            "params_dtype": config.params_dtype,
            "bf16": config.bf16,
            "fp16": config.fp16,
            "padded_vocab_size": config.vocab_size,
            "untie_embeddings_and_output_weights": not config.share_embeddings_and_output_weights,
            "group_query_attention": config.num_query_groups is not None,
            **_activation_arguments(config),
            **_factor_arguments(config),
            **_layer_arguments(config, symbols, is_gpt),
        }
    )
    again = HybridConfig(**fields_of_args(args, _marks_of(config, is_gpt)))
    if lost := _lost(config, again):
        raise ValueError(f"megatron-core's {kind} cannot be set to {'; '.join(lost)}.")
    return args


def _values_of_fields(config: HybridConfig) -> dict[str, Any]:
    """Return the fields that core's config has, too, as the layers have them that read them."""
    read: dict[str, list[Any]] = {}
    symbols = config.pattern.symbols
    for number, symbol in enumerate(symbols, start=1):
        layer = config.for_layer(number)
        for group in {CommonFields, *LAYER_KINDS[symbol].fields}:
            for field in dataclasses.fields(group):
                read.setdefault(field.name, []).append(getattr(layer, field.name))
    groups = {group for symbol in config.symbols for group in LAYER_KINDS[symbol].fields}
    groups |= {ArchitectureFields, CommonFields, MLPFields}
    names = {field.name for group in groups for field in dataclasses.fields(group)} & _CORE_FIELDS
    values = {}
    for name in sorted(names | {"num_layers", "num_attention_heads"}):
        first, *others = read.get(name) or [getattr(config, name)]
        # Where layers differ, the comparison with the config finds it.
        values[name] = first if all(other == first for other in others) else getattr(config, name)
    if not config.has_attention:  # core divides it by the tensor-parallel size all the same
        values["num_attention_heads"] = config.hidden_size
    return {name: value for name, value in values.items() if not callable(value)}


def _marks_of(config: HybridConfig, is_gpt: bool) -> list[str]:
    """Return names of tensors that say of a checkpoint what its arguments do not: whether there are
    MTP heads, and norms of queries and keys, which core's hybrid models do not have."""
    marks = [FIRST_OF_MTP] if config.pattern.predictions else []
    if is_gpt and config.qk_layernorm and not set("*W").isdisjoint(config.symbols):
        marks.append("decoder.layers.0.self_attention.q_layernorm.weight")
    if is_gpt and config.latent_norm and "+" in config.symbols:
        marks.append("decoder.layers.0.self_attention.kv_layernorm.weight")
    return marks


def _lost(config: HybridConfig, again: HybridConfig) -> list[str]:
    """Return each field in which a config differs from the one that Megatron's arguments give."""
    lost = {}
    for name in config.differences(again):
        if name != "layer_overrides":
            lost[name] = f"{name}={config.to_dict()[name]!r}"
    numbers = range(1, config.num_layers + 1) if config.layer_overrides else ()
    for number in numbers:
        symbol = config.pattern.symbols[number - 1]
        one, other = config.for_layer(number), again.for_layer(number)
        for name in config.overrides_of(number, symbol):
            value = one.to_dict()[name]
            if value != other.to_dict()[name]:
                lost.setdefault(name, f"{name}={value!r} in layer {number}")
    if config.pattern.predictions != again.pattern.predictions:
        lost["mtp"] = f"MTP heads of the layers {config.pattern.predictions[0]!r} for this pattern"
    return [
        f"{text} ({_OF_CORE[name]})" if name in _OF_CORE else text for name, text in lost.items()
    ]


def _layer_arguments(config: HybridConfig, symbols: str, is_gpt: bool) -> dict[str, Any]:
    """Return what layers there are, and what differs between them."""
    values: dict[str, Any] = {"is_hybrid_model": not is_gpt}
    if is_gpt:
        mixers, mlps = symbols[::2], symbols[1::2]
        values["num_layers"] = len(mixers)
        if "E" in mlps:
            values["moe_layer_freq"] = 1 if "-" not in mlps else [int(m == "E") for m in mlps]
        if "G" in mixers:
            values["experimental_attention_variant"] = "gated_delta_net"
            values["linear_attention_freq"] = [int(mixer == "G") for mixer in mixers]
        if "+" in mixers:
            values |= _latent_arguments(config)
    else:
        mixers = symbols
        pattern = config.layer_pattern.replace("W", "*")
        values |= dict.fromkeys(_PATTERN_ARGUMENTS, pattern)
    if "W" in mixers:
        values["window_size"] = (config.sliding_window - 1, 0)  # core does not count the token
        values["window_attn_skip_freq"] = [int(symbol == "W") for symbol in mixers]
    return values | _position_arguments(config, mixers, is_gpt)


def _activation_arguments(config: HybridConfig) -> dict[str, Any]:
    function, gated = config.activation_func, config.gated_linear_unit
    return {
        "swiglu": gated and function is F.silu,
        "quick_geglu": gated and function is quick_gelu,
        "squared_relu": function is squared_relu,
        "bias_gelu_fusion": function is gelu_tanh and config.add_bias_linear,
        "bias_swiglu_fusion": False,
    }


def _factor_arguments(config: HybridConfig) -> dict[str, Any]:
    """Return the factors of embedding and logits, which core has since 0.17 as part of MuP."""
    if config.embedding_multiplier == config.logits_multiplier == 1.0:
        return {}
    return {
        "use_mup": True,
        "mup_base_hidden_size": config.hidden_size,  # with which it scales nothing by width
        "mup_embedding_mult": config.embedding_multiplier,
        "mup_output_mult": config.logits_multiplier,
        "softmax_scale": config.softmax_scale or (config.kv_channels or 1) ** -0.5,
    }


def _position_arguments(config: HybridConfig, symbols: str, is_gpt: bool) -> dict[str, Any]:
    """Return the position embedding, as far as Megatron hands it to the model."""
    step = 2 if is_gpt else 1  # layers of ours for each one that core numbers
    numbers = range(1, step * len(symbols) + 1, step)
    kinds = [config.for_layer(number).position_embedding_type for number in numbers]
    attends = [kind for kind, symbol in zip(kinds, symbols) if symbol in "*W+"]
    values = {
        "position_embedding_type": "rope" if "rope" in attends else "none",
        "rotary_base": config.rotary_base,
        "rotary_percent": config.rotary_percent,
        **dict.fromkeys(_NEW_ARGUMENTS),
    }
    if {"rope", "none"} <= set(attends):
        values["no_rope_freq"] = [int(kind == "none") for kind in kinds]
    scaling = config.rotary_scaling or {}
    if scaling.get("rope_type") == "linear":
        values["rotary_seq_len_interpolation_factor"] = scaling["factor"]
    elif scaling.get("rope_type") == "llama3":
        values |= {"use_rope_scaling": True, "rope_scaling_factor": scaling["factor"]}
    elif scaling.get("rope_type") == "yarn" and "+" not in symbols:
        values["position_embedding_type"] = "yarn"
        values |= _yarn_arguments(scaling, "yarn_")
    return values | _unread_positions(values, is_gpt)


def _latent_arguments(config: HybridConfig) -> dict[str, Any]:
    """Return the arguments of multi-head latent attention, which has a position embedding of its
    own."""
    scaling = config.rotary_scaling or {}
    values = {"multi_latent_attention": True, "qk_layernorm": config.latent_norm}
    values["rotary_interleaved"] = False  # which core refuses next to it, and does all the same
    width = config.qk_head_dim + config.qk_pos_emb_head_dim
    # Core has the scale of scores as the square of YaRN's, and without YaRN, too.
    scale = math.sqrt((config.softmax_scale or width**-0.5) * math.sqrt(width))
    if scaling.get("rope_type") == "yarn":
        return values | {"rope_type": "yarn", **_yarn_arguments(scaling, "", scale)}
    factor = 1.0 if math.isclose(scale, 1.0) else 40.0  # any above 1: only the scale reads it
    values |= {"rope_type": "rope", "rotary_scaling_factor": factor}
    return values | {"mscale_all_dim": _mscale(factor, scale)}


def _mscale(factor: float, scale: float) -> float:
    """Return the inverse of `yarn_scale`, without errors of rounding; 0 for a factor of 1."""
    unit = yarn_scale(factor, 1.0) - 1.0
    return round((scale - 1.0) / unit, 12) if unit else 0.0


def _yarn_arguments(scaling: Mapping[str, Any], prefix: str, scale: float = 1.0) -> dict[str, Any]:
    """Return the arguments of YaRN.

    Args:
        prefix: of those that only latent attention has without.
        scale: root of the factor of scores, which divides that of cos and sin.
    """
    factor = scaling["factor"]
    return {
        "rotary_scaling_factor": factor,
        f"{prefix}original_max_position_embeddings": scaling["original_max_position_embeddings"],
        f"{prefix}beta_fast": scaling.get("beta_fast") or 32.0,
        f"{prefix}beta_slow": scaling.get("beta_slow") or 1.0,
        "mscale": _mscale(factor, yarn_amplitude(scaling) * scale),
        "mscale_all_dim": _mscale(factor, scale),
        f"{prefix}correction_range_round_to_int": scaling.get("truncate", True),
    }
