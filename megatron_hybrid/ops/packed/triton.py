"""Packed weights in Triton, unpacked to the bits of the reference: inside of a product by few rows,
whole before one by many."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.ops.contracts import FLOATS
from megatron_hybrid.ops.kernels import aligned_rows
from megatron_hybrid.ops.launch import Kernel
from megatron_hybrid.ops.linear import linear
from megatron_hybrid.ops.packed import unpack
from megatron_hybrid.ops.packed.formats import format_of
from megatron_hybrid.ops.packed.reference import FEW_ROWS, GROUPED_ROW_BYTES

OUTPUTS, INPUTS = 32, 128
"""Rows and columns of a weight that a program has at a time."""
ROWS = 32
"""Rows that a program multiplies at a time."""
INPUTS_IN_FP32 = 32
"""Columns at a time in fp32, which no tensor core multiplies."""
LEAST_INPUTS = 16
"""Columns that a product takes at a time, at least."""
FLOAT8 = {torch.float8_e4m3fn: "fp8", torch.float8_e8m0fnu: "e8m0"}
"""What kernels read as bytes, and how."""


@triton.jit
def _numbers(codes, KIND: tl.constexpr):
    """Return what codes or scales stand for, fp32; `formats` says how."""
    if KIND == "fp8":
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int16) << 7) & ~(1 << 14)
        numbers = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif KIND == "fp4":
        codes = codes.to(tl.int16)
        bits = ((codes & 8) << 12) | ((codes & 7) << 9)
        numbers = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif KIND == "int4":
        numbers = codes.to(tl.float32) - 8.0
    elif KIND == "e8m0":  # the least power of two is subnormal
        bits = tl.where(codes == 0, 1 << 22, codes.to(tl.int32) << 23)
        numbers = bits.to(tl.float32, bitcast=True)
    else:
        numbers = codes.to(tl.float32)
    return numbers


@triton.jit
def _weights(
    parts,
    row,
    inside,
    column,
    I: tl.constexpr,
    G: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Load columns of some rows from `column` on, fp32 [BLOCK_O, BLOCK_I]."""
    codes_ptr, scale_ptr, outer_ptr, zero_ptr = parts
    PER: tl.constexpr = 2 if KIND == "int4" or KIND == "fp4" else 1
    GROUPS: tl.constexpr = BLOCK_I // (I // G) if BLOCK_I % (I // G) == 0 else 1
    c = column // PER + tl.arange(0, BLOCK_I // PER)
    mask = inside[:, None] & (c < I // PER)[None, :]
    codes = tl.load(codes_ptr + (row * (I // PER))[:, None] + c[None, :], mask=mask, other=0)
    if PER == 2:
        values = tl.interleave(_numbers(codes & 15, KIND), _numbers(codes >> 4, KIND))
    else:
        values = _numbers(codes, KIND)
    values = tl.reshape(values, [BLOCK_O, GROUPS, BLOCK_I // GROUPS])
    g = column // (I // G) + tl.arange(0, GROUPS)
    at = (row * G)[:, None] + g[None, :]
    mask = inside[:, None] & (g < G)[None, :]
    scale = _numbers(tl.load(scale_ptr + at, mask=mask, other=0), SCALE)
    if outer_ptr is not None:
        scale *= tl.load(outer_ptr + row, mask=inside, other=0.0)[:, None]
    if zero_ptr is not None:
        values -= tl.load(zero_ptr + at, mask=mask, other=0).to(tl.float32)[:, :, None]
    return tl.reshape(values * scale[:, :, None], [BLOCK_O, BLOCK_I])


@Kernel
@triton.jit
def unpack_kernel(
    codes_ptr,
    scale_ptr,
    outer_ptr,
    zero_ptr,
    weight_ptr,
    O: tl.constexpr,
    I: tl.constexpr,
    G: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Unpack some rows and columns of one of several weights."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    column = tl.program_id(1) * BLOCK_I
    row = tl.program_id(2).to(tl.int64) * O + o
    parts = codes_ptr, scale_ptr, outer_ptr, zero_ptr
    w = _weights(parts, row, o < O, column, I, G, KIND, SCALE, BLOCK_O, BLOCK_I)
    i = column + tl.arange(0, BLOCK_I)
    places = weight_ptr + (row * I)[:, None] + i[None, :]
    tl.store(places, w.to(weight_ptr.dtype.element_ty), mask=(o < O)[:, None] & (i < I)[None, :])


@Kernel
@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    outer_ptr,
    zero_ptr,
    ends_ptr,
    y_ptr,
    num_rows,
    stride_x_row,
    O: tl.constexpr,
    I: tl.constexpr,
    G: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Compute some outputs of rows, summed in the order of the columns whatever rows there are: of
    all rows by one weight, or of those of one expert by its own."""
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    e = tl.program_id(2).to(tl.int64)
    start, end = tl.program_id(0) * BLOCK_M, num_rows
    if ends_ptr is not None:
        start += tl.load(ends_ptr + e - 1, mask=e > 0, other=0).to(tl.int32)
        end = tl.minimum(tl.load(ends_ptr + e).to(tl.int32), num_rows)
    parts, row = (codes_ptr, scale_ptr, outer_ptr, zero_ptr), e * O + o
    for first in range(start, end, BLOCK_M * tl.num_programs(0)):
        m = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        y = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
        for column in range(0, I, BLOCK_I):
            i = column + tl.arange(0, BLOCK_I)
            mask = (m < end)[:, None] & (i < I)[None, :]
            x = tl.load(x_ptr + (m * stride_x_row)[:, None] + i[None, :], mask=mask, other=0.0)
            w = _weights(parts, row, o < O, column, I, G, KIND, SCALE, BLOCK_O, BLOCK_I)
            y = tl.dot(x, tl.trans(w.to(x.dtype)), y, input_precision="ieee")
        places = y_ptr + (m * O)[:, None] + o[None, :]
        tl.store(places, y.to(y_ptr.dtype.element_ty), mask=(m < end)[:, None] & (o < O)[None, :])


def form_of(codes: Tensor, scale: Tensor, inputs: int = INPUTS) -> dict[str, Any]:
    """Return what kernels need to know of a packed weight, whatever the rows to multiply are."""
    kind = format_of(codes.dtype, scale.dtype)
    I, G = codes.shape[-1] * 8 // kind.bits, scale.shape[-1]
    is_whole = G == 1 or inputs % (I // G) == 0
    return dict(
        O=codes.shape[-2],
        I=I,
        G=G,
        KIND=kind.name,
        SCALE=FLOAT8.get(scale.dtype, "number"),
        BLOCK_O=OUTPUTS,
        BLOCK_I=inputs if is_whole else math.gcd(inputs, I // G),
        num_warps=4,
    )


def in_bytes(*parts: Tensor | None) -> list[Tensor | None]:
    """Return the parts of a packed weight as a launch takes them."""
    is_float8 = [x is not None and x.dtype in FLOAT8 for x in parts]
    return [x.view(torch.uint8) if of8 else x for x, of8 in zip(parts, is_float8)]


def verify(codes: Tensor, scale: Tensor, *others: Any) -> str | None:
    *rest, dtype = others
    parts = [each for each in (codes, scale, *rest) if each is not None]
    if dtype not in FLOATS:
        return f"it writes no {dtype}"
    if not all(each.numel() and each.is_contiguous() for each in parts):
        return "a part of the weight is empty, or does not lie in one piece"
    if (block := form_of(codes, scale)["BLOCK_I"]) < LEAST_INPUTS:
        return f"{INPUTS} and the columns of a group have {block} for a divisor: too small a block"
    return None


def run(*inputs: Any) -> Tensor:
    codes, scale, outer, zero, rest, dtype = inputs
    form, lead = form_of(codes, scale), codes.shape[:-1]
    weight = torch.empty(*lead, form["I"], dtype=dtype, device=codes.device)
    grid = triton.cdiv(form["O"], OUTPUTS), triton.cdiv(form["I"], form["BLOCK_I"])
    parts = in_bytes(codes, scale, outer, zero)
    unpack_kernel((*grid, math.prod(lead[:-1])), [*parts, weight], **form)
    return weight if rest is None else torch.cat((weight, rest), -2)


def verify_linear(x: Tensor, *inputs: Tensor | None) -> str | None:
    if not x.numel() or x.stride(-1) != 1:
        return "x is empty, or the numbers of a row are no neighbours"
    rest, ends_E = inputs[-2:]
    if None not in (rest, ends_E) and x.shape[-1] * x.element_size() % GROUPED_ROW_BYTES:
        return f"rows of experts that are not packed take no multiple of {GROUPED_ROW_BYTES} bytes"
    return verify(*inputs[:-1], x.dtype)


def run_linear(*inputs: Any) -> Tensor:
    x, codes, scale, outer, zero, rest, ends_E = inputs
    rows, experts = (triton.cdiv(len(x), ROWS), 1) if ends_E is None else (1, len(ends_E))
    if ends_E is None and len(x) > FEW_ROWS:
        return linear(x, unpack(codes, scale, outer, zero, rest, x.dtype))
    form = form_of(codes, scale, INPUTS_IN_FP32 if x.dtype == torch.float32 else INPUTS)
    y = x.new_empty(len(x), form["O"])
    linear_kernel(
        (rows, triton.cdiv(form["O"], OUTPUTS), experts),
        [aligned_rows(x), *in_bytes(codes, scale, outer, zero), ends_E, y],
        [len(x)],
        BLOCK_M=ROWS,
        num_stages=4,
        **form,
    )
    if rest is None:
        return y
    more = linear(x, rest) if ends_E is None else F.grouped_mm(x, rest.mT, offs=ends_E)
    return torch.cat((y, more), -1)
