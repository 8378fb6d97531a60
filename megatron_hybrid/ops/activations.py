"""The activation functions of an MLP, by the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2, the activation of Nemotron-H; core's own one is compiled at its first call."""
    return F.relu(x).square()


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh approximation, the activation of Gemma."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(1.702 x), the activation of GPT-OSS; core compiles its own at the first call."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
}
