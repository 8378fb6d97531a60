"""The layer pattern language: one symbol per layer, `|` between pipeline stages, `/` before each
MTP head.

The symbols are megatron-core's where it has one. A new layer kind is a mixer and one line here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
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
"""Mark in the pattern before each MTP head."""


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
    """Split Megatron's pattern into the model's own layers and its parts for multi-token
    prediction.

    `"M-|M*-/MM/MM"` gives `("M-|M*-", ["MM", "MM"])`. No symbol is checked.
    """
    main, *predictions = pattern.split(PREDICTION_BOUNDARY)
    return main, predictions


@dataclass(frozen=True)
class LayerPattern:
    """A layer pattern, checked and parsed."""

    text: str
    marked_stages: tuple[str, ...]
    """The layers of each pipeline stage that the pattern marks."""
    predictions: tuple[str, ...]
    """The layers of each MTP head."""

    @classmethod
    def parse(cls, text: str) -> LayerPattern:
        """Parse a pattern; each text is parsed once.

        Raises:
            ValueError: the pattern is empty, has an unknown symbol, a stage without a layer, or
                MTP heads that are not as Megatron wants them.
        """
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"layer_pattern is {text!r}, but a model needs one layer or more. "
                f"Write one symbol per layer: {_known()}."
            )
        return _parse(text)

    @property
    def symbols(self) -> str:
        """The layers of the whole model, without stage boundaries."""
        return "".join(self.marked_stages)

    def stages(self, num_stages: int) -> tuple[str, ...]:
        """The layers of each pipeline stage.

        A pattern with boundaries defines the stages; one without is cut into equal parts.

        Raises:
            ValueError: the pattern does not give `num_stages` stages.
        """
        marked, symbols = self.marked_stages, self.symbols
        if len(marked) == num_stages:
            return marked
        if num_stages == 1:
            return (symbols,)  # a model for several stages also runs on one, without boundaries
        if len(symbols) < num_stages:
            raise ValueError(
                f"layer_pattern {self.text!r} has {len(symbols)} layers, but "
                f"pipeline_model_parallel_size is {num_stages}, and each stage needs a layer. Use "
                f"at most {len(symbols)} stages."
            )
        if len(marked) > 1:
            raise ValueError(
                f"layer_pattern {self.text!r} has {len(marked)} pipeline stages, but "
                f"pipeline_model_parallel_size is {num_stages}. Use {num_stages - 1} '|' or none."
            )
        if len(symbols) % num_stages:
            raise ValueError(
                f"layer_pattern {self.text!r} has {len(symbols)} layers, which do not divide "
                f"evenly over {num_stages} pipeline stages. Mark the stages with "
                f"'{STAGE_BOUNDARY}'."
            )
        size = len(symbols) // num_stages
        return tuple(symbols[i : i + size] for i in range(0, len(symbols), size))


@cache
def _parse(text: str) -> LayerPattern:
    main, predictions = split_predictions(text)
    for place, symbol in enumerate(text, start=1):
        if symbol not in KINDS and symbol not in (STAGE_BOUNDARY, PREDICTION_BOUNDARY):
            raise ValueError(_unknown_symbol(text, place))
    if predictions:
        part, allowed = predictions[0], set(KINDS) - set("ZP")
        if not part or set(predictions) != {part} or set(part) - allowed:
            raise ValueError(
                f"layer_pattern {text!r} has the parts {predictions} after "
                f"'{PREDICTION_BOUNDARY}', for multi-token prediction. They must all be the same "
                f"one layer or more, without '{STAGE_BOUNDARY}', 'Z' and 'P'."
            )
    stages = main.split(STAGE_BOUNDARY)
    if not all(stages):
        raise ValueError(
            f"layer_pattern {text!r} has a pipeline stage without a layer. Put at least one "
            f"symbol on each side of every '{STAGE_BOUNDARY}'."
        )
    return LayerPattern(text, tuple(stages), tuple(predictions))


def _known() -> str:
    return ", ".join(f"'{symbol}' {kind.meaning}" for symbol, kind in KINDS.items())


def _unknown_symbol(text: str, place: int) -> str:
    symbol = text[place - 1]
    found = f"{symbol!r} at place {place} of {len(text)}"
    if symbol == "D":
        return (
            f"layer_pattern {text!r} has {found}. In Megatron that is DeepSeek sparse "
            "attention, which is not implemented here. In a config.json that megatron_hybrid wrote "
            f"before 0.2 it is {KINDS['B'].meaning}, which is 'B' now: rename it in layer_pattern "
            "and in the keys of layer_overrides."
        )
    return (
        f"layer_pattern {text!r} has the unknown symbol {found}. "
        f"Known: {_known()}, '{STAGE_BOUNDARY}' pipeline stage boundary."
    )
