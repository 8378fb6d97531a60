"""An activation, and its product with a factor, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.ops.activations import gelu_tanh, squared_relu
from megatron_hybrid.ops.launch import Kernel

ELEMENTS = 1024
"""Elements of a program: 8 a thread, in loads of 16 bytes."""

KINDS = {F.silu: "silu", squared_relu: "squared_relu", gelu_tanh: "gelu_tanh"}
KINDS[torch.sigmoid] = "sigmoid"


@Kernel
@triton.jit
def activate_kernel(
    x_ptr,
    factor_ptr,
    y_ptr,
    stride_x_row,
    stride_x_group,
    stride_factor_row,
    stride_factor_group,
    G: tl.constexpr,
    C: tl.constexpr,
    KIND: tl.constexpr,
    IN_FP32: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Activate some channels of one group of one row."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t, g, inside = n // G, n % G, c < C
    x_ptrs = x_ptr + t * stride_x_row + g * stride_x_group + c
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    if KIND == "squared_relu":
        y = tl.maximum(x, 0.0, tl.PropagateNan.ALL)  # else a GPU makes 0 of NaN
        y = y * y
    elif KIND == "gelu_tanh":  # (1 + tanh u) / 2 is a sigmoid of 2 u
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * u))
    elif KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    else:
        y = 1.0 / (1.0 + tl.exp(-x))
    if factor_ptr is not None:
        if not IN_FP32:
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        factor_ptrs = factor_ptr + t * stride_factor_row + g * stride_factor_group + c
        y *= tl.load(factor_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + n * C + c, y, mask=inside)


def verify(
    x: Tensor,
    activation: Callable[[Tensor], Tensor],
    factor: Tensor | None,
    *_: Any,
) -> str | None:
    if activation not in KINDS:
        return f"the activation is {activation}; it has {sorted(KINDS.values())}"
    if x.dim() not in (2, 3) or not x.numel() or x.stride(-1) != 1:
        return f"x has shape {list(x.shape)} and strides {x.stride()}; it takes rows of neighbours"
    if factor is not None and (factor.dtype, factor.stride(-1)) != (x.dtype, 1):
        return "x and its factor differ in dtype, or the factor has no rows of neighbours"
    return None


def run(*inputs: Any) -> Tensor:
    x, activation, factor, in_fp32 = inputs
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, factor = (t if t is None or t.dim() == 3 else t.unsqueeze(1) for t in (x, factor))
    T, G, C = x.shape
    block = min(ELEMENTS, triton.next_power_of_2(C))
    activate_kernel(
        (T * G, triton.cdiv(C, block)),
        (x, factor, y.view(T, G, C)),
        G=G,
        C=C,
        KIND=KINDS[activation],
        IN_FP32=in_fp32,
        BLOCK=block,
        num_warps=4,
    )
    return y
