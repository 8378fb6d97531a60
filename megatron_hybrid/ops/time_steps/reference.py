"""Time steps in plain torch."""

from __future__ import annotations

import torch

from megatron_hybrid.ops.activations import sigmoid, softplus


def time_steps(
    x_TC: torch.Tensor,
    bias_C: torch.Tensor,
    factor_F: torch.Tensor | None,
    limits: tuple[float, float | None],
    beta_TH: torch.Tensor | None,
    max_beta: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `ops.time_steps`."""
    steps_TC = softplus(x_TC.float() + bias_C.float())
    if limits != (0.0, None):  # a softplus is positive
        steps_TC = steps_TC.clamp(*limits)
    if factor_F is not None:
        steps_TC = (factor_F[:, None] * steps_TC.unflatten(-1, (len(factor_F), -1))).flatten(1)
    if beta_TH is not None:
        beta_TH = sigmoid(beta_TH.float())
        if max_beta != 1.0:
            beta_TH = beta_TH * max_beta
    return steps_TC, beta_TH
