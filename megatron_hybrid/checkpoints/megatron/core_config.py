"""Fields of megatron-core's TransformerConfig -> fields of a HybridConfig that serves the model.

Fields of training, sharding, speed and rounding are left out. A field that changes what the model
computes and that HybridModel does not implement is an error.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron_hybrid.compat import MLATransformerConfig, TransformerConfig, activations
from megatron_hybrid.models.config.common import CommonFields
from megatron_hybrid.models.config.field_group import ModelFields
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.config.mlp import MLPFields
from megatron_hybrid.models.config.position import yarn_scale
from megatron_hybrid.models.config.unsupported import RESULT_FIELDS
from megatron_hybrid.models.layer_pattern import (
    LAYER_KINDS,
    PREDICTION_BOUNDARY,
    STAGE_BOUNDARY,
    split_predictions,
)
from megatron_hybrid.ops.activations import ACTIVATIONS, gelu_tanh, quick_gelu, squared_relu

logger = logging.getLogger(__name__)

_SYMBOLS = "MG*+-E"
"""Layer symbols of megatron-core's hybrid models that HybridModel serves, with its own meanings."""

_DELTA_NETS = ("gated_delta_net", "gdn")
"""Core's name of Gated DeltaNet, and that of 0.20, which takes both and keeps the second."""

_CORE_ACTIVATIONS = {
    activations.squared_relu: squared_relu,
    activations.quick_gelu: quick_gelu,
    activations.fast_gelu: gelu_tanh,
}


def hybrid_config_fields(
    core: Mapping[str, Any] | TransformerConfig, *, layer_pattern: str | None, **fields: Any
) -> dict[str, Any]:
    """Convert a model of megatron-core to fields of the `HybridConfig` that serves it.

    Args:
        core: the model's config, or its fields by name; those left out have core's defaults.
        layer_pattern: that of a hybrid model, in core's symbols; None means a GPTModel.
        fields: fields of HybridConfig that core's config lacks, such as vocab_size, or that replace
            what it says; see `rotary_fields`.

    Raises:
        ValueError: a layer kind, or a field's value, that HybridModel does not implement.
    """
    values = _with_defaults(core)
    values.update((name, value) for name, value in fields.items() if name in values)
    if values["experimental_attention_variant"] not in (None, *_DELTA_NETS):
        raise ValueError(
            "experimental_attention_variant is "
            f"{values['experimental_attention_variant']!r}, which HybridModel does not support: it "
            "serves 'gated_delta_net' and full attention."
        )
    if layer_pattern is None:
        pattern, layers_per_number = _gpt_pattern(values), 2
    else:
        layer_pattern, parts = split_predictions(layer_pattern)
        pattern, layers_per_number = _known_symbols(layer_pattern), 1
    pattern, overrides = _place_attention(pattern, values, layers_per_number)
    if layer_pattern is None:  # with the layers of its last one
        parts = [pattern[-2:]] * (values["mtp_num_layers"] or 0)
    if parts and (reason := _refusal_of_parts(pattern, parts, values, fields)) is not None:
        logger.warning("the layers for multi-token prediction are left out: %s", reason)
        parts = []
    result = {
        "params_dtype": _params_dtype(values),
        **_carried(values, pattern),
        **_refused(values),
        **(_multipliers(values, pattern) if values.get("use_mup") else {}),
        **fields,
        "layer_pattern": PREDICTION_BOUNDARY.join((pattern, *parts)),
        "mtp_num_layers": None,  # it follows from the pattern
        "layer_overrides": overrides,
        "is_gpt_model": layer_pattern is None,
        "activation_func": _activation(values),
    }
    if "G" in pattern and result["activation_func"] is not F.silu:
        raise ValueError(
            f"activation_func is {result['activation_func'].__name__}, which Gated DeltaNet of "
            "megatron-core uses too; HybridModel's uses SiLU. Use activation_func=F.silu."
        )
    if "W" in pattern:
        result["sliding_window"] = values["window_size"][0] + 1  # core does not count the token
    if "+" in pattern:
        result.update(_latent_attention(values))
        return result
    rotates = "*" in pattern and result.get("position_embedding_type") == "rope"
    if layer_pattern is not None and rotates and values["rotary_interleaved"]:
        raise ValueError(
            "rotary_interleaved is True, but megatron-core's hybrid models compute the angles for "
            "pairs (i, i + d/2), so that no pair turns as one. Leave it at False."
        )
    return result


def rotary_fields(
    position_embedding_type: str,
    *,
    rotary_base: float = 10000.0,
    rotary_percent: float = 1.0,
    seq_len_interpolation_factor: float | None = None,
    rope_scaling_factor: float | None = None,
    yarn: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return fields of HybridConfig for the position embedding of a model of megatron-core.

    Args:
        position_embedding_type: as a stock model takes it.
        rotary_base, rotary_percent: of "rope" and "yarn".
        seq_len_interpolation_factor: of "rope": positions are divided by it.
        rope_scaling_factor: of "rope": Llama 3's scaling; None for a model with rope_scaling=False.
        yarn: of "yarn": the config's `yarn_*` values without this prefix.

    Raises:
        ValueError: a position embedding that HybridModel does not implement.
    """
    if position_embedding_type == "none":
        return {"position_embedding_type": "none"}
    scaling = None
    if position_embedding_type == "yarn":
        rotary_percent = 1.0  # core rotates whole heads with it, whatever the field says
        scaling = _yarn(yarn)
    elif position_embedding_type != "rope":
        raise ValueError(
            f"position_embedding_type is {position_embedding_type!r}, which HybridModel does not "
            "support: it serves 'rope', 'yarn' and 'none'."
        )
    elif rope_scaling_factor is not None:
        if seq_len_interpolation_factor is not None:
            raise ValueError(
                f"seq_len_interpolation_factor is {seq_len_interpolation_factor} next to a "
                f"rope_scaling_factor of {rope_scaling_factor}; HybridModel supports one of them."
            )
        scaling = {
            "rope_type": "llama3",
            "factor": rope_scaling_factor,
            # What core's RotaryEmbedding scales with, which no argument changes.
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    elif seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": seq_len_interpolation_factor}
    return {
        "position_embedding_type": "rope",
        "rotary_base": rotary_base,
        "rotary_percent": rotary_percent,
        "rotary_scaling": scaling,
    }


def _with_defaults(core: Mapping[str, Any] | TransformerConfig) -> dict[str, Any]:
    """Return all fields of a config of core, by name."""
    if not isinstance(core, Mapping):
        return {field.name: getattr(core, field.name) for field in dataclasses.fields(core)}
    latent = core.get("multi_latent_attention", False)
    kind = MLATransformerConfig if latent else TransformerConfig
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    return {**defaults, **core}


def _gpt_pattern(values: Mapping[str, Any]) -> str:
    """Write the layers of a GPTModel: attention and MLP of each in turn."""
    num_layers = values["num_layers"]
    linear = [0] * num_layers
    if values["experimental_attention_variant"] is not None:
        freq = values["linear_attention_freq"]
        linear = _per_layer("linear_attention_freq", freq, num_layers, lambda i: (i + 1) % freq)
    experts = [0] * num_layers
    if values["num_moe_experts"] is not None:
        freq = values["moe_layer_freq"]
        experts = _per_layer("moe_layer_freq", freq, num_layers, lambda i: i % freq == 0)
    attention = "+" if values["multi_latent_attention"] else "*"
    return "".join(
        ("G" if is_linear else attention) + ("E" if has_experts else "-")
        for is_linear, has_experts in zip(linear, experts)
    )


def _refusal_of_parts(
    pattern: str, parts: list[str], values: Mapping[str, Any], fields: Mapping[str, Any]
) -> str | None:
    """Return why the MTP heads of a hybrid model cannot be taken; None if they can."""
    if fields.get("pipeline_model_parallel_size", 1) > 1 or STAGE_BOUNDARY in pattern:
        return "they embed tokens, and the last pipeline stage has no embedding"
    if "W" in pattern or values["no_rope_freq"]:
        return "attention differs from layer to layer"
    if not set("".join(parts)) <= set(_SYMBOLS):
        return f"they have layers that HybridModel does not serve, /{parts[0]}"
    return None


def _known_symbols(pattern: str) -> str:
    """Return a hybrid model's pattern, if all of its layers can be served."""
    for place, symbol in enumerate(pattern, 1):
        if symbol not in _SYMBOLS + STAGE_BOUNDARY:
            meaning = "DeepSeek sparse attention" if symbol == "D" else "a layer"
            raise ValueError(
                f"the layer pattern {pattern!r} has the symbol {symbol!r} at place {place}, "
                f"{meaning} that HybridModel does not serve. It serves "
                f"{', '.join(f'{s} {LAYER_KINDS[s].meaning}' for s in _SYMBOLS)}."
            )
    return pattern


def _place_attention(
    pattern: str, values: Mapping[str, Any], layers_per_number: int
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the pattern with W for windowed attention, and the overrides of single layers.

    Args:
        layers_per_number: layers of ours for each one that core numbers.
    """
    window, freq = values["window_size"], values["window_attn_skip_freq"]
    num_numbers = len(pattern.replace(STAGE_BOUNDARY, "")) // layers_per_number
    is_windowed = [bool(window)] * num_numbers
    if window and freq is not None:
        is_windowed = _per_layer(
            "window_attn_skip_freq", freq, num_numbers, lambda i: (i + 1) % freq
        )
    no_rope, freq = [0] * num_numbers, values["no_rope_freq"]
    if freq:
        no_rope = _per_layer("no_rope_freq", freq, num_numbers, lambda i: (i + 1) % freq == 0)
    placed, overrides, number = [], {}, 0
    for symbol in pattern:
        if symbol == STAGE_BOUNDARY:
            placed.append(symbol)
            continue
        number += 1
        index = (number - 1) // layers_per_number
        if symbol == "*" and is_windowed[index] and window[0] >= 0:
            symbol = "W"
        if symbol in "*W" and no_rope[index]:
            overrides[str(number)] = {"position_embedding_type": "none"}
        placed.append(symbol)
    return "".join(placed), overrides


def _per_layer(name: str, value: Any, num_layers: int, rule: Any) -> Sequence[Any]:
    """Return a value for each layer: the given ones, or those of a rule for the index from 0."""
    if isinstance(value, int):
        return [rule(i) for i in range(num_layers)]
    if not isinstance(value, Sequence) or len(value) != num_layers:
        raise ValueError(
            f"{name} is {value!r}; it must be a whole number or a list of {num_layers} entries, "
            "one for each layer."
        )
    return value


_READ_WITH = {
    "moe_router_num_groups": "moe_router_group_topk",
    "moe_router_group_topk": "moe_router_group_topk",
    "moe_router_topk_scaling_factor": "moe_router_topk_scaling_factor",
    "moe_shared_expert_gate": "moe_shared_expert_intermediate_size",
}
"""Field of core's experts -> the field without which, or at 0 of which, core does not read it."""


def _carried(values: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """Return the fields with one meaning in both configs, of the layer kinds in the pattern."""
    symbols = set(pattern) - {STAGE_BOUNDARY}
    groups = {group for symbol in symbols for group in LAYER_KINDS[symbol].fields}
    groups |= {CommonFields, MLPFields}
    groups |= {group for group in HybridConfig.__bases__ if issubclass(group, ModelFields)}
    names = {field.name for group in groups for field in dataclasses.fields(group)}
    if "+" in symbols:
        names.add("num_attention_heads")
    names &= {field.name for field in dataclasses.fields(MLATransformerConfig)} & values.keys()
    names -= {name for name, needed in _READ_WITH.items() if not values.get(needed)}
    carried = {name: values[name] for name in sorted(names - {"init_method_std", "params_dtype"})}
    if "E" in symbols and isinstance(values["moe_router_load_balancing_type"], str):
        # Some choose the experts; several at a time are losses.
        carried["moe_router_load_balancing_type"] = values["moe_router_load_balancing_type"]
    return carried


def _refused(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that HybridConfig refuses, so that it says what to do.

    Raises:
        ValueError: such a field is set that the installed megatron-core does not have.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    refused = {}
    for name in sorted(RESULT_FIELDS & values.keys()):
        if name in defaults and values[name] != defaults[name]:
            refused[name] = values[name]
        elif name not in defaults and values[name]:
            raise ValueError(f"{name} is {values[name]!r}, which HybridModel does not support.")
    return refused


def _params_dtype(values: Mapping[str, Any]) -> torch.dtype:
    if values["bf16"] or values["fp16"]:
        return torch.bfloat16 if values["bf16"] else torch.float16
    return values["params_dtype"]


def _activation(values: Mapping[str, Any]) -> Any:
    function = values["activation_func"]
    function = _CORE_ACTIVATIONS.get(function, function)
    if function is F.gelu and values["bias_activation_fusion"]:
        return gelu_tanh  # what core's fused kernels compute
    if function not in ACTIVATIONS.values():
        raise ValueError(
            f"activation_func is {getattr(function, '__name__', function)}, which HybridModel does "
            f"not support. It serves {', '.join(ACTIVATIONS)}."
        )
    return function


def _multipliers(values: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """Return what Maximal Update Parameterization multiplies, as core completes its own."""
    embedding, logits = values.get("mup_embedding_mult", 1.0), values.get("mup_output_mult", 1.0)
    if logits == 1.0:
        logits = (values.get("mup_base_hidden_size") or values["hidden_size"]) / values[
            "hidden_size"
        ]
    result = {"embedding_multiplier": embedding, "logits_multiplier": logits}
    if values["softmax_scale"] is None and set("*W") & set(pattern):
        width = values["kv_channels"] or values["hidden_size"] // values["num_attention_heads"]
        base = math.sqrt(values.get("mup_base_head_dim") or 1.0)
        result["softmax_scale"] = base / width ** values.get("mup_attn_scale_power", 1.0)
    return result


_ONLY_OF_LATENT_ATTENTION = {
    "softmax_type": "vanilla",
    "window_size": None,
    "attention_output_gate": False,
    "qk_l2_norm": False,
}
"""Field of core's attention -> the one value that HybridModel's latent attention can have."""


def _latent_attention(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of latent attention, which in core has a rotary embedding of its own."""
    if values.get("mla_down_proj_fusion"):
        raise ValueError(
            "mla_down_proj_fusion is True, which joins two weights that HybridModel keeps apart. "
            "Build the model with mla_down_proj_fusion=False."
        )
    for name, only in _ONLY_OF_LATENT_ATTENTION.items():
        if (value := values.get(name, only)) != only:
            raise ValueError(
                f"{name} is {value!r}, but multi-head latent attention in HybridModel has no other "
                f"than {only!r}."
            )
    mscale = yarn_scale(values["rotary_scaling_factor"], values["mscale_all_dim"])
    head_dim = values["qk_head_dim"] + values["qk_pos_emb_head_dim"]
    fields = {
        "latent_norm": values["qk_layernorm"],
        "position_embedding_type": "rope",
        "rotary_base": values["rotary_base"],
        "rotary_interleaved": True,
        "softmax_scale": mscale**2 / math.sqrt(head_dim),
    }
    if values["rope_type"] == "yarn":
        fields["rotary_scaling"] = _yarn(values)
    elif values["rotary_percent"] != 1.0:
        raise ValueError(
            f"rotary_percent is {values['rotary_percent']}, but multi-head latent attention in "
            "HybridModel rotates all qk_pos_emb_head_dim dimensions. Use 1."
        )
    return fields


def _yarn(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert core's YarnRotaryEmbedding to `HybridConfig.rotary_scaling`."""
    factor = values["rotary_scaling_factor"]
    mscale, all_dims = values["mscale"], values["mscale_all_dim"]
    if mscale is None or all_dims is None:
        amplitude = yarn_scale(factor, 1.0)
    else:
        amplitude = yarn_scale(factor, mscale) / yarn_scale(factor, all_dims)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": values["original_max_position_embeddings"],
        "beta_fast": values["beta_fast"],
        "beta_slow": values["beta_slow"],
        "truncate": values.get("correction_range_round_to_int", True),
        "attention_factor": amplitude,
    }
