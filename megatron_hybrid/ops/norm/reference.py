"""RMSNorm, with a gate and without, in plain torch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from megatron_hybrid.ops.activations import sigmoid, silu
from megatron_hybrid.ops.checks import compute_dtype

GATES = {"silu": silu, "sigmoid": sigmoid}


def gated_rms_norm(
    x_TGC: torch.Tensor,
    gate_TGC: torch.Tensor,
    weight_GC: torch.Tensor,
    eps: float,
    activation: str = "silu",
    norm_first: bool = False,
    zero_centered: bool = False,
    rounds_norm: bool = False,
    mean_square: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute RMSNorm(x activation(gate)) weight, or RMSNorm(x) weight activation(gate).

    Args:
        x_TGC, gate_TGC: `[T, G, C]`, with any strides; the mean square is that of a group.
        weight_GC: `[G, C]`, or `[C]` for all groups.
        eps: added to the mean square.
        activation: of the gate.
        norm_first: the second of the two forms.
        zero_centered: 1 + weight in place of the weight.
        rounds_norm: whether the result of a norm that comes first is rounded to the dtype of x.
        mean_square: `[T, G, C]` -> `[T, G, 1]`, for groups of which there is only a part here.

    Returns:
        `[T, G, C]` in the dtype of x, computed in fp32 (float64 for float64). A row's bits do not
        depend on other rows.
    """
    dtype = compute_dtype(x_TGC)
    x, gate, weight = x_TGC.to(dtype), GATES[activation](gate_TGC.to(dtype)), weight_GC.to(dtype)
    if not norm_first:
        x = x * gate
    square = x.square().mean(-1, keepdim=True) if mean_square is None else mean_square(x)
    x = x * torch.rsqrt(square + eps) * (1.0 + weight if zero_centered else weight)
    if norm_first:
        x = (x.to(x_TGC.dtype) if rounds_norm else x) * gate
    return x.to(x_TGC.dtype)


def rms_norm(
    x: torch.Tensor, weight_C: torch.Tensor, eps: float, added: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x, or of x + added, and what was normed: see `ops.rms_norm`."""
    if added is not None:
        x = x + added
    return _normed(x.to(weight_C.dtype), weight_C, eps).to(x.dtype), x


def _normed(x: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    if torch.is_grad_enabled() or not x.is_cpu:
        return F.rms_norm(x, weight_C.shape, weight_C, eps)
    # The same bits, by what it calls itself: a tape has these calls alone.
    return x.mul(x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()).mul_(weight_C)
