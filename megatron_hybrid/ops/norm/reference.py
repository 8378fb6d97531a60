"""RMSNorm, with a gate and without, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from megatron_hybrid.ops.activations import sigmoid, silu
from megatron_hybrid.ops.checks import compute_dtype

GATES = {"silu": silu, "sigmoid": sigmoid}


def _mean_square(x_TGC: torch.Tensor) -> torch.Tensor:
    return x_TGC.square().mean(-1, keepdim=True)


def gated_rms_norm(
    x_TGC: torch.Tensor,
    gate_TGC: torch.Tensor,
    weight_GC: torch.Tensor,
    eps: float,
    activation: str = "silu",
    norm_first: bool = False,
    zero_centered: bool = False,
    rounds_norm: bool = False,
    mean_square: Callable[[torch.Tensor], torch.Tensor] = _mean_square,
) -> torch.Tensor:
    """See `ops.gated_rms_norm`.

    Args:
        mean_square: `[T, G, C]` -> `[T, G, 1]`, for groups of which there is only a part here.
    """
    dtype = compute_dtype(x_TGC)
    x, gate, weight = x_TGC.to(dtype), GATES[activation](gate_TGC.to(dtype)), weight_GC.to(dtype)
    if not norm_first:
        x = x * gate
    x = x * torch.rsqrt(mean_square(x) + eps) * (1.0 + weight if zero_centered else weight)
    if norm_first:
        x = (x.to(x_TGC.dtype) if rounds_norm else x) * gate
    return x.to(x_TGC.dtype)


def rms_norm(
    x: torch.Tensor, weight_C: torch.Tensor, eps: float, added: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x, or of x + added, and what was normed: see `ops.rms_norm`."""
    if added is not None:
        x = x + added
    return F.rms_norm(x.to(weight_C.dtype), weight_C.shape, weight_C, eps).to(x.dtype), x
