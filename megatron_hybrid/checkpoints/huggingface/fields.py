"""What the config.json files of many architectures have in common."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from megatron_hybrid.ops.activations import ACTIVATIONS
from megatron_hybrid.utils.validation import LARGEST_FLOAT, Range, check_field, is_number

_ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}


_GENERAL_KEYS: dict[str, Any] = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads"), int
    ),
    **dict.fromkeys(("head_dim", "num_experts", "num_local_experts", "num_experts_per_tok"), int),
    "num_hidden_layers": Annotated[int, Range(ge=0, le=10_000)],  # more take minutes to name
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), int | list),
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), float),
    "rope_theta": float | list,
    **dict.fromkeys(("rope_parameters", "rope_scaling", "linear_attn_config"), Mapping),
    "quantization_config": Mapping,
    **dict.fromkeys(("layer_types", "layers_block_type"), list),
    **dict.fromkeys(("block_configs", "mtp_block_configs"), list),
}
"""Keys of many architectures that adapters reckon with, and the annotations of their values."""


def check_general_keys(hf: Mapping[str, Any]) -> None:
    """Raise ValueError where one of them has a value of another type."""
    for key, kind in _GENERAL_KEYS.items():
        if hf.get(key) is not None:
            check_field(f"config.json: {key}", hf[key], kind)


def renamed(hf: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return a config.json with other keys, too. keys: those that it may have -> those to add."""
    return {**hf, **{new: hf[old] for old, new in keys.items() if old in hf}}


def required(hf: Mapping[str, Any], key: str) -> Any:
    """Return hf[key]; raise ValueError where it is missing."""
    if hf.get(key) is None:
        raise ValueError(f"config.json lacks {key!r}")
    return hf[key]


def of_each_layer(hf: Mapping[str, Any], key: str, default: Any = None) -> list[Any]:
    """Return a value for each of their layers: those of a list, which may go on with MTP layers, or
    one for all. `default` is for a key that is left out."""
    number, given = required(hf, "num_hidden_layers"), _first(hf.get(key), default)
    values = given if isinstance(given, list) else [given] * number
    if len(values) < number:
        raise ValueError(f"config.json has {key} for {len(values)} of {number} layers")
    return values[:number]


def only(hf: Mapping[str, Any], **accepted: Any) -> None:
    """Refuse values that would silently be another model here.

    Args:
        accepted: key = the one value that is right, also where the key is missing; or a tuple of
            several.
    """
    for key, values in accepted.items():
        values = values if isinstance(values, tuple) else (values,)
        if key in hf and hf[key] not in values:
            known = " or ".join(map(repr, values))
            raise ValueError(f"config.json has {key}={hf[key]!r}; only {known} is supported")


def activation(hf: Mapping[str, Any], key: str = "hidden_act", default: str = "silu") -> Any:
    """Return the activation function that a config names."""
    name = hf.get(key, default)
    if name not in _ACTIVATION_NAMES:
        raise ValueError(
            f"config.json has {key}={name!r}; supported are {', '.join(_ACTIVATION_NAMES)}"
        )
    return ACTIVATIONS[_ACTIVATION_NAMES[name]]


def model(hf: Mapping[str, Any], eps_key: str = "rms_norm_eps") -> dict[str, Any]:
    """Read the sizes of the whole model."""
    only(hf, per_layer_config=(None, {}))
    return {
        "vocab_size": required(hf, "vocab_size"),
        "hidden_size": required(hf, "hidden_size"),
        "layernorm_epsilon": hf.get(eps_key, 1e-6),
        "share_embeddings_and_output_weights": bool(hf.get("tie_word_embeddings", False)),
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read the heads of grouped-query attention."""
    heads = required(hf, "num_attention_heads")
    return {
        "num_attention_heads": heads,
        "num_query_groups": hf.get("num_key_value_heads") or heads,
        "kv_channels": hf.get("head_dim") or required(hf, "hidden_size") // heads,
    }


def rotary(
    hf: Mapping[str, Any], default_base: float = 10000.0, *, partial: bool = False
) -> dict[str, Any]:
    """Read RoPE, as transformers 5 writes it (`rope_parameters`) or as earlier files do
    (`rope_theta`, `rope_scaling`, `partial_rotary_factor`). In a file with both, to which somebody
    added a scaling, `rope_scaling` takes the place of `rope_parameters`, as in transformers.

    Args:
        partial: whether unscaled RoPE goes by `partial_rotary_factor`; scaled RoPE always does.

    Raises:
        ValueError: a factor that transformers would pass over.
    """
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if "type" in rope:  # the oldest spelling
        rope.setdefault("rope_type", rope.pop("type"))
    base = _first(rope.pop("rope_theta", None), hf.get("rope_theta"), default_base)
    found = rope.pop("partial_rotary_factor", None)
    percent = _first(found, hf.get("partial_rotary_factor"), 1.0)
    if rope.get("rope_type") == "proportional":  # it goes by all dimensions of the head
        rope["partial_rotary_factor"], percent = percent, 1.0
    fields = {"rotary_base": float(base), "rotary_percent": float(percent)}
    if rope.get("rope_type", "default") == "default":
        if percent != 1 and not partial:
            raise ValueError(
                f"config.json has partial_rotary_factor={percent}, but this architecture rotates "
                "whole heads, and transformers passes over it: leave it out"
            )
    else:
        if rope["rope_type"] in ("yarn", "llama3"):
            key = "original_max_position_embeddings"  # next to the others it wins in transformers
            length = _first(hf.get(key), rope.get(key), hf.get("max_position_embeddings"))
            rope[key] = length
        fields["rotary_scaling"] = rope
    return fields


def rotary_of_type(
    hf: Mapping[str, Any], kind: str, base: tuple[str, float], **left_out: Any
) -> dict[str, Any]:
    """Read a layer type's RoPE, by its `rope_parameters`. In files of before transformers 5 base[0]
    is the key of its base, base[1] where left out; `rope_scaling` is of full attention alone."""
    rope = {"rope_theta": _first(hf.get(base[0]), base[1]), **left_out}
    rope |= (hf.get("rope_parameters") or {}).get(kind) or {}
    if kind == "full_attention":
        rope |= hf.get("rope_scaling") or {}
    return rotary({**hf, **WITHOUT_ROPE, "rope_parameters": rope}, partial=bool(left_out))


def rotary_by_symbol(
    hf: Mapping[str, Any], mixers: str, bases: Mapping[str, tuple[str, float]], **left_out: Any
) -> dict[str, dict[str, Any]]:
    """Read `rotary_of_type` for each of `WINDOW_SYMBOLS` that is among `mixers`. bases: by type."""
    return {
        symbol: rotary_of_type(hf, kind, bases[kind], **left_out)
        for kind, symbol in WINDOW_SYMBOLS.items()
        if symbol in mixers
    }


def biases(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read `attention_bias` and `mlp_bias`, for `transformer`."""
    return {key: hf.get(key) for key in ("attention_bias", "mlp_bias")}


def _first(*values: Any) -> Any:
    """Return the first value that is given; None if none is."""
    return next((value for value in values if value is not None), None)


WITHOUT_ROPE = dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters", "per_layer_config"))
"""Keys of what differs among layers, where `layer_overrides` says it."""


def transformer(
    hf: Mapping[str, Any],
    mixers: str | None = None,
    mlps: str | None = None,
    *,
    base: float = 10000.0,
    partial: bool = False,
    attention_bias: Any = False,
    mlp_bias: Any = False,
) -> dict[str, Any]:
    """Read a Transformer: attention, then an MLP or experts, in each of their layers.

    Args:
        mixers, mlps: a symbol for each of their layers; None means full attention, and an MLP.
        base, partial: see `rotary`.
        attention_bias, mlp_bias: whether all projections of an attention layer, or of an MLP, have
            biases.
    """
    num_layers = required(hf, "num_hidden_layers")
    pairs = zip(mixers or "*" * num_layers, mlps or "-" * num_layers, strict=True)
    pattern = "".join(map("".join, pairs))
    biased = ("*W" if attention_bias else "") + ("-" if mlp_bias else "")
    found = {
        **model(hf),
        **attention(hf),
        **rotary(hf, base, partial=partial),
        "layer_pattern": pattern,
        "layer_overrides": {s: {"add_bias_linear": True} for s in biased if s in pattern},
        "activation_func": activation(hf),
    }
    if "-" in pattern:
        found["ffn_hidden_size"] = required(hf, "intermediate_size")
    if "W" in pattern:
        found["sliding_window"] = required(hf, "sliding_window")
    return found


def windows_everywhere(hf: Mapping[str, Any]) -> str:
    """Return W for each of their layers if there is a `sliding_window`, else *."""
    symbol = "*" if hf.get("sliding_window") is None else "W"
    return symbol * required(hf, "num_hidden_layers")


def sparse_mlps(hf: Mapping[str, Any]) -> str:
    """Return E or - for each of their layers, by `decoder_sparse_step` and `mlp_only_layers`."""
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    numbers = range(required(hf, "num_hidden_layers"))
    return "".join("E" if i not in dense and (i + 1) % step == 0 else "-" for i in numbers)


def dense_mlps_first(hf: Mapping[str, Any], dense: int) -> str:
    """Return - or E for each layer of theirs, by `mlp_layer_types` or `first_k_dense_replace`.

    Args:
        dense: the latter where it is left out.
    """
    num_layers, types = required(hf, "num_hidden_layers"), hf.get("mlp_layer_types")
    if types is None:
        dense = hf.get("first_k_dense_replace", dense)
        types = ["dense" if i < dense else "sparse" for i in range(num_layers)]
    return symbols_of(types, {"dense": "-", "sparse": "E"}, num_layers)


def enumerated_mlps(hf: Mapping[str, Any]) -> str:
    """Return - or E for each of their layers, by `mlp_layer_types` or `moe_layers_enum`."""
    number, given = required(hf, "num_hidden_layers"), hf.get("moe_layers_enum")
    if (types := hf.get("mlp_layer_types")) is not None:
        return dense_mlps_first({**hf, "mlp_layer_types": types[:number]}, 0)
    named = map(int, re.findall(r"\d+", str(given)))  # "3,4,5" or [3, 4, 5]
    sparse = range(3, number) if given is None else [*named]
    return "".join("E" if i in sparse else "-" for i in range(number))


def windows(hf: Mapping[str, Any], other: str, period: int) -> str:
    """Return * or W for each of their layers: see `layer_types`."""
    types = layer_types(hf, other, period)
    return symbols_of(types, WINDOW_SYMBOLS, hf["num_hidden_layers"])


OF_MAMBA = {
    "mamba_num_heads": "mamba_n_heads",
    "n_mamba_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "expand": "mamba_expand",
    "state_size": "mamba_d_state",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "time_step_rank": "mamba_dt_rank",
    "n_groups": "mamba_n_groups",
    "mamba_ngroups": "mamba_n_groups",
    "chunk_size": "mamba_chunk_size",
}
"""Keys of models of Mamba layers alone, Nemotron-H and Zamba2 -> those of other hybrids."""


def mamba1(hf: Mapping[str, Any], width: int | None = None) -> dict[str, Any]:
    """Read Mamba-1 layers, as Jamba writes them. width: inner, by default from `mamba_expand`."""
    hidden, rank = required(hf, "hidden_size"), hf.get("mamba_dt_rank", "auto")
    return {
        "mamba1_inner_size": width or int(hf.get("mamba_expand", 2) * hidden),
        "mamba1_state_dim": hf.get("mamba_d_state", 16),
        "mamba1_dt_rank": math.ceil(hidden / 16) if rank == "auto" else rank,
        "mamba1_conv_kernel": hf.get("mamba_d_conv", 4),
        "mamba1_conv_bias": hf.get("mamba_conv_bias", True),
        "mamba1_proj_bias": hf.get("mamba_proj_bias", False),
    }


def mamba2(hf: Mapping[str, Any], eps: float) -> dict[str, Any]:
    """Read Mamba-2 layers, as Bamba and its kin write them (`mamba_n_heads`, `mamba_d_state`, ...).

    Args:
        eps: epsilon of the norm in the mixer.
    """
    heads = required(hf, "mamba_n_heads")
    width = hf.get("mamba_d_ssm") or hf.get("mamba_expand", 2) * required(hf, "hidden_size")
    head_dim = hf.get("mamba_d_head", "auto")
    head_dim = width // heads if head_dim == "auto" else head_dim
    if heads * head_dim != width:
        raise ValueError(
            f"config.json has {heads} heads of {head_dim} in Mamba-2 layers, which do not make up "
            f"their inner width {width}"
        )
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "mamba_num_groups": hf.get("mamba_n_groups", 1),
        "mamba_state_dim": hf.get("mamba_d_state", 256),
        "mamba_conv_kernel": hf.get("mamba_d_conv", 4),
        "mamba_chunk_size": hf.get("mamba_chunk_size", 256),
        "mamba_conv_bias": hf.get("mamba_conv_bias", True),
        "mamba_proj_bias": hf.get("mamba_proj_bias", False),
        "mamba_norm_epsilon": eps,
        **time_steps(hf),
    }


def time_steps(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read `time_step_limit`, the lower and the upper limit of dt; null means that there are none.

    `time_step_min`, `time_step_max` and `time_step_floor` are of the initial weights: nothing is
    clamped by them, though transformers does so in some models.

    Raises:
        ValueError: the limits are not two numbers.
    """
    given = hf.get("time_step_limit")
    limits = (0.0, math.inf) if given is None else given
    # JSON has no infinity: transformers writes this, and earlier releases wrote a bare Infinity.
    no_limit = {"__float__": "Infinity"}
    if isinstance(limits, list | tuple):
        limits = [math.inf if limit == no_limit else limit for limit in limits]
    if not (isinstance(limits, list | tuple) and len(limits) == 2 and all(map(is_number, limits))):
        raise ValueError(
            f"config.json has time_step_limit={given!r}, which must be two numbers, the lower and "
            "the upper limit of the time steps, or null"
        )
    low, high = limits
    return {"mamba_dt_min": low, "mamba_dt_max": None if high > LARGEST_FLOAT else high}


MAMBA2_SYMBOLS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""The layer types of a Mamba-2 hybrid, and their older names."""

WINDOW_SYMBOLS = {"sliding_attention": "W", "full_attention": "*"}
"""The layer types of a model whose layers all attend, some of them within a window."""


def layer_types(hf: Mapping[str, Any], other: str, period: int) -> list[str]:
    """Return `layer_types`; where that is left out, full attention in each `period`-th layer, and
    `other` in the rest."""
    numbers = range(1, required(hf, "num_hidden_layers") + 1)
    return hf.get("layer_types") or [other if i % period else "full_attention" for i in numbers]


def symbols_of(
    layer_types: Sequence[str | None], symbols: Mapping[str, str], num_layers: int
) -> str:
    """Return the layer symbols of transformers' layer types.

    Raises:
        ValueError: one is not in the table, or they are more or less than the layers.
    """
    unknown = [kind for kind in layer_types if kind not in symbols]
    if unknown:
        raise ValueError(
            f"config.json has the layer type {unknown[0]!r}; supported are {', '.join(symbols)}"
        )
    if len(layer_types) != num_layers:
        raise ValueError(
            f"config.json names the types of {len(layer_types)} layers, but has "
            f"num_hidden_layers={num_layers}"
        )
    return "".join(symbols[kind] for kind in layer_types)


def linear_heads(heads: int, head_dim: int) -> dict[str, Any]:
    """Read the heads of linear attention, whose keys and values are as wide."""
    return {
        "linear_num_key_heads": heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
    }


def latent_attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read heads and ranks of multi-head latent attention, as DeepSeek-V3 writes them; ValueError
    for key/value heads apart from the query heads, which it does not have."""
    only(hf, attention_bias=False)
    heads = required(hf, "num_attention_heads")
    only(hf, num_key_value_heads=(heads, None))
    return {
        "num_attention_heads": heads,
        "q_lora_rank": hf.get("q_lora_rank"),
        "kv_lora_rank": hf.get("kv_lora_rank", 512),
        "qk_head_dim": hf.get("qk_nope_head_dim", 128),
        "qk_pos_emb_head_dim": hf.get("qk_rope_head_dim", 64),
        "v_head_dim": hf.get("v_head_dim", 128),
        "latent_norm_epsilon": 1e-6,  # in the code of these models, not in their config
    }


def experts(
    hf: Mapping[str, Any], number: int | None, topk: int, width_key: str = "intermediate_size"
) -> dict[str, Any]:
    """Read experts, as Mixtral writes them. number, topk: of all (it must be said if None), and of
    a token, where these are not said. width_key: of their inner width."""
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    number = _first(*map(hf.get, keys), number)
    return {
        "num_moe_experts": required({"num_experts": number}, "num_experts"),
        "moe_router_topk": hf.get("num_experts_per_tok", topk),
        "moe_ffn_hidden_size": required(hf, width_key),
    }


def check_sigmoid_topk(topk: int) -> None:
    """Raise ValueError for one expert per token where sigmoid scores are divided by their sum: core
    leaves the score of a single one as it is."""
    if topk == 1:
        raise ValueError(
            "config.json has one expert per token, whose normalized score is always 1; "
            "only 2 or more are supported"
        )


AS_DEEPSEEK = {
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "num_shared_experts": "n_shared_experts",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
}
"""Keys of Kimi Linear and Ling -> those of DeepSeek-V3."""


def grouped_experts(hf: Mapping[str, Any], **left_out: Any) -> dict[str, Any]:
    """Read experts as in DeepSeek-V3, in its keys: sigmoid scores, a bias that selects, the best
    groups first, a shared expert.

    Args:
        left_out: what keys that are left out, or null, mean.

    Raises:
        ValueError: groups that would be ranked otherwise here than by their two best experts.
    """
    plain = {"n_shared_experts": 0, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    hf = {**plain, **left_out, **{key: value for key, value in hf.items() if value is not None}}
    topk, width = hf["num_experts_per_tok"], hf["moe_intermediate_size"]
    check_sigmoid_topk(topk)
    groups, chosen_groups = hf["n_group"], hf["topk_group"]
    are_chosen = chosen_groups < groups
    if are_chosen and topk != 2 * chosen_groups:
        raise ValueError(
            f"config.json has {topk} experts per token in {chosen_groups} groups; where groups "
            "are chosen, only 2 experts per chosen group are supported"
        )
    return {
        "num_moe_experts": hf["n_routed_experts"],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": hf["n_shared_experts"] * width or None,
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_num_groups": groups if are_chosen else None,
        "moe_router_group_topk": chosen_groups if are_chosen else None,
    }
