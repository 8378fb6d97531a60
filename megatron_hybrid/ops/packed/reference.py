"""Packed weights, unpacked whole before each product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.ops.packed.formats import format_of


def unpack(
    codes: Tensor,
    scale: Tensor,
    outer: Tensor | None = None,
    zero: Tensor | None = None,
    rest: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The weight of `packed_linear`, `[..., out, in]`, with the codes' leading dimensions."""
    values = format_of(codes.dtype, scale.dtype).values(codes)
    values = values.unflatten(-1, (scale.shape[-1], -1))
    if zero is not None:
        values = values.sub_(zero.float().unsqueeze(-1))
    scale = scale.float()
    if outer is not None:
        scale = scale * outer
    weight = values.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)
    return weight if rest is None else torch.cat((weight, rest), -2)


def packed_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    outer: Tensor | None = None,
    zero: Tensor | None = None,
    rest: Tensor | None = None,
) -> Tensor:
    """x W^T of a packed weight W, which is rounded to the dtype of x.

    Args:
        x: `[..., in]`. It alone gets a gradient.
        codes: `[packed, in]`, or `[packed, in / 2]` of codes of 4 bits.
        scale: `[packed, groups]`; its dtype and that of the codes tell the format (`format_of`).
        outer: `[packed, 1]`, fp32, a second factor of each scale; None: 1.
        zero: `[packed, groups]`, the code's value that stands for 0; None: 0.
        rest: `[rows that are not packed, in]` in the dtype of x; None: there are none.

    Returns:
        `[..., out]`, first the packed rows.
    """
    return F.linear(x, unpack(codes, scale, outer, zero, rest, x.dtype))
