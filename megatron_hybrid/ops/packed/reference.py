"""Packed weights, unpacked whole before each product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.ops.packed.formats import format_of


def unpack(
    codes: Tensor,
    scale: Tensor,
    outer: Tensor | None,
    zero: Tensor | None,
    rest: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """See `ops.unpack`."""
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
    outer: Tensor | None,
    zero: Tensor | None,
    rest: Tensor | None,
) -> Tensor:
    """See `ops.packed_linear`."""
    return F.linear(x, unpack(codes, scale, outer, zero, rest, x.dtype))
