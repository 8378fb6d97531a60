"""Products with packed weights: codes of 8 or 4 bits, a scale for each row and group of columns.

The number at [o, i] is (value of its code - zero[o, g]) scale[o, g] outer[o], computed in fp32 and
rounded once; g is the group of column i. All groups are equally wide. Rows that are not packed,
`rest`, lie after the others. Scales are kept row by row, also where a published weight has one for
128 rows or for all: whatever reorders or cuts rows does so to codes and scales alike.
"""

from torch import Tensor

from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.kernels import kernel_backend
from megatron_hybrid.ops.packed import reference
from megatron_hybrid.ops.packed.formats import Format as Format
from megatron_hybrid.ops.packed.formats import format_of as format_of
from megatron_hybrid.ops.packed.formats import of_nibbles as of_nibbles


def _codes_per_byte(codes: Tensor, scale: Tensor) -> int:
    return 8 // format_of(codes.dtype, scale.dtype).bits


_PARTS = {
    "codes": "number ... packed columns",
    "scale": "number ... packed groups",
    "outer": "number ... packed 1 or None",
    "zero": "number ... packed groups or None",
    "rest": "number ... any inputs or None",
}
_CONDITIONS = {
    "inputs in (None, columns * codes_per_byte(codes, scale))": "codes has {columns} columns, "
    "which are not the {inputs} numbers of a row: give [packed, in], or half of codes of 4 bits",
    "groups and columns * codes_per_byte(codes, scale) % groups == 0": "scale has {groups} groups, "
    "which cannot be shared out evenly to {columns} columns of codes",
}
unpack = Op("unpack", reference.unpack, _PARTS, _CONDITIONS, codes_per_byte=_codes_per_byte)
unpack.register(kernel_backend("triton", "megatron_hybrid.ops.packed.triton"))
packed_linear = Op(
    "packed_linear",
    reference.packed_linear,
    {"x": "any inputs", **_PARTS, "ends_E": "int any or None"},
    {
        "_rest == (() if ends_E is None else ends_E.shape)": "codes are of {_rest} experts, and "
        "ends_E is not: give an end for each",
        **_CONDITIONS,
    },
    codes_per_byte=_codes_per_byte,
)
packed_linear.register(
    kernel_backend("triton", "megatron_hybrid.ops.packed.triton", suffix="_linear")
)
