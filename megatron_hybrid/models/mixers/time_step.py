"""Initial time steps of Mamba layers (arXiv 2312.00752, section 3.6)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_RANGE = (1e-3, 1e-1)
_FLOOR = 1e-4


def initial_dt_bias(size: int) -> Tensor:
    """[size] fp32 such that softplus of it is log-uniform over the usual range of time steps."""
    low, high = (math.log(limit) for limit in _RANGE)
    dt = torch.empty(size).uniform_(low, high).exp().clamp(min=_FLOOR)
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
