"""Mamba-1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_hybrid.models.config.field_group import Epsilon, LayerFields
from megatron_hybrid.utils.validation import Range


@dataclass
class Mamba1Fields(LayerFields):
    """Fields of a Mamba-1 layer."""

    mamba1_state_dim: Annotated[int, Range(ge=1)] = 16
    """States of each channel of a Mamba-1 layer."""

    mamba1_inner_size: Annotated[int, Range(ge=1)] | None = None
    """Channels of a Mamba-1 layer; None: 2 * hidden_size."""

    mamba1_dt_rank: Annotated[int, Range(ge=1)] | None = None
    """Rank of the time-step projection of a Mamba-1 layer; None: hidden_size / 16, rounded up."""

    mamba1_conv_kernel: Annotated[int, Range(ge=2)] = 4
    """Width of the causal convolution of a Mamba-1 layer."""

    mamba1_chunk_size: Annotated[int, Range(ge=1)] = 64
    """Tokens per chunk of the selective scan in training: memory and speed only."""

    mamba1_conv_bias: bool = True
    """A bias in the convolution of a Mamba-1 layer."""

    mamba1_proj_bias: bool = False
    """Biases in the projections into and out of a Mamba-1 layer."""

    mamba1_norm: Literal["none", "weighted", "weightless"] = "none"
    """RMS norms of dt, B and C of a Mamba-1 layer, with weights (Jamba) or without (FalconMamba).
    """

    mamba1_norm_epsilon: Epsilon = 1e-6
    """Epsilon of the norms of dt, B and C."""

    def check(self) -> None:
        """See `FieldGroup.check`."""
        if self.mamba1_inner_size is None:
            self.mamba1_inner_size = 2 * self.hidden_size
        if self.mamba1_dt_rank is None:
            self.mamba1_dt_rank = -(-self.hidden_size // 16)
        self._require_divisible("mamba1_inner_size")
