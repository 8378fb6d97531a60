"""Products with packed weights: codes of 8 or 4 bits, a scale for each row and group of columns.

The number at [o, i] is (value of its code - zero[o, g]) scale[o, g] outer[o], computed in fp32 and
rounded once; g is the group of column i. All groups are equally wide. Rows that are not packed,
`rest`, lie after the others. Scales are kept row by row, also where a published weight has one for
128 rows or for all: whatever reorders or cuts rows does so to codes and scales alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.packed import reference
from megatron_hybrid.ops.packed.formats import Format as Format
from megatron_hybrid.ops.packed.formats import format_of as format_of

_packed_linear = Op(
    "packed_linear",
    reference.packed_linear,
    {
        "x": "... inputs",
        "codes": "number packed columns",
        "scale": "number packed groups",
        "outer": "number packed 1 or None",
        "zero": "number packed groups or None",
        "rest": "number any inputs or None",
    },
    {
        "columns * codes_per_byte(codes, scale) == inputs": "codes has {columns} columns, which "
        "are not the {inputs} numbers of a row of x: give [packed, in], or half of codes of 4 bits",
        "groups and inputs % groups == 0": "scale has {groups} groups, which cannot be shared out "
        "evenly to {inputs} columns",
    },
    codes_per_byte=lambda codes, scale: 8 // format_of(codes.dtype, scale.dtype).bits,
)


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
    return _packed_linear(x, codes, scale, outer, zero, rest)


def unpack(
    codes: Tensor,
    scale: Tensor,
    outer: Tensor | None = None,
    zero: Tensor | None = None,
    rest: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The weight of `packed_linear`, `[..., out, in]`, with the codes' leading dimensions."""
    return reference.unpack(codes, scale, outer, zero, rest, dtype)
