"""Time steps, log decays and writing strengths of the recurrent mixers, from their projections."""

from __future__ import annotations

import torch

from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.kernels import TRITON, kernel_backend
from megatron_hybrid.ops.time_steps import reference

_time_steps = Op(
    "time_steps",
    reference.time_steps,
    {"x_TC": "T C", "bias_C": "C", "factor_F": "F or None", "beta_TH": "T any or None"},
    {
        "F is None or F and C % F == 0": "factor_F has {F} numbers, which cannot be shared out "
        "evenly to {C} channels of x_TC",
    },
)
_time_steps.register(
    kernel_backend("triton", "megatron_hybrid.ops.time_steps.triton", TRITON, priority=10)
)


def time_steps(
    x_TC: torch.Tensor,
    bias_C: torch.Tensor,
    factor_F: torch.Tensor | None = None,
    limits: tuple[float, float | None] = (0.0, None),
    beta_TH: torch.Tensor | None = None,
    max_beta: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Time steps softplus(x + bias) within limits, times a factor, which makes them log decays;
    and writing strengths max_beta sigmoid(beta).

    Args:
        x_TC: `[T, C]`.
        bias_C: `[C]`.
        factor_F: `[F]`, each for C / F consecutive channels; None: 1.
        limits: smallest and largest time step; None: no largest one.
        beta_TH: `[T, H]`, or None.
        max_beta: largest writing strength.

    Returns:
        fp32 `[T, C]`, and fp32 `[T, H]` or None.
    """
    return _time_steps(x_TC, bias_C, factor_F, limits, beta_TH, max_beta)
