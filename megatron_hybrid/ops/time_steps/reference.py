"""Time steps in plain torch."""

import torch

from megatron_hybrid.ops.activations import sigmoid, softplus


def time_steps(
    x_TC: torch.Tensor,
    bias_C: torch.Tensor,
    factor_F: torch.Tensor | None = None,
    limits: tuple[float, float | None] = (0.0, None),
    beta_TH: torch.Tensor | None = None,
    max_beta: float = 1.0,
    bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute time steps softplus(x + bias) within limits, times a factor, which makes them log
    decays; and writing strengths max_beta sigmoid(beta).

    Args:
        x_TC: `[T, C]`.
        bias_C: `[C]`.
        factor_F: `[F]`, each for C / F consecutive channels; None means 1.
        limits: smallest and largest time step; None means no largest one.
        beta_TH: `[T, H]`, or None.
        max_beta: largest writing strength.
        bound: of the log decays, below 0; they are bound sigmoid(-factor (x + bias)) then, and
            `limits` do not count. None means no bound.

    Returns:
        fp32 `[T, C]`, and fp32 `[T, H]` or None.
    """
    steps_TC = x_TC.float() + bias_C.float()
    if bound is None:
        steps_TC = softplus(steps_TC)
        if limits != (0.0, None):  # a softplus is positive
            steps_TC = steps_TC.clamp(*limits)
    if factor_F is not None:
        steps_TC = (factor_F[:, None] * steps_TC.unflatten(-1, (len(factor_F), -1))).flatten(1)
    if bound is not None:
        steps_TC = bound * sigmoid(-steps_TC)
    if beta_TH is not None:
        beta_TH = sigmoid(beta_TH.float())
        if max_beta != 1.0:
            beta_TH = beta_TH * max_beta
    return steps_TC, beta_TH
