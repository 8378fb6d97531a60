"""MLPs. Experts share the fields of the activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from megatron_hybrid.models.config.field_group import LayerFields
from megatron_hybrid.utils.validation import Range


@dataclass
class MLPFields(LayerFields):
    """Fields of an MLP."""

    if TYPE_CHECKING:
        bias_activation_fusion: bool = False

    ffn_hidden_size: int | None = None
    """Inner width of an MLP; None: 4 * hidden_size."""

    gated_linear_unit: bool = True
    """Gate the MLP, as SwiGLU does."""

    activation_func_clamp_value: Annotated[float, Range(gt=0)] | None = None
    """c: the gate is clamped to at most c and the value to [-c, c], before the activation."""

    glu_linear_offset: float = 0.0
    """Added to the value of a gated MLP."""

    mlp_gate_multiplier: float = 1.0
    """Factor of the gate of an MLP, before its activation."""

    mlp_output_multiplier: float = 1.0
    """Factor of an MLP's output."""

    def check(self) -> None:
        self._require_positive("ffn_hidden_size")
        self._require_divisible("ffn_hidden_size")
        if self.mlp_gate_multiplier == 1.0:
            return
        if not self.gated_linear_unit:
            raise ValueError(
                f"mlp_gate_multiplier is {self.mlp_gate_multiplier}, but an MLP with "
                "gated_linear_unit=False has no gate. Leave it at 1."
            )
        if self.bias_activation_fusion:
            raise ValueError(
                f"mlp_gate_multiplier is {self.mlp_gate_multiplier}, which the kernels of "
                "bias_activation_fusion=True do not know. Use bias_activation_fusion=False."
            )
