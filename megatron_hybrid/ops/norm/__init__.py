"""RMSNorm: of rows and of sums of rows, and of groups of channels with a gate.

Shape suffixes: T rows, G groups (or heads), C channels of a group.
"""

import torch

from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.kernels import kernel_backend
from megatron_hybrid.ops.norm import reference

gated_rms_norm = Op(
    "gated_rms_norm",
    reference.gated_rms_norm,
    {"x_TGC": "T G C", "gate_TGC": "T G C", "weight_GC": "G C or C"},
    {"activation in GATES": "activation is {activation!r}; choose 'silu' or 'sigmoid'"},
    GATES=reference.GATES,
)
gated_rms_norm.register(kernel_backend("triton", "megatron_hybrid.ops.norm.triton"))
_rms_norm = Op(
    "rms_norm", reference.rms_norm, {"x": "... C", "weight_C": "C", "added": "... C or None"}
)
_rms_norm.register(kernel_backend("triton", "megatron_hybrid.ops.norm.triton", suffix="_plain"))


def rms_norm(x: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute RMSNorm(x) weight.

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
    """Compute `rms_norm(x + added)`, and x + added.

    Args:
        x_TC, added_TC: `[T, C]`, of one dtype, to which their sum is rounded.
        weight_C, eps: see `rms_norm`.
    """
    return _rms_norm(x_TC, weight_C, eps, added_TC)
