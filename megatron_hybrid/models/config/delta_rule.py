"""Gated DeltaNet and Kimi Delta Attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from megatron_hybrid.models.config.field_group import Epsilon, LayerFields
from megatron_hybrid.utils.validation import Range


@dataclass
class DeltaRuleFields(LayerFields):
    """Fields of a layer with a delta rule."""

    followers: ClassVar = {"linear_key_head_dim": ("linear_num_key_heads",)}

    linear_conv_kernel_dim: Annotated[int, Range(ge=2)] = 4
    """Width of the causal convolutions in front of a delta rule."""

    linear_key_head_dim: Annotated[int, Range(ge=1)] = 128
    """Width of a query and key head."""

    linear_value_head_dim: Annotated[int, Range(ge=1)] = 128
    """Width of a value head."""

    linear_num_key_heads: Annotated[int, Range(ge=1)] | None = None
    """Query and key heads of a Gated DeltaNet layer, all heads of a Kimi Delta Attention layer;
    None: hidden_size // linear_key_head_dim."""

    linear_chunk_size: Annotated[int, Range(ge=1)] = 32
    """Tokens per chunk of a delta rule: speed only, as mamba_chunk_size."""

    linear_allow_neg_eigval: bool = False
    """Let beta of a delta rule range over (0, 2) rather than (0, 1), so that a transition
    of the state may have negative eigenvalues (arXiv 2411.12537)."""

    linear_norm_epsilon: Epsilon | None = None
    """Epsilon of the output norm of a Gated DeltaNet or Kimi Delta Attention layer; None:
    layernorm_epsilon."""

    linear_norm_zero_centered_gamma: bool | None = None
    """Whether the output norm's factor is 1 + weight; None: layernorm_zero_centered_gamma, as for
    all other norms. Qwen3-Next has False here and True there."""

    def check(self) -> None:
        """See `FieldGroup.check`."""
        if self.linear_num_key_heads is None:
            self.linear_num_key_heads = max(1, self.hidden_size // self.linear_key_head_dim)
        self._require_divisible_or_copied("linear_num_key_heads")


@dataclass
class KimiDeltaAttentionFields(LayerFields):
    """A Kimi Delta Attention layer: no fields besides those of every delta rule."""

    def check(self) -> None:
        """See `FieldGroup.check`. It comes after that of `DeltaRuleFields`."""
        self._require_divisible("linear_num_key_heads")


@dataclass
class GatedDeltaNetFields(LayerFields):
    """Fields of a Gated DeltaNet layer besides those of every delta rule."""

    if TYPE_CHECKING:
        linear_num_key_heads: int

    followers: ClassVar = {"linear_num_key_heads": ("linear_num_value_heads",)}

    linear_num_value_heads: Annotated[int, Range(ge=1)] | None = None
    """Value heads of a Gated DeltaNet layer, a multiple of the key heads; None: twice as many."""

    def check(self) -> None:
        """See `FieldGroup.check`. It comes after that of `DeltaRuleFields`."""
        if self.linear_num_value_heads is None:
            self.linear_num_value_heads = 2 * self.linear_num_key_heads
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads is {self.linear_num_value_heads}, not a multiple of "
                f"linear_num_key_heads={self.linear_num_key_heads}. "
                "Each key head serves as many value heads."
            )
        self._require_divisible("linear_num_value_heads")
