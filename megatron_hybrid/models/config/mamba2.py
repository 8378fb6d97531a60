"""Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from megatron_hybrid.models.config.field_group import Epsilon, LayerFields
from megatron_hybrid.utils.validation import Range


@dataclass
class Mamba2Fields(LayerFields):
    """Fields of a Mamba-2 layer."""

    followers: ClassVar = {
        "mamba_expand": ("mamba_num_heads",),
        "mamba_head_dim": ("mamba_num_heads",),
    }

    mamba_state_dim: Annotated[int, Range(ge=1)] = 128
    """States of each channel of a Mamba-2 layer."""

    mamba_head_dim: Annotated[int, Range(ge=1)] = 64
    """Channels of a Mamba-2 head."""

    mamba_num_groups: Annotated[int, Range(ge=1)] = 1
    """Groups of Mamba-2 heads that share B and C; a multiple or a divisor of the tensor-parallel
    size."""

    mamba_num_heads: Annotated[int, Range(ge=1)] | None = None
    """Heads of a Mamba-2 layer; None: mamba_expand * hidden_size / mamba_head_dim."""

    mamba_expand: Annotated[int, Range(ge=1)] = 2
    """Inner width of a Mamba-2 layer in multiples of hidden_size, if mamba_num_heads is None."""

    mamba_conv_kernel: Annotated[int, Range(ge=2)] = 4
    """Width of the causal convolution of a Mamba-2 layer."""

    mamba_chunk_size: Annotated[int, Range(ge=1)] = 64
    """Tokens per chunk of the SSD scan: affects speed only."""

    mamba_conv_bias: bool = True
    """A bias in the convolution of a Mamba-2 layer."""

    mamba_proj_bias: bool = False
    """Biases in the projections into and out of a Mamba-2 layer."""

    mamba_gated_norm: Literal["gate_first", "norm_first", "none"] = "gate_first"
    """How a Mamba-2 layer ends, by group of heads: norm(y SiLU(z)), norm(y) SiLU(z), or y SiLU(z).
    """

    mamba_norm_epsilon: Epsilon = 1e-5
    """Epsilon of the output norm; megatron-core's value, not layernorm_epsilon."""

    mamba_dt_min: Annotated[float, Range(ge=0)] = 0.0
    """Lower limit of the time steps of a Mamba-2 layer, after their softplus."""

    mamba_dt_max: float | None = None
    """Upper limit of the time steps of a Mamba-2 layer."""

    mamba_section_multipliers: list[float] | None = None
    """Factors of z, x, B, C and dt after a Mamba-2 layer's input projection."""

    def check(self) -> None:
        """See `FieldGroup.check`."""
        if self.mamba_num_heads is None:
            width = self.mamba_expand * self.hidden_size
            if width % self.mamba_head_dim:
                raise ValueError(
                    f"the inner width mamba_expand * hidden_size = {width} is not a multiple of "
                    f"mamba_head_dim={self.mamba_head_dim}. Change one, or set mamba_num_heads."
                )
            self.mamba_num_heads = width // self.mamba_head_dim
        if self.mamba_num_heads % self.mamba_num_groups:
            raise ValueError(
                f"mamba_num_heads is {self.mamba_num_heads}, not a multiple of "
                f"mamba_num_groups={self.mamba_num_groups}. Each group serves as many heads."
            )
        self._require_divisible("mamba_num_heads")
        self._require_divisible_or_copied("mamba_num_groups")
        limits = (self.mamba_dt_min, self.mamba_dt_max)
        if limits[1] is not None and limits[1] < limits[0]:
            raise ValueError(
                f"mamba_dt_min and mamba_dt_max are {limits}; time steps are positive, so the "
                "limits need 0 <= mamba_dt_min <= mamba_dt_max (None: no upper limit)."
            )
        multipliers = self.mamba_section_multipliers
        if multipliers is not None and len(multipliers) != 5:
            raise ValueError(
                f"mamba_section_multipliers is {multipliers}; it takes five factors, those of z, "
                "x, B, C and dt."
            )
