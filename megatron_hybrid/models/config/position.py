"""Position embedding of attention layers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megatron_hybrid.models.config.field_group import LayerFields
from megatron_hybrid.utils.validation import Range, check_field

_SCALING_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": ("partial_rotary_factor",),
}
"""`rope_type` of `rotary_scaling` -> the numbers that it requires."""


@dataclass
class PositionFields(LayerFields):
    """Fields of rotary position embedding (RoPE)."""

    position_embedding_type: Literal["rope", "none"] = "rope"
    """Position embedding. `none` suits hybrids: recurrent layers keep the order of tokens."""

    rotary_base: Annotated[float, Range(gt=0)] = 10000.0
    """Base of the RoPE frequencies, base^(-2i/d)."""

    rotary_percent: float = 1.0
    """Fraction of each attention head that RoPE rotates, from its first dimension on."""

    rotary_scaling: dict[str, Any] | None = None
    """How RoPE is stretched to longer contexts, in the terms of Hugging Face's `rope_parameters`:
    `rope_type` ("linear", "llama3", "yarn") and its numbers; see `mixers/rotary.py`."""

    rotary_interleaved: bool = False
    """Rotate pairs (2i, 2i + 1), not (i, i + d/2)."""

    def check(self) -> None:
        if self.rotary_scaling is not None:
            check_rotary_scaling(self.rotary_scaling)
        if self.position_embedding_type == "rope" and not 0.0 < self.rotary_percent <= 1.0:
            raise ValueError(
                f"rotary_percent is {self.rotary_percent}; it must lie in (0, 1]. "
                "For no rotation use position_embedding_type='none'."
            )


def check_rotary_scaling(scaling: Mapping[str, Any]) -> None:
    """Raise ValueError where `mixers.rotary.frequencies` could not use a `rotary_scaling`."""
    kind = scaling.get("rope_type")
    if kind not in _SCALING_NUMBERS:
        raise ValueError(
            f"rotary_scaling has the rope_type {kind!r}; use one of {list(_SCALING_NUMBERS)}."
        )
    for name in _SCALING_NUMBERS[kind]:
        check_field(f"rotary_scaling[{name!r}]", scaling.get(name), Annotated[float, Range(gt=0)])


def yarn_scale(factor: float, mscale: float) -> float:
    """Return YaRN's temperature: the factor of cos and sin for longer contexts."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_amplitude(scaling: Mapping[str, Any]) -> float:
    """Return the factor of cos and sin of a `rotary_scaling` of YaRN."""
    if (amplitude := scaling.get("attention_factor")) is not None:
        return float(amplitude)
    mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dims:
        return yarn_scale(scaling["factor"], mscale) / yarn_scale(scaling["factor"], all_dims)
    return yarn_scale(scaling["factor"], 1.0)


def comparable_scaling(scaling: Mapping[str, Any] | None) -> Any:
    """Return a `rotary_scaling` for comparison: of YaRN its numbers, however they were given."""
    if not scaling or scaling.get("rope_type") != "yarn":
        return scaling
    return (
        *(float(scaling[name]) for name in _SCALING_NUMBERS["yarn"]),
        float(scaling.get("beta_fast") or 32.0),
        float(scaling.get("beta_slow") or 1.0),
        scaling.get("truncate", True),
        round(yarn_amplitude(scaling), 9),
    )
