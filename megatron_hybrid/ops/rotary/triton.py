"""Norms and rotations of all heads of queries and keys in one launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.ops.launch import Kernel


@Kernel
@triton.jit
def rotate_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_out_ptr,
    k_out_ptr,
    stride_q_row,
    stride_q_group,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_cos_row,
    stride_sin_row,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate one head of one row: of q, or of k after all of q."""
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    if INTERLEAVED:
        pair, other, is_first = d // 2, d ^ 1, d % 2 == 0
    else:
        pair, is_first = d % HALF, d < HALF
        other = tl.where(is_first, d + HALF, d - HALF)
    turns = d < 2 * HALF
    if h < K * G:
        in_ptr = q_ptr + t * stride_q_row + h // G * stride_q_group + h % G * stride_q_head
        out_ptr, weight_ptr = q_out_ptr + (t * K * G + h) * D, q_weight_ptr
    else:
        in_ptr = k_ptr + t * stride_k_row + (h - K * G) * stride_k_head
        out_ptr, weight_ptr = k_out_ptr + (t * K + h - K * G) * D, k_weight_ptr
    x = tl.load(in_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    y = tl.load(in_ptr + other, mask=turns, other=0.0).to(tl.float32)
    if q_weight_ptr is not None:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + EPS)
        x = x * scale * tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight_ptr + other, mask=turns, other=0.0).to(tl.float32)
        # Rounded where torch rounds.
        x = x.to(q_ptr.dtype.element_ty).to(tl.float32)
        y = y.to(q_ptr.dtype.element_ty).to(tl.float32)
    cos = tl.load(cos_ptr + t * stride_cos_row + pair, mask=turns, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + t * stride_sin_row + pair, mask=turns, other=0.0).to(tl.float32)
    turned = (x * cos).to(q_ptr.dtype.element_ty).to(tl.float32)
    turned += tl.where(is_first, -y, y) * sin
    tl.store(out_ptr + d, tl.where(turns, turned, x), mask=d < D)


def verify(q_TKGD: Tensor, k_TKD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor, *_: Any) -> str | None:
    inputs = (q_TKGD, k_TKD, cos_T1d, sin_T1d)
    if any(t.dtype != q_TKGD.dtype for t in inputs):
        return "queries, keys and their angles differ in dtype"
    if any(t.stride(-1) != 1 for t in inputs):
        return "heads or angles are no rows of neighbours"
    return None


def run(*inputs: Any) -> tuple[Tensor, Tensor]:
    q_TKGD, k_TKD, cos_T1d, sin_T1d, interleaved, q_weight_D, k_weight_D, eps = inputs
    T, K, G, D = q_TKGD.shape
    q_out_THD, k_out_TKD = q_TKGD.new_empty(T, K * G, D), k_TKD.new_empty(T, K, D)
    rotate_kernel(
        (T, K * G + K),
        (q_TKGD, k_TKD, cos_T1d, sin_T1d, q_weight_D, k_weight_D, q_out_THD, k_out_TKD),
        K=K,
        G=G,
        D=D,
        HALF=cos_T1d.shape[-1],
        INTERLEAVED=interleaved,
        EPS=eps,
        BLOCK_D=triton.next_power_of_2(D),
        num_warps=1,
    )
    return q_out_THD, k_out_TKD
