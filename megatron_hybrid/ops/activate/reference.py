"""Activations in plain torch."""

from collections.abc import Callable

import torch

from megatron_hybrid.ops.activations import independent_of_place
from megatron_hybrid.ops.checks import compute_dtype


def activate(
    x: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
    factor: torch.Tensor | None = None,
    in_fp32: bool = False,
) -> torch.Tensor:
    """Compute activation(x) factor.

    Args:
        x: `[T, C]` or `[T, G, C]`, with any strides.
        activation: one of `ACTIVATIONS`, `torch.sigmoid`, or another function of one tensor.
        factor: of the shape of x; None means 1.
        in_fp32: whether only the product is rounded (computed in fp32, float64 for float64); else
            the activation is, too.

    Returns:
        The shape of x, in the dtype of the factor (of x without one).
    """
    activation = independent_of_place(activation)
    if factor is None:
        return activation(x)
    if not in_fp32:
        return activation(x) * factor
    dtype = compute_dtype(factor)
    return (factor.to(dtype) * activation(x.to(dtype))).to(factor.dtype)
