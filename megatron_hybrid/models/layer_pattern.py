"""The layer pattern language: one symbol per layer, `|` between pipeline stages, `/` before each
MTP head.

The symbols are megatron-core's where it has one. A new layer kind is a mixer and a line in
`LAYER_KINDS`, here or from another package (docs/guides/own_model.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from megatron_hybrid.models.config import attention, combined, mlp, moe, recurrent
from megatron_hybrid.models.config.architecture import PerLayerInputFields
from megatron_hybrid.models.config.field_group import FieldGroup
from megatron_hybrid.models.config.position import PositionFields
from megatron_hybrid.utils.registry import Registry

STAGE_BOUNDARY = "|"
PREDICTION_BOUNDARY = "/"
"""Mark in the pattern before each MTP head."""
SHARED_BLOCKS = "ZV"
"""Symbols of layers that share blocks."""
_BOUNDARIES = STAGE_BOUNDARY, PREDICTION_BOUNDARY


_Groups = tuple[type[FieldGroup], ...]


@dataclass(frozen=True)
class LayerKind:
    """The layer kind of a symbol."""

    meaning: str
    mixer: str
    """Module and class, "package.module:Class": a `models.mixers.base.Mixer`, imported when a model
    has such a layer."""
    fields: _Groups
    """Groups of config fields that the mixer reads, in the order of their checks."""
    norm_name: str = "norm"
    mixer_name: str = "mixer"
    """Names of norm and mixer in a checkpoint, megatron-core's where it has the kind."""
    params: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the mixer."""


def _own(
    meaning: str, mixer: str, fields: _Groups, names: Sequence[str] = (), **params: Any
) -> LayerKind:
    """Build a kind of this package. mixer: file in `models/mixers`, and class; names: as there."""
    names = names or ("norm", "mixer")
    return LayerKind(meaning, f"megatron_hybrid.models.mixers.{mixer}", fields, *names, params)


_block = partial(_own, names=("input_layernorm", "mixer"))
_attention = partial(_own, names=("input_layernorm", "self_attention"))
_mlp = partial(_own, names=("pre_mlp_layernorm", "mlp"))
_DELTA, _MLP, _MAMBA1 = recurrent.DeltaRuleFields, mlp.MLPFields, recurrent.Mamba1Fields
_HEADS = PositionFields, attention.AttentionFields
_SHARED = (*_HEADS, _MLP)

_OWN = {
    "M": _own("Mamba-2", "mamba2:Mamba2Mixer", (recurrent.Mamba2Fields,)),
    "S": _own("Mamba-1", "mamba1:Mamba1Mixer", (_MAMBA1,)),
    "J": _own(
        "gated memory unit", "mamba1:GatedMemoryMixer", (_MAMBA1, recurrent.GatedMemoryFields)
    ),
    "C": _own(
        "gated short convolution",
        "gated_short_conv:GatedShortConvMixer",
        (recurrent.ShortConvFields,),
    ),
    "G": _attention(
        "Gated DeltaNet",
        "gated_delta_net:GatedDeltaNetMixer",
        (_DELTA, recurrent.GatedDeltaNetFields),
    ),
    "K": _attention(
        "Kimi Delta Attention",
        "kimi_delta_attention:KimiDeltaAttentionMixer",
        (_DELTA, recurrent.KimiDeltaAttentionFields),
    ),
    "A": _attention(
        "lightning attention",
        "lightning_attention:LightningAttentionMixer",
        (PositionFields, _DELTA, recurrent.LightningAttentionFields),
    ),
    "U": _own("real-gated linear recurrent unit", "rg_lru:RGLRUMixer", (recurrent.RGLRUFields,)),
    "*": _attention("full attention", "attention:AttentionMixer", _HEADS),
    "W": _attention(
        "sliding-window attention",
        "attention:AttentionMixer",
        (*_HEADS, attention.WindowFields),
        locality="window",
    ),
    "L": _attention(
        "chunked attention",
        "attention:AttentionMixer",
        (*_HEADS, attention.ChunkFields),
        locality="chunk",
    ),
    "+": _attention(
        "multi-head latent attention",
        "latent_attention:LatentAttentionMixer",
        (PositionFields, attention.LatentAttentionFields),
    ),
    "B": _mlp(
        "MLP and experts side by side",
        "moe:DenseAndExpertsMixer",
        (_MLP, moe.MoEFields, moe.DenseAndExpertsFields),
    ),
    "P": _own("per-layer input", "per_layer_input:PerLayerInputMixer", (PerLayerInputFields,)),
    "-": _mlp("MLP", "mlp:MLPMixer", (_MLP,)),
    "H": _block(
        "parallel attention and Mamba-2",
        "side_by_side:ParallelHeadsMixer",
        (*_HEADS, recurrent.Mamba2Fields, combined.ParallelHeadsFields),
    ),
    "Z": _block(
        "shared block and Mamba-2",
        "shared_block:SharedBlockMixer",
        (*_SHARED, recurrent.Mamba2Fields, combined.SharedBlockFields),
    ),
    "V": _block(
        "shared block and Mamba-1",
        "shared_block:SharedBlockMixer",
        (*_SHARED, _MAMBA1, combined.SharedBlockFields),
        is_mamba1=True,
    ),
    "Q": _block(
        "attention and MLP side by side", "side_by_side:AttentionAndMLPMixer", (*_HEADS, _MLP)
    ),
    "R": _block(
        "sliding-window attention and MLP side by side",
        "side_by_side:AttentionAndMLPMixer",
        (*_HEADS, attention.WindowFields, _MLP),
        locality="window",
    ),
    "E": _mlp("mixture of experts", "moe:MoEMixer", (moe.MoEFields,)),
}


def _check(symbol: str, kind: LayerKind) -> None:
    if not isinstance(kind, LayerKind):
        raise TypeError(f"the layer kind {symbol!r} is {kind!r}; it must be a LayerKind")
    # Digits are layer numbers in layer_overrides.
    if len(symbol) != 1 or symbol in _BOUNDARIES or symbol.isdigit() or not "!" <= symbol <= "~":
        raise ValueError(f"the symbol of a layer kind is {symbol!r}; use one free letter or sign")


LAYER_KINDS: Registry[LayerKind] = Registry("layer kind", "megatron_hybrid.layers", _check, _OWN)
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

    @property
    def memory_sources(self) -> dict[int, int]:
        """Number (from 1) of each layer J -> that of the last layer S before it, or 0."""
        found = [number for number, symbol in enumerate(self.symbols, 1) if symbol == "J"]
        return {number: self.symbols.rfind("S", 0, number) + 1 for number in found}

    def stages(self, num_stages: int) -> tuple[str, ...]:
        """Split the layers into pipeline stages.

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
        if symbol not in _BOUNDARIES and symbol not in LAYER_KINDS:
            raise ValueError(_unknown_symbol(text, place))
    if predictions:
        part, allowed = predictions[0], set(LAYER_KINDS) - set("JZP")
        if not part or set(predictions) != {part} or set(part) - allowed:
            raise ValueError(
                f"layer_pattern {text!r} has the parts {predictions} after "
                f"'{PREDICTION_BOUNDARY}', for multi-token prediction. They must all be the same "
                f"one layer or more, without '{STAGE_BOUNDARY}', 'J', 'Z' and 'P'."
            )
    stages = main.split(STAGE_BOUNDARY)
    if not all(stages):
        raise ValueError(
            f"layer_pattern {text!r} has a pipeline stage without a layer. Put at least one "
            f"symbol on each side of every '{STAGE_BOUNDARY}'."
        )
    return LayerPattern(text, tuple(stages), tuple(predictions))


def _known() -> str:
    return ", ".join(f"'{symbol}' {kind.meaning}" for symbol, kind in LAYER_KINDS.items())


def _unknown_symbol(text: str, place: int) -> str:
    symbol = text[place - 1]
    found = f"{symbol!r} at place {place} of {len(text)}"
    if symbol == "D":
        return (
            f"layer_pattern {text!r} has {found}. In Megatron that is DeepSeek sparse "
            "attention, which is not implemented here."
        )
    return (
        f"layer_pattern {text!r} has the unknown symbol {found}. "
        f"Known: {_known()}, '{STAGE_BOUNDARY}' pipeline stage boundary."
    )
