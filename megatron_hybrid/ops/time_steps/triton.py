"""Time steps or log decays, and writing strengths, in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.ops.launch import Kernel

ELEMENTS = 512
"""Elements of a program."""


@Kernel
@triton.jit
def steps_kernel(
    x_ptr,
    bias_ptr,
    factor_ptr,
    beta_ptr,
    steps_ptr,
    strengths_ptr,
    low,
    high,
    max_beta,
    bound,
    stride_x_row,
    stride_x_channel,
    stride_beta_row,
    stride_beta_head,
    C: tl.constexpr,
    H: tl.constexpr,
    PER_FACTOR: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute some channels of one row, and the writing strengths of as many heads."""
    t, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    x_ptrs = x_ptr + t * stride_x_row + c * stride_x_channel
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    y = x + tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    if bound is None:
        small = tl.exp(tl.minimum(y, 20.0, tl.PropagateNan.ALL))  # else a GPU makes 20 of NaN
        # log(1 + e), whose 1 + e rounds where e is small.
        rounded = 1.0 + small
        rest = small - (rounded - 1.0)
        y = tl.where(y > 20.0, y, tl.log(rounded) + rest / rounded)
    if HAS_LIMITS:
        y = tl.maximum(y, low, tl.PropagateNan.ALL)
        y = tl.minimum(y, high, tl.PropagateNan.ALL)
    if factor_ptr is not None:
        y *= tl.load(factor_ptr + c // PER_FACTOR, mask=inside, other=0.0).to(tl.float32)
    if bound is not None:
        y = bound / (1.0 + tl.exp(y))
    tl.store(steps_ptr + t * C + c, y, mask=inside)
    if beta_ptr is not None:
        beta_ptrs = beta_ptr + t * stride_beta_row + c * stride_beta_head
        beta = tl.load(beta_ptrs, mask=c < H, other=0.0).to(tl.float32)
        tl.store(strengths_ptr + t * H + c, max_beta / (1.0 + tl.exp(-beta)), mask=c < H)


def verify(x_TC: Tensor, *_: Any) -> str | None:
    return None if x_TC.numel() else "there are no rows"


def run(*inputs: Any) -> tuple[Tensor, Tensor | None]:
    x_TC, bias_C, factor_F, limits, beta_TH, max_beta, bound = inputs
    T, C = x_TC.shape
    H = 0 if beta_TH is None else beta_TH.shape[1]
    steps_TC = torch.empty((T, C), dtype=torch.float32, device=x_TC.device)
    strengths_TH = torch.empty((T, H), dtype=torch.float32, device=x_TC.device)
    low, high = limits
    block = min(ELEMENTS, triton.next_power_of_2(max(C, H)))
    steps_kernel(
        (T, triton.cdiv(max(C, H), block)),
        (x_TC, bias_C, factor_F, beta_TH, steps_TC, strengths_TH),
        (low, float("inf") if high is None else high, max_beta, bound),
        C=C,
        H=H,
        PER_FACTOR=1 if factor_F is None else C // len(factor_F),
        HAS_LIMITS=bound is None and limits != (0.0, None),
        BLOCK=block,
        num_warps=1 if block <= 128 else 4,
    )
    return steps_TC, strengths_TH if H else None
