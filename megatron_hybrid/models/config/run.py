"""Fields of a single run, which config.json does not hold."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megatron_hybrid.compat import unused_accelerators
from megatron_hybrid.models.config.field_group import FieldGroup
from megatron_hybrid.utils.validation import Range


@dataclass
class RunFields(FieldGroup):
    """Fields of a run, not of the architecture. Fields of TransformerConfig have portable defaults
    here."""

    if TYPE_CHECKING:
        gradient_accumulation_fusion: bool = False

    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    """`local`: plain torch. `transformer_engine`: fused norm and projection, on CUDA. `auto`: the
    latter if Transformer Engine is installed and the model is built on a CUDA device."""

    hidden_dropout: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Dropout on the embedding and on each layer's output, in training."""

    attention_dropout: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Dropout on the weights of attention, in training, drawn for each head by itself."""

    use_cpu_initialization: bool = True
    """Draw initial weights on the CPU, so that they do not depend on the device."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Activations that the backward pass recomputes: `full`, all inside of whole layers;
    `selective`, all inside of the `recompute_modules`; None, none. Gradients are equal to the
    bit."""

    recompute_method: Literal["uniform", "block"] | None = None
    """What `full` recomputes: `uniform`, all layers of a pipeline stage, `recompute_num_layers` at
    a time; `block`, the first `recompute_num_layers`, one at a time. None means `uniform`."""

    recompute_num_layers: int | None = None
    """Number of layers, see `recompute_method`. None means 1 with `uniform`; `block` needs one."""

    recompute_modules: list[str] | None = None
    """Parts of layers, as the mixers name them (`Mixer.recompute_name`, `recompute_parts`): whole
    mixers such as 'mamba', 'attention', 'mlp', 'moe', and 'core_attn', 'mla_up_proj',
    'shared_experts'; 'layernorm', the norm before each mixer. None means 'core_attn'."""

    def check_recompute(self) -> None:
        """Fill in the fields of recomputation; `recompute_modules` are checked when a model is
        built. See `FieldGroup.check`. This runs in place of megatron-core's own checks, which know
        other names."""
        if self.recompute_modules is None:
            self.recompute_modules = ["core_attn"]
        if self.recompute_granularity is None:
            return
        if self.recompute_granularity == "full":
            self.recompute_method = self.recompute_method or "uniform"
            if self.recompute_method == "uniform" and self.recompute_num_layers is None:
                self.recompute_num_layers = 1
            self._require_positive("recompute_num_layers")
        elif (self.recompute_method, self.recompute_num_layers) != (None, None):
            raise ValueError(
                f"recompute_method is {self.recompute_method!r} and recompute_num_layers "
                f"{self.recompute_num_layers}, but recompute_granularity='selective' takes the "
                "recompute_modules of all layers. Leave them out, or use 'full'."
            )

    def check(self) -> None:
        reason = unused_accelerators()["fused_weight_gradient_mlp_cuda"]
        if self.gradient_accumulation_fusion and reason is not None:
            raise ValueError(
                "gradient_accumulation_fusion=True needs NVIDIA's apex with its CUDA extensions "
                f"(the `apex` on PyPI is another project): {reason}. Build it as "
                "docs/start/install.md says, or leave the field at False."
            )
