"""Time steps of the recurrent layers: initial values, and typical decays."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_RANGE = (1e-3, 1e-1)
_FLOOR = 1e-4
_DECAY_RATES = (1.0, 16.0)


def initial_dt_bias(size: int) -> Tensor:
    """Draw [size] fp32 such that softplus of it is log-uniform over the usual range of time steps
    (arXiv 2312.00752, section 3.6)."""
    low, high = (math.log(limit) for limit in _RANGE)
    dt = torch.empty(size).uniform_(low, high).exp().clamp(min=_FLOOR)
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus


def initial_A_log(size: int) -> Tensor:
    """Draw [size] fp32: logarithms of decay rates that are uniform over the range of Mamba-2."""
    return torch.empty(size).uniform_(*_DECAY_RATES).log()


def typical_decay(A_log: Tensor, dt_bias: Tensor, bound: float | None = None) -> Tensor:
    """Return exp(-exp(A_log) dt) for the time step of the bias alone. This is the typical factor of
    a state per token, 0 to 1, fp32, broadcast over both shapes. See `StateTensor.decay`.

    Args:
        bound: see `ops.time_steps`.
    """
    if bound is not None:
        return (bound * (A_log.detach().float().exp() * dt_bias.detach().float()).sigmoid()).exp()
    dt = F.softplus(dt_bias.detach().float())
    return (-A_log.detach().float().exp() * dt).exp()
