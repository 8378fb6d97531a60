"""The layer pattern language: one symbol per layer, `|` between pipeline stages, `/` before each
part for multi-token prediction.

The symbols are megatron-core's where it has one. A new layer kind is a mixer and one line here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_hybrid.models.config.attention import AttentionFields, ChunkFields, WindowFields
from megatron_hybrid.models.config.delta_rule import (
    DeltaRuleFields,
    GatedDeltaNetFields,
    KimiDeltaAttentionFields,
)
from megatron_hybrid.models.config.field_group import FieldGroup
from megatron_hybrid.models.config.latent_attention import LatentAttentionFields
from megatron_hybrid.models.config.mamba1 import Mamba1Fields
from megatron_hybrid.models.config.mamba2 import Mamba2Fields
from megatron_hybrid.models.config.mlp import MLPFields
from megatron_hybrid.models.config.moe import DenseAndExpertsFields, MoEFields
from megatron_hybrid.models.config.parallel_heads import ParallelHeadsFields
from megatron_hybrid.models.config.per_layer_input import PerLayerInputFields
from megatron_hybrid.models.config.position import PositionFields
from megatron_hybrid.models.config.shared_block import SharedBlockFields
from megatron_hybrid.models.config.short_conv import ShortConvFields

STAGE_BOUNDARY = "|"
PREDICTION_BOUNDARY = "/"
"""Before each part for multi-token prediction."""


@dataclass(frozen=True)
class LayerKind:
    """The layer kind of a symbol."""

    meaning: str
    mixer: str
    """Module of `models/mixers` and class in it."""
    norm_name: str
    mixer_name: str
    """Names of norm and mixer in a checkpoint, megatron-core's where it has the kind."""
    fields: tuple[type[FieldGroup], ...]
    """Groups of config fields that the mixer reads, in the order of their checks."""
    params: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the mixer."""


_ATTENTION = ("attention.AttentionMixer", "input_layernorm", "self_attention")

KINDS: dict[str, LayerKind] = {
    "M": LayerKind("Mamba-2", "mamba2.Mamba2Mixer", "norm", "mixer", (Mamba2Fields,)),
    "S": LayerKind("Mamba-1", "mamba1.Mamba1Mixer", "norm", "mixer", (Mamba1Fields,)),
    "C": LayerKind(
        "gated short convolution",
        "gated_short_conv.GatedShortConvMixer",
        "norm",
        "mixer",
        (ShortConvFields,),
    ),
    "G": LayerKind(
        "Gated DeltaNet",
        "gated_delta_net.GatedDeltaNetMixer",
        "input_layernorm",
        "self_attention",
        (DeltaRuleFields, GatedDeltaNetFields),
    ),
    "K": LayerKind(
        "Kimi Delta Attention",
        "kimi_delta_attention.KimiDeltaAttentionMixer",
        "input_layernorm",
        "self_attention",
        (DeltaRuleFields, KimiDeltaAttentionFields),
    ),
    "*": LayerKind("full attention", *_ATTENTION, (PositionFields, AttentionFields)),
    "W": LayerKind(
        "sliding-window attention",
        *_ATTENTION,
        (PositionFields, AttentionFields, WindowFields),
        {"locality": "window"},
    ),
    "L": LayerKind(
        "chunked attention",
        *_ATTENTION,
        (PositionFields, AttentionFields, ChunkFields),
        {"locality": "chunk"},
    ),
    "+": LayerKind(
        "multi-head latent attention",
        "latent_attention.LatentAttentionMixer",
        "input_layernorm",
        "self_attention",
        (PositionFields, LatentAttentionFields),
    ),
    "B": LayerKind(
        "MLP and experts side by side",
        "dense_and_experts.DenseAndExpertsMixer",
        "pre_mlp_layernorm",
        "mlp",
        (MLPFields, MoEFields, DenseAndExpertsFields),
    ),
    "P": LayerKind(
        "per-layer input",
        "per_layer_input.PerLayerInputMixer",
        "norm",
        "mixer",
        (PerLayerInputFields,),
    ),
    "-": LayerKind("MLP", "mlp.MLPMixer", "pre_mlp_layernorm", "mlp", (MLPFields,)),
    "H": LayerKind(
        "parallel attention and Mamba-2",
        "parallel_heads.ParallelHeadsMixer",
        "input_layernorm",
        "mixer",
        (PositionFields, AttentionFields, Mamba2Fields, ParallelHeadsFields),
    ),
    "Z": LayerKind(
        "shared block and Mamba-2",
        "shared_block.SharedBlockMixer",
        "input_layernorm",
        "mixer",
        (PositionFields, AttentionFields, MLPFields, Mamba2Fields, SharedBlockFields),
    ),
    "E": LayerKind("mixture of experts", "moe.MoEMixer", "pre_mlp_layernorm", "mlp", (MoEFields,)),
}
"""Every layer symbol."""


def split_predictions(pattern: str) -> tuple[str, list[str]]:
    """Megatron's pattern as the model's own layers and its parts for multi-token prediction.

    `"M-|M*-/MM/MM"` gives `("M-|M*-", ["MM", "MM"])`. No symbol is checked.
    """
    main, *predictions = pattern.split(PREDICTION_BOUNDARY)
    return main, predictions


def _check_symbol(pattern: str, place: int, known: str) -> None:
    """Raises ValueError unless the symbol at `place` is a layer kind or a stage boundary."""
    symbol = pattern[place]
    if symbol in KINDS or symbol == STAGE_BOUNDARY:
        return
    found = f"{symbol!r} at place {place + 1} of {len(pattern)}"
    if symbol == "D":
        raise ValueError(
            f"layer_pattern {pattern!r} has {found}. In Megatron that is DeepSeek sparse "
            "attention, which is not implemented here. In a config.json that megatron_hybrid wrote "
            f"before 0.2 it is {KINDS['B'].meaning}, which is 'B' now: rename it in layer_pattern "
            "and in the keys of layer_overrides."
        )
    raise ValueError(
        f"layer_pattern {pattern!r} has the unknown symbol {found}. "
        f"Known: {known}, '{STAGE_BOUNDARY}' pipeline stage boundary."
    )


def parse(pattern: str) -> list[str]:
    """The symbols of a pattern in order, stage boundaries included, those of multi-token prediction
    not.

    Raises:
        ValueError: the pattern is empty, has an unknown symbol, a stage without a layer, or parts
            for multi-token prediction that are not as Megatron wants them.
    """
    known = ", ".join(f"'{symbol}' {kind.meaning}" for symbol, kind in KINDS.items())
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(
            f"layer_pattern is {pattern!r}, but a model needs one layer or more. "
            f"Write one symbol per layer: {known}."
        )
    main, predictions = split_predictions(pattern)
    for place in range(len(pattern)):
        if pattern[place] != PREDICTION_BOUNDARY:
            _check_symbol(pattern, place, known)
    _check_predictions(pattern, predictions)
    if any(not stage for stage in main.split(STAGE_BOUNDARY)):
        raise ValueError(
            f"layer_pattern {pattern!r} has a pipeline stage without a layer. Put at least one "
            f"symbol on each side of every '{STAGE_BOUNDARY}'."
        )
    return list(main)


def _check_predictions(pattern: str, predictions: list[str]) -> None:
    """Raises ValueError unless the parts for multi-token prediction are equal, and of layers that
    read nothing of other layers."""
    if not predictions:
        return
    allowed = set(KINDS) - set("ZP")
    if not predictions[0] or set(predictions) != {predictions[0]} or set(predictions[0]) - allowed:
        raise ValueError(
            f"layer_pattern {pattern!r} has the parts {predictions} behind "
            f"'{PREDICTION_BOUNDARY}', for multi-token prediction. They must all be the same one "
            f"layer or more, without '{STAGE_BOUNDARY}', 'Z' and 'P'."
        )


def prediction_symbols(pattern: str) -> list[list[str]]:
    """The layers of each part for multi-token prediction."""
    parse(pattern)
    return [list(part) for part in split_predictions(pattern)[1]]


def layer_symbols(pattern: str) -> list[str]:
    """The layers of the whole model, without stage boundaries."""
    return [symbol for symbol in parse(pattern) if symbol != STAGE_BOUNDARY]


def split_stages(pattern: str, num_stages: int) -> list[list[str]]:
    """The layers of each pipeline stage.

    A pattern with boundaries defines the stages; one without is cut into equal parts.

    Raises:
        ValueError: the pattern does not give `num_stages` stages.
    """
    symbols = parse(pattern)
    stages = [list(stage) for stage in "".join(symbols).split(STAGE_BOUNDARY)]
    if len(stages) == num_stages:
        return stages
    if num_stages == 1:
        # A model for several stages also runs on one, without boundaries.
        return [[symbol for stage in stages for symbol in stage]]
    if len(symbols) < num_stages:
        raise ValueError(
            f"layer_pattern {pattern!r} has {len(symbols)} layers, but "
            f"pipeline_model_parallel_size is {num_stages}, and each stage needs a layer. Use at "
            f"most {len(symbols)} stages."
        )
    if len(stages) > 1:
        raise ValueError(
            f"layer_pattern {pattern!r} has {len(stages)} pipeline stages, but "
            f"pipeline_model_parallel_size is {num_stages}. Use {num_stages - 1} '|' or none."
        )
    if len(symbols) % num_stages:
        raise ValueError(
            f"layer_pattern {pattern!r} has {len(symbols)} layers, which do not divide evenly over "
            f"{num_stages} pipeline stages. Mark the stages with '{STAGE_BOUNDARY}'."
        )
    size = len(symbols) // num_stages
    return [symbols[i * size : (i + 1) * size] for i in range(num_stages)]
