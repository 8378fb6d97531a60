"""Rotary position embedding in plain torch."""

import torch

from megatron_hybrid.ops.norm.reference import rms_norm


def rotate(
    x_THD: torch.Tensor, cos_T1d: torch.Tensor, sin_T1d: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotate the leading 2 d dimensions of `x_THD`; the rest is unchanged."""
    dim = 2 * cos_T1d.shape[-1]
    rotated = x_THD[..., :dim]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, -1)
    turned = (
        torch.addcmul(first * cos_T1d, second, sin_T1d, value=-1),
        torch.addcmul(second * cos_T1d, first, sin_T1d),
    )
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((y, x_THD[..., dim:]), -1) if dim < x_THD.shape[-1] else y


def rotate_heads(
    q_TKGD: torch.Tensor,
    k_TKD: torch.Tensor,
    cos_T1d: torch.Tensor,
    sin_T1d: torch.Tensor,
    interleaved: bool = False,
    q_weight_D: torch.Tensor | None = None,
    k_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the leading 2 d dimensions of each head; the rest is unchanged.

    Args:
        q_TKGD: G query heads of each of K key/value heads, with any strides.
        k_TKD: keys.
        cos_T1d, sin_T1d: of each pair's angle, in the dtype of q.
        interleaved: pairs are neighbours; else dimensions i and i + d.
        q_weight_D, k_weight_D: of an RMSNorm of each head of q, and of k, before the rotation, in
            fp32 (float64 for float64). None, both: none.
        eps: of these norms.

    Returns:
        q `[T, K G, D]` and k `[T, K, D]`.
    """
    q_THD = q_TKGD.flatten(1, 2)
    if q_weight_D is not None:
        q_THD = rms_norm(q_THD, q_weight_D, eps, None)[0]
        k_TKD = rms_norm(k_TKD, k_weight_D, eps, None)[0]
    sizes = [q_THD.shape[1], k_TKD.shape[1]]
    q_THD, k_TKD = rotate(torch.cat((q_THD, k_TKD), 1), cos_T1d, sin_T1d, interleaved).split(
        sizes, 1
    )
    return q_THD, k_TKD
