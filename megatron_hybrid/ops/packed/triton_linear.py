"""Products with packed weights in Triton: few rows unpack them inside, many rows before."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from megatron_hybrid.ops.kernels import aligned_rows
from megatron_hybrid.ops.linear import linear
from megatron_hybrid.ops.packed import triton as kernels
from megatron_hybrid.ops.packed import unpack
from megatron_hybrid.ops.packed.reference import FEW_ROWS

ROWS = 32
"""Rows that a program multiplies at a time."""
INPUTS_IN_FP32 = 32
"""Columns at a time in fp32, which no tensor core multiplies."""


def verify(x: Tensor, *inputs: Tensor | None) -> str | None:
    if not x.numel() or x.stride(-1) != 1:
        return "x is empty, or the numbers of a row are no neighbours"
    return kernels.verify(*inputs[:-1], x.dtype)


def run(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    outer: Tensor | None,
    zero: Tensor | None,
    rest: Tensor | None,
    ends_E: Tensor | None,
) -> Tensor:
    rows, experts = (triton.cdiv(len(x), ROWS), 1) if ends_E is None else (1, len(ends_E))
    if ends_E is None and len(x) > FEW_ROWS:
        return linear(x, unpack(codes, scale, outer, zero, rest, x.dtype))
    inputs = INPUTS_IN_FP32 if x.dtype == torch.float32 else kernels.INPUTS
    form = kernels.form_of(codes, scale, inputs)
    y = x.new_empty(len(x), form["O"])
    kernels.linear_kernel(
        (rows, triton.cdiv(form["O"], kernels.OUTPUTS), experts),
        [aligned_rows(x), *kernels.in_bytes(codes, scale, outer, zero), ends_E, y],
        [len(x)],
        BLOCK_M=ROWS,
        num_stages=4,
        **form,
    )
    if rest is None:
        return y
    more = linear(x, rest) if ends_E is None else F.grouped_mm(x, rest.mT, offs=ends_E)
    return torch.cat((y, more), -1)
