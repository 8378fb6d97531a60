"""RMSNorm: of rows and of sums of rows, and of groups of channels with a gate.

Shape suffixes: T rows, G groups (or heads), C channels of a group.
"""

from __future__ import annotations

from typing import Literal

import torch

from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.kernels import TRITON, kernel_backend
from megatron_hybrid.ops.norm import reference

_gated_rms_norm = Op(
    "gated_rms_norm",
    reference.gated_rms_norm,
    {"x_TGC": "T G C", "gate_TGC": "T G C", "weight_GC": "G C or C"},
    {"activation in GATES": "activation is {activation!r}; choose 'silu' or 'sigmoid'"},
    GATES=reference.GATES,
)
_gated_rms_norm.register(
    kernel_backend("triton", "megatron_hybrid.ops.norm.triton", TRITON, priority=10)
)
_rms_norm = Op(
    "rms_norm", reference.rms_norm, {"x": "... C", "weight_C": "C", "added": "... C or None"}
)
_rms_norm.register(
    kernel_backend("triton", "megatron_hybrid.ops.norm.triton_plain", TRITON, priority=10)
)


def gated_rms_norm(
    x_TGC: torch.Tensor,
    gate_TGC: torch.Tensor,
    weight_GC: torch.Tensor,
    eps: float,
    activation: Literal["silu", "sigmoid"] = "silu",
    norm_first: bool = False,
    zero_centered: bool = False,
    rounds_norm: bool = False,
) -> torch.Tensor:
    """RMSNorm(x activation(gate)) weight, or RMSNorm(x) weight activation(gate).

    Args:
        x_TGC, gate_TGC: `[T, G, C]`, with any strides; the mean square is that of a group.
        weight_GC: `[G, C]`, or `[C]` for all groups.
        eps: added to the mean square.
        activation: of the gate.
        norm_first: the second of the two forms.
        zero_centered: 1 + weight in place of the weight.
        rounds_norm: whether the result of a norm that comes first is rounded to the dtype of x.

    Returns:
        `[T, G, C]` in the dtype of x, computed in fp32 (float64 for float64). A row's bits do not
        depend on other rows.
    """
    return _gated_rms_norm(
        x_TGC, gate_TGC, weight_GC, eps, activation, norm_first, zero_centered, rounds_norm
    )


def rms_norm(x: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm(x) weight.

    Args:
        x: `[..., C]`.
        weight_C: in the dtype of the arithmetic: fp32 (float64 for float64).
        eps: added to the mean square of a row.

    Returns:
        The shape and dtype of x. A row's bits do not depend on other rows.
    """
    return _rms_norm(x, weight_C, eps, None)[0]


def rms_norm_of_sum(
    x_TC: torch.Tensor, added_TC: torch.Tensor, weight_C: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm(x + added)`, and x + added.

    Args:
        x_TC, added_TC: `[T, C]`, of one dtype, to which their sum is rounded.
        weight_C, eps: see `rms_norm`.
    """
    return _rms_norm(x_TC, weight_C, eps, added_TC)
