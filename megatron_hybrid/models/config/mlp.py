"""MLPs. Experts share the fields of the activation."""

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
    """Inner width of an MLP; None means 4 * hidden_size."""

    gated_linear_unit: bool = True
    """Gate the MLP, as SwiGLU does."""

    activation_func_clamp_value: Annotated[float, Range(gt=0)] | None = None
    """c: the gate is clamped to at most c and the value to [-c, c], before the activation."""

    activation_clamp_after: bool = False
    """Clamp the gate after the activation instead."""

    glu_linear_offset: float = 0.0
    """Added to the value of a gated MLP."""

    mlp_gate_multiplier: float = 1.0
    """Factor of the gate of an MLP, before its activation."""

    activation_sparsity: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Share of a gate's channels that are 0 before the activation if they are normally distributed.
    A quantile, by their mean and deviation, is subtracted from the others."""

    mlp_output_multiplier: float = 1.0
    """Factor of an MLP's output."""

    def check(self) -> None:
        self._require_positive("ffn_hidden_size")
        self._require_divisible("ffn_hidden_size")
        defaults = {"mlp_gate_multiplier": 1.0, "activation_sparsity": 0.0}
        for name, default in {**defaults, "activation_clamp_after": False}.items():
            if (value := getattr(self, name)) == default:
                continue
            if not self.gated_linear_unit:
                raise ValueError(
                    f"{name} is {value}, but an MLP with gated_linear_unit=False has no gate. "
                    f"Leave it at {default}."
                )
            if self.bias_activation_fusion:
                raise ValueError(
                    f"{name} is {value}, which the kernels of bias_activation_fusion=True do not "
                    "know. Use bias_activation_fusion=False."
                )
