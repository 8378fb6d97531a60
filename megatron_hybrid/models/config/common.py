"""Fields of every layer kind: residual stream, norms, biases, activation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch.nn.functional as F

from megatron_hybrid.models.config.field_group import Epsilon, LayerFields
from megatron_hybrid.ops.activations import ACTIVATIONS
from megatron_hybrid.utils.validation import Range


@dataclass
class CommonFields(LayerFields):
    """Fields of every layer."""

    norm_placement: Literal["pre", "post", "sandwich", "stream"] = "pre"
    """x + f(norm(x)), x + norm(f(x)), x + norm(f(norm(x))), or norm(x) + f(norm(x))."""

    layernorm_epsilon: Epsilon = 1e-5
    """Epsilon of every norm without a field of its own."""

    layernorm_zero_centered_gamma: bool = False
    """The factor of a norm is 1 + weight."""

    residual_multiplier: float = 1.0
    """Factor of a layer's output, before it is added to the residual stream."""

    stream_multiplier: float = 1.0
    """Factor of the residual stream, before a layer's output is added."""

    residual_rank: Annotated[int, Range(ge=1)] | None = None
    """r: norm(x) and norm(B A norm(x)), of this rank, are added to the residual stream x, too."""

    layer_scalar: bool = False
    """Multiply the residual stream after a layer by a scalar stored with the weights."""

    add_bias_linear: bool = False
    """Biases in the projections of attention and MLP."""

    activation_func: Callable = F.silu
    """Activation of MLPs and experts; one of `ops.activations.ACTIVATIONS`."""

    layer_options: dict[str, Any] = field(default_factory=dict)
    """Values of layer kinds of other packages, which JSON can express."""

    def check(self) -> None:
        if self.activation_func not in ACTIVATIONS.values():
            raise ValueError(
                f"activation_func is {self.activation_func!r}; "
                f"use one of ops.activations.ACTIVATIONS: {', '.join(ACTIVATIONS)}."
            )
