"""Gated short convolution."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hybrid.models.config.field_group import LayerFields


@dataclass
class ShortConvFields(LayerFields):
    """Fields of a gated-short-convolution layer."""

    short_conv_kernel: int = 3
    """Width of the causal convolution of a gated-short-convolution layer."""

    short_conv_bias: bool = False
    """Biases in the convolution and the projections of a gated-short-convolution layer."""

    def check(self) -> None:
        """See `FieldGroup.check`."""
        self._require_conv_kernel("short_conv_kernel")
        self._require_divisible("hidden_size")
