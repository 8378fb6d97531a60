"""Packed weights, unpacked whole before each product."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.ops.linear import linear
from megatron_hybrid.ops.packed.formats import format_of

FEW_ROWS = 128
"""Rows up to which a kernel unpacks a weight inside of a product: with more it would do so so often
that one unpacked before is faster. Of experts, so many for each."""
GROUPED_ROW_BYTES = 16
"""torch's grouped products take matrices whose rows are multiples of this."""


def unpack(
    codes: Tensor,
    scale: Tensor,
    outer: Tensor | None = None,
    zero: Tensor | None = None,
    rest: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return `packed_linear`'s weight, `[..., out, in]`, with the codes' leading dimensions."""
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
    ends_E: Tensor | None = None,
) -> Tensor:
    """Compute x W^T of a packed weight W (rounded to the dtype of x), or that of each row's expert.

    Args:
        x: `[T, in]`. It alone gets a gradient.
        codes: `[packed, in]`, or `[packed, in / 2]` of codes of 4 bits; of experts, all parts have
            E in front.
        scale: `[packed, groups]`; its dtype and that of the codes tell the format (`format_of`).
        outer: `[packed, 1]`, fp32, a second factor of each scale; None means 1.
        zero: `[packed, groups]`, the code's value that stands for 0; None means 0.
        rest: `[rows that are not packed, in]` in the dtype of x; None without any.
        ends_E: as in `expert_mlps`; None means one weight for all rows.

    Returns:
        `[T, out]`, first the packed rows. Rows of no expert may hold anything.
    """
    parts = codes, scale, outer, zero, rest
    if ends_E is None:
        return linear(x, unpack(*parts, x.dtype))
    ends = [0, *ends_E.tolist()]
    products = [
        linear(x[first:end], unpack(*(None if p is None else p[e] for p in parts), x.dtype))
        for e, (first, end) in enumerate(pairwise(ends))
    ]
    return F.pad(torch.cat(products), (0, 0, 0, len(x) - ends[-1]))
