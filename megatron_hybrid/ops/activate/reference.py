"""Activations in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_hybrid.ops.activations import independent_of_place
from megatron_hybrid.ops.checks import compute_dtype


def activate(
    x: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
    factor: torch.Tensor | None,
    in_fp32: bool,
) -> torch.Tensor:
    """See `ops.activate`."""
    activation = independent_of_place(activation)
    if factor is None:
        return activation(x)
    if not in_fp32:
        return activation(x) * factor
    dtype = compute_dtype(factor)
    return (factor.to(dtype) * activation(x.to(dtype))).to(factor.dtype)
