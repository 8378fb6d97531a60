"""The causal convolution in Triton: one launch for all rows, one for the tails after them; one for
both where each sequence has a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.ops.checks import pad_rows, rows_between
from megatron_hybrid.ops.kernels import SequenceTable, is_there, library_bounds
from megatron_hybrid.ops.launch import Kernel, checked
from megatron_hybrid.ops.slot_states import SlotStates

ROWS, CHANNELS = 16, 128
"""Rows and channels of a program."""


@Kernel
@triton.jit(do_not_specialize=["num_tokens"])
def conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    pool_ptr,
    slots_ptr,
    y_ptr,
    sequences_ptr,
    boundaries_ptr,
    num_tokens,
    stride_x_row,
    stride_x_channel,
    stride_weight_channel,
    stride_weight_column,
    stride_pool_slot,
    stride_pool_channel,
    stride_pool_column,
    stride_y_row,
    stride_y_channel,
    C: tl.constexpr,
    K: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Convolve some rows and channels; what lies before a sequence's first row is in its tail."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    alive, own = t < num_tokens, c < C
    inside = alive[:, None] & own[None, :]
    sequence = tl.load(sequences_ptr + t, mask=alive, other=0)
    first = tl.load(boundaries_ptr + sequence, mask=alive, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + sequence, mask=alive, other=0).to(tl.int64)
    y = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for j in tl.static_range(K):
        source = t - (K - 1) + j
        here = source >= first
        x = tl.load(
            x_ptr + source[:, None] * stride_x_row + c[None, :] * stride_x_channel,
            mask=inside & here[:, None],
            other=0.0,
        ).to(tl.float32)
        if j < K - 1:
            column = source - first + (K - 1)
            tail_ptrs = pool_ptr + slot[:, None] * stride_pool_slot
            tail_ptrs += c[None, :] * stride_pool_channel + column[:, None] * stride_pool_column
            before = inside & (here[:, None] == 0)
            tail = tl.load(tail_ptrs, mask=before, other=0.0)
            x += tail.to(x_ptr.dtype.element_ty).to(tl.float32)
        weight_ptrs = weight_ptr + c * stride_weight_channel + j * stride_weight_column
        y += x * tl.load(weight_ptrs, mask=own, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c, mask=own, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(y_ptr + t[:, None] * stride_y_row + c[None, :] * stride_y_channel, y, mask=inside)


@Kernel
@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def conv_step_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    pool_ptr,
    slots_ptr,
    y_ptr,
    num_rows,
    num_sequences,
    stride_x_row,
    stride_x_channel,
    stride_weight_channel,
    stride_weight_column,
    stride_pool_slot,
    stride_pool_channel,
    stride_pool_column,
    stride_y_row,
    stride_y_channel,
    C: tl.constexpr,
    K: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Convolve a row of each sequence, whose tail it moves by one; zeros in padding rows."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = c < C
    alive = (t < num_sequences)[:, None] & own[None, :]
    slot = tl.load(slots_ptr + t, mask=t < num_sequences, other=0).to(tl.int64)
    tail_ptrs = pool_ptr + slot[:, None] * stride_pool_slot + c[None, :] * stride_pool_channel
    y = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for j in tl.static_range(K):
        if j < K - 1:
            x = tl.load(tail_ptrs + j * stride_pool_column, mask=alive, other=0.0)
        else:
            x_ptrs = x_ptr + t[:, None] * stride_x_row + c[None, :] * stride_x_channel
            x = tl.load(x_ptrs, mask=alive, other=0.0)
        if j > 0:
            tl.debug_barrier()  # all threads have read the column that is written over
            tl.store(tail_ptrs + (j - 1) * stride_pool_column, x, mask=alive)
        weight_ptrs = weight_ptr + c * stride_weight_channel + j * stride_weight_column
        weight = tl.load(weight_ptrs, mask=own, other=0.0).to(tl.float32)[None, :]
        y += x.to(x_ptr.dtype.element_ty).to(tl.float32) * weight
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c, mask=own, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    y_ptrs = y_ptr + t[:, None] * stride_y_row + c[None, :] * stride_y_channel
    tl.store(y_ptrs, tl.where(alive, y, 0.0), mask=(t < num_rows)[:, None] & own[None, :])


@Kernel
@triton.jit(do_not_specialize=["stride_out_place"])  # of one capture it is any number
def tails_kernel(
    x_ptr,
    pool_ptr,
    slots_ptr,
    out_ptr,
    places_ptr,
    ends_ptr,
    owners_ptr,
    boundaries_ptr,
    stride_x_row,
    stride_x_channel,
    stride_pool_slot,
    stride_pool_channel,
    stride_pool_column,
    stride_out_place,
    stride_out_channel,
    stride_out_column,
    C: tl.constexpr,
    K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copy the K - 1 inputs before a row's end, of some channels: of the call or the last tail."""
    number = tl.program_id(0)
    end, owner = tl.load(ends_ptr + number).to(tl.int64), tl.load(owners_ptr + number)
    first = tl.load(boundaries_ptr + owner).to(tl.int64)
    slot, place = tl.load(slots_ptr + owner).to(tl.int64), tl.load(places_ptr + number).to(tl.int64)
    c, k = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    inside = (c[:, None] < C) & (k[None, :] < K - 1)
    source = end - (K - 1) + k
    here = source >= first
    x_ptrs = x_ptr + source[None, :] * stride_x_row + c[:, None] * stride_x_channel
    new = tl.load(x_ptrs, mask=inside & here[None, :], other=0.0)
    column = source - first + (K - 1)
    old_ptrs = pool_ptr + slot * stride_pool_slot
    old_ptrs += c[:, None] * stride_pool_channel + column[None, :] * stride_pool_column
    old = tl.load(old_ptrs, mask=inside & (here[None, :] == 0), other=0.0)
    tail = tl.where(here[None, :], new.to(tl.float32), old.to(tl.float32))
    tl.debug_barrier()  # a tail may be written over itself
    out_ptrs = out_ptr + place * stride_out_place
    out_ptrs += c[:, None] * stride_out_channel + k[None, :] * stride_out_column
    tl.store(out_ptrs, tail, mask=inside)


def verify(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, states: SlotStates | None, *_: Any
) -> str | None:
    if states is not None and states.pool_S.dtype not in (torch.float32, x_TC.dtype):
        return f"tails are {states.pool_S.dtype} and inputs {x_TC.dtype}"
    return None


def run(*inputs: Any) -> Tensor:
    x_TC, weight_CK, bias_C, states, layout, activation = inputs
    C, K = weight_CK.shape
    if states is None:
        states = SlotStates.zeros(layout.num_sequences, (C, K - 1), x_TC.device, x_TC.dtype)
    pool, slots = states.pool_S, states.slot_ids_R
    y_TC = torch.empty_like(x_TC)
    blocks = triton.cdiv(C, CHANNELS)
    tensors = (x_TC, weight_CK, bias_C, pool, slots, y_TC)
    form = dict(C=C, K=K, SILU=activation == "silu", BLOCK_T=ROWS, BLOCK_C=CHANNELS, num_warps=4)
    if layout.num_singles == layout.num_sequences and not layout.captures:
        grid = triton.cdiv(layout.num_rows, ROWS), blocks
        conv_step_kernel(grid, tensors, (layout.num_rows, layout.num_sequences), **form)
        return y_TC
    table = SequenceTable.of(layout, x_TC.device)
    y_TC[layout.num_tokens :] = 0
    grid = triton.cdiv(layout.num_tokens, ROWS), blocks
    tables = table.rows, table.boundaries
    conv_kernel(grid, (*tensors, *tables), (layout.num_tokens,), **form)
    targets = [(pool, slots, table.boundaries[1:], table.numbers)]
    if layout.captures:  # before the tails that they may need are written over
        own = states.captured_n, table.numbers, table.captures, table.capture_owners
        targets.insert(0, own)
    for out, places, ends, owners in targets:
        tails_kernel(
            (len(ends), blocks),
            (x_TC, pool, slots, out, places, ends, owners, table.boundaries),
            C=C,
            K=K,
            BLOCK_C=CHANNELS,
            BLOCK_K=triton.next_power_of_2(K - 1),
            num_warps=4,
        )
    return y_TC


def again(*_: Any) -> Callable[..., Tensor] | None:
    """Return the function that has fla-core's gradient; None where it is missing."""
    return _differentiable if is_there("fla.modules") else None


def _differentiable(*given: Any) -> Tensor:
    from fla.modules.causal_conv1d import causal_conv1d

    x_TC, weight_CK, bias_C, _, layout, activation = given
    x_1TC = rows_between(x_TC, 0, layout.num_tokens)[None]
    x_1TC = x_1TC if x_1TC.stride(-1) == 1 else x_1TC.contiguous()
    bounds = library_bounds(layout, x_TC.device)
    convolve = checked(causal_conv1d, x=2)
    y_1TC, _ = convolve(x_1TC, weight_CK.contiguous(), bias_C, activation=activation, **bounds)
    return pad_rows(y_1TC[0], layout)
