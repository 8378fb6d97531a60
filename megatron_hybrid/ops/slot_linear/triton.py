"""Products by slots in Triton: a row's bits depend on no other row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.ops.launch import Kernel

OUTPUTS, INPUTS = 32, 128
"""Numbers of a row that a program writes, and that it reads at a time."""


@Kernel
@triton.jit
def slot_linear_kernel(
    x_ptr,
    weights_ptr,
    slots_ptr,
    y_ptr,
    stride_x_row,
    O: tl.constexpr,
    C: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute some outputs of one row."""
    t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    y = tl.zeros([BLOCK_O], tl.float32)
    if slot >= 0:
        weights = weights_ptr + slot * O * C + o[:, None] * C
        for start in range(0, C, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            x = tl.load(x_ptr + t * stride_x_row + c, mask=c < C, other=0.0).to(tl.float32)
            inside = (o < O)[:, None] & (c < C)[None, :]
            w = tl.load(weights + c[None, :], mask=inside, other=0.0).to(tl.float32)
            y += tl.sum(w * x[None, :], 1)
    tl.store(y_ptr + t * O + o, y, mask=o < O)


def verify(x: Tensor, weights: Tensor, slots: Tensor) -> str | None:
    if not x.numel() or not weights.numel():
        return f"x has shape {list(x.shape)}, the weights {list(weights.shape)}: nothing to do"
    if x.stride(-1) != 1 or not weights.is_contiguous():
        return "the numbers of a row, or the weights, are no neighbours"
    return None


def run(x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    (T, C), O = x.shape, weights.shape[1]
    y = torch.empty(T, O, dtype=x.dtype, device=x.device)
    block = min(OUTPUTS, triton.next_power_of_2(O))
    slot_linear_kernel(
        (T, triton.cdiv(O, block)),
        (x, weights, slots, y),
        O=O,
        C=C,
        BLOCK_O=block,
        BLOCK_C=min(INPUTS, triton.next_power_of_2(C)),
        num_warps=4,
    )
    return y
