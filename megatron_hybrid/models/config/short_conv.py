"""Gated short convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_hybrid.models.config.field_group import LayerFields
from megatron_hybrid.utils.validation import Range


@dataclass
class ShortConvFields(LayerFields):
    """Fields of a gated-short-convolution layer."""

    short_conv_kernel: Annotated[int, Range(ge=2)] = 3
    """Width of the causal convolution of a gated-short-convolution layer."""

    short_conv_bias: bool = False
    """Biases in the convolution and the projections of a gated-short-convolution layer."""

    def check(self) -> None:
        """See `FieldGroup.check`."""
        self._require_divisible("hidden_size")
