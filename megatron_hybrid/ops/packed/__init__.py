"""Products with packed weights: codes of 8 or 4 bits, a scale for each row and group of columns.

The number at [o, i] is (value of its code - zero[o, g]) scale[o, g] outer[o], computed in fp32 and
rounded once; g is the group of column i. All groups are equally wide. Rows that are not packed,
`rest`, lie after the others. Scales are kept row by row, also where a published weight has one for
128 rows or for all: whatever reorders or cuts rows does so to codes and scales alike.
"""

from __future__ import annotations

from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.packed import reference
from megatron_hybrid.ops.packed.formats import Format as Format
from megatron_hybrid.ops.packed.formats import format_of as format_of
from megatron_hybrid.ops.packed.formats import of_nibbles as of_nibbles
from megatron_hybrid.ops.packed.reference import unpack as unpack

packed_linear = Op(
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
