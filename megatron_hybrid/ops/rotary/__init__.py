"""Rotary position embedding of queries and keys (arXiv 2104.09864), after their norms."""

from __future__ import annotations

import torch

from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.kernels import TRITON, kernel_backend
from megatron_hybrid.ops.rotary import reference

_rotate_heads = Op(
    "rotate_heads",
    reference.rotate_heads,
    {
        **{"q_TKGD": "T K any D", "k_TKD": "T K D", "cos_T1d": "T 1 d", "sin_T1d": "T 1 d"},
        **{"q_weight_D": "D or None", "k_weight_D": "D or None"},
    },
    {"2 * d <= D": "cos_T1d has angles of {d} pairs, and heads have {D} numbers: a pair takes two"},
)
_rotate_heads.register(
    kernel_backend("triton", "megatron_hybrid.ops.rotary.triton", TRITON, priority=10)
)


def rotate_heads(
    q_TKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    cos_T1d: torch.Tensor,
    sin_T1d: torch.Tensor,
    interleaved: bool = False,
    weights_D: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the leading 2 d dimensions of each head; the rest is unchanged.

    Args:
        q_TKGD: G query heads of each of K key/value heads, with any strides.
        k_TKD: keys.
        cos_T1d, sin_T1d: of each pair's angle, in the dtype of q.
        interleaved: pairs are neighbours; else dimensions i and i + d.
        weights_D: of an RMSNorm of each head of q, and of k, before the rotation, in fp32 (float64
            for float64). None: none.
        eps: of these norms.

    Returns:
        q `[T, K G, D]` and k `[T, K, D]`.
    """
    return _rotate_heads(
        q_TKGD, k_TKD, cos_T1d, sin_T1d, interleaved, *(weights_D or (None, None)), eps
    )
