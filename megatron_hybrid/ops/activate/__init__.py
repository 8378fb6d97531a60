"""An activation function, and its product with a factor: of MLPs, and of gates without a norm."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_hybrid.ops.activate import reference
from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.kernels import TRITON, kernel_backend

_activate = Op("activate", reference.activate, {"x": "...", "factor": "... or None"})
_activate.register(
    kernel_backend("triton", "megatron_hybrid.ops.activate.triton", TRITON, priority=10)
)


def activate(
    x: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
    factor: torch.Tensor | None = None,
    in_fp32: bool = False,
) -> torch.Tensor:
    """activation(x) factor.

    Args:
        x: `[T, C]` or `[T, G, C]`, with any strides.
        activation: one of `ACTIVATIONS`, `torch.sigmoid`, or another function of one tensor.
        factor: of the shape of x; None: 1.
        in_fp32: whether only the product is rounded (computed in fp32, float64 for float64); else
            the activation is, too.

    Returns:
        The shape of x, in the dtype of the factor (of x without one).
    """
    return _activate(x, activation, factor, in_fp32)
