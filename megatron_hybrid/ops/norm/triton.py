"""RMSNorm in Triton, with a gate and without: one launch, each number read and written once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.ops.launch import Kernel

ELEMENTS = 2048
"""Numbers of a program, if a group has no more."""
MAX_CHANNELS = 16384
"""Most channels of a group, which a program holds in registers."""
_PLAIN = dict.fromkeys(("SILU", "NORM_FIRST", "ZERO_CENTERED", "ROUNDS_NORM"), False)
"""The form of a norm without a gate."""


@Kernel
@triton.jit(do_not_specialize=["num_groups"])
def norm_kernel(
    x_ptr,
    added_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    num_groups,
    stride_x_row,
    stride_x_group,
    stride_x_channel,
    stride_added_row,
    stride_added_group,
    stride_added_channel,
    stride_gate_row,
    stride_gate_group,
    stride_gate_channel,
    stride_weight_group,
    stride_weight_channel,
    G: tl.constexpr,
    C: tl.constexpr,
    EPS: tl.constexpr,
    SILU: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROUNDS_NORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Normalise some of the T G groups."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    t, g = n // G, n % G
    inside = (n < num_groups)[:, None] & (c < C)[None, :]
    x_ptrs = x_ptr + (t * stride_x_row + g * stride_x_group)[:, None]
    x = tl.load(x_ptrs + c[None, :] * stride_x_channel, mask=inside, other=0.0).to(tl.float32)
    if added_ptr is not None:
        added_ptrs = added_ptr + (t * stride_added_row + g * stride_added_group)[:, None]
        added = tl.load(added_ptrs + c[None, :] * stride_added_channel, mask=inside, other=0.0)
        x = (x + added.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(sum_ptr + n[:, None] * C + c[None, :], x, mask=inside)
        x = x.to(tl.float32)
    if gate_ptr is not None:
        gate_ptrs = gate_ptr + (t * stride_gate_row + g * stride_gate_group)[:, None]
        z = tl.load(gate_ptrs + c[None, :] * stride_gate_channel, mask=inside, other=0.0)
        z = z.to(tl.float32)
        gate = 1.0 / (1.0 + tl.exp(-z))
        if SILU:
            gate *= z
    weight_ptrs = weight_ptr + (g * stride_weight_group)[:, None]
    weight = tl.load(weight_ptrs + c[None, :] * stride_weight_channel, mask=inside, other=0.0)
    weight = weight.to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    if gate_ptr is not None and not NORM_FIRST:
        x *= gate
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / C + EPS)
    y = x * scale[:, None] * weight
    if gate_ptr is not None and NORM_FIRST:
        if ROUNDS_NORM:
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        y *= gate
    tl.store(y_ptr + n[:, None] * C + c[None, :], y, mask=inside)


def configuration(channels: int) -> tuple[dict[str, int], int]:
    """Choose block sizes, and warps, for groups of so many channels."""
    block_c = triton.next_power_of_2(channels)
    blocks = {"BLOCK_N": max(1, ELEMENTS // block_c), "BLOCK_C": block_c}
    return blocks, max(4, block_c // 1024)


def verify(x_TGC: Tensor, *others: Any) -> str | None:
    if others[-1] is not None:
        return "there is a part of each group alone"
    if not x_TGC.numel():
        return "there are no numbers"
    if (channels := x_TGC.shape[-1]) > MAX_CHANNELS:
        return f"groups have {channels} channels; a program holds {MAX_CHANNELS}"
    return None


def run(*inputs: Any) -> Tensor:
    x_TGC, gate_TGC, weight_GC, eps, activation, norm_first, zero_centered, rounds_norm, _ = inputs
    y_TGC = torch.empty(x_TGC.shape, dtype=x_TGC.dtype, device=x_TGC.device)
    form = dict(
        SILU=activation == "silu",
        NORM_FIRST=norm_first,
        ZERO_CENTERED=zero_centered,
        ROUNDS_NORM=rounds_norm,
    )
    launch(x_TGC, None, gate_TGC, weight_GC, y_TGC, None, eps, form)
    return y_TGC


def launch(
    x_TGC: Tensor,
    added_TGC: Tensor | None,
    gate_TGC: Tensor | None,
    weight_GC: Tensor,
    y_TGC: Tensor,
    sum_TGC: Tensor | None,
    eps: float,
    form: dict[str, bool],
) -> None:
    """Write the norm to y, and x + added to sum."""
    T, G, C = x_TGC.shape
    blocks, num_warps = configuration(C)
    norm_kernel(
        (triton.cdiv(T * G, blocks["BLOCK_N"]),),
        (x_TGC, added_TGC, gate_TGC, weight_GC.expand(G, C), y_TGC, sum_TGC),
        (T * G,),
        G=G,
        C=C,
        EPS=eps,
        **form,
        **blocks,
        num_warps=num_warps,
    )


def verify_plain(x: Tensor, weight_C: Tensor, eps: float, added: Tensor | None) -> str | None:
    if (channels := x.shape[-1]) > MAX_CHANNELS:
        return f"rows have {channels} channels; a program holds {MAX_CHANNELS}"
    if x.dim() not in (2, 3) or not x.numel():
        return f"x has shape {list(x.shape)}; it takes rows, or rows of heads"
    if added is not None and added.dtype != x.dtype:
        return "x and what is added differ in dtype"
    return None


def run_plain(
    x: Tensor, weight_C: Tensor, eps: float, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums = None if added is None else torch.empty_like(y)
    tensors = [t if t is None or t.dim() == 3 else t.unsqueeze(1) for t in (x, added, y, sums)]
    x_TGC, added_TGC, y_TGC, sum_TGC = tensors
    launch(x_TGC, added_TGC, None, weight_C, y_TGC, sum_TGC, eps, _PLAIN)
    return y, x if sums is None else sums
