"""Activation functions whose bits depend on their argument alone, not on its place in memory.

On a CPU torch evaluates most of them a few vectors at a time, and what is left of a row, of a
strided tensor or of a thread's part one by one, by another exponential: a value's bits then depend
on how many values are next to it. torch's `exp`, `log1p`, `erf` and `tanh` take a rest as a part of
a vector, by the same code, whatever the width of a vector is, and sums, products and quotients are
rounded in one way only. So here all are made of these. Elsewhere in `ops` and `models` no function
of torch is called that depends on places.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megatron_hybrid.ops.checks import compute_dtype, has_tangent
from megatron_hybrid.ops.gradients import are_wanted, with_gradient

_Function = Callable[[torch.Tensor], torch.Tensor]


def _instead_of(torchs: _Function) -> Callable[[_Function], _Function]:
    """Make a function of a CPU's fp32 or float64 one of all tensors: `torchs` on other devices. Its
    gradient is that of torch's function, which saves the argument alone, and is finite where an
    exponential overflows."""

    def decorate(ours: _Function) -> _Function:
        def rounded(x: torch.Tensor) -> torch.Tensor:
            dtype = compute_dtype(x)
            return ours(x) if dtype == x.dtype else ours(x.to(dtype)).to(x.dtype)

        def function(x: torch.Tensor) -> torch.Tensor:
            if x.device.type != "cpu" or has_tangent(x):
                return torchs(x)
            if are_wanted((x,)):
                return with_gradient(rounded, torchs, (x,))
            return rounded(x)

        function.__name__, function.__doc__ = ours.__name__, ours.__doc__
        return function

    return decorate


def _over_one_plus_exp(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Compute x / (1 + exp(exponent)), in the memory of the exponent."""
    divisor = exponent.exp_().add_(1.0)
    return torch.div(x, divisor, out=divisor)


@_instead_of(torch.sigmoid)
def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Compute 1 / (1 + exp(-x))."""
    return x.neg().exp_().add_(1.0).reciprocal_()


@_instead_of(F.softplus)
def softplus(x: torch.Tensor) -> torch.Tensor:
    """Compute log(1 + exp(x)), which is x itself above 20."""
    return torch.maximum(x.clamp(max=20.0).exp_().log1p_(), x)


@_instead_of(F.silu)
def silu(x: torch.Tensor) -> torch.Tensor:
    """Compute x sigmoid(x)."""
    return _over_one_plus_exp(x, x.neg())


@_instead_of(F.gelu)
def gelu(x: torch.Tensor) -> torch.Tensor:
    """Multiply x by the normal distribution's probability of less than x."""
    return (x * math.sqrt(0.5)).erf_().add_(1.0).mul_(x).mul_(0.5)


@_instead_of(lambda x: F.gelu(x, approximate="tanh"))
def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Compute GELU in its tanh approximation, the activation of Gemma; (1 + tanh u) / 2 is a
    sigmoid of 2 u."""
    factor = -2.0 * math.sqrt(2.0 / math.pi)
    return _over_one_plus_exp(x, x.square().mul_(0.044715 * factor).add_(factor).mul_(x))


@_instead_of(lambda x: x * torch.sigmoid(1.702 * x))
def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute x sigmoid(1.702 x), as GPT-OSS; core compiles its own one at the first call."""
    return _over_one_plus_exp(x, x * -1.702)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Compute max(x, 0)^2, as Nemotron-H; core compiles its own one at the first call."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, _Function] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
}
"""Functions by the names of config.json. Where torch or core have one, theirs stands for it."""

_OURS: dict[_Function, _Function] = {F.silu: silu, F.gelu: gelu, torch.sigmoid: sigmoid}


def independent_of_place(activation: _Function) -> _Function:
    """Return this module's function that computes what torch's does; any other as it is."""
    return _OURS.get(activation, activation)
