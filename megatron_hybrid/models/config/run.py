"""Fields of a single run, which config.json does not hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_hybrid.compat import have_apex
from megatron_hybrid.models.config.field_group import FieldGroup


@dataclass
class RunFields(FieldGroup):
    """Fields of a run, not of the architecture. Fields of TransformerConfig have portable defaults
    here."""

    if TYPE_CHECKING:
        gradient_accumulation_fusion: bool

    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    """`local`: plain torch. `transformer_engine`: fused norm and projection, on CUDA. `auto`: the
    latter if Transformer Engine is installed and the model is built on a CUDA device."""

    hidden_dropout: float = 0.0
    """Dropout on the embedding and on each layer's output, in training."""

    attention_dropout: float = 0.0
    """No other value is supported."""

    use_cpu_initialization: bool = True
    """Draw initial weights on the CPU, so that they do not depend on the device."""

    def check(self) -> None:
        """See `FieldGroup.check`."""
        self._require_one_of("layer_spec", "auto", "local", "transformer_engine")
        if self.gradient_accumulation_fusion and not have_apex("fused_weight_gradient_mlp_cuda"):
            raise ValueError(
                "gradient_accumulation_fusion=True needs NVIDIA's apex with its CUDA extensions "
                "(the `apex` on PyPI is another project), which is not installed. Build it as the "
                "README says, or leave the field at False."
            )
