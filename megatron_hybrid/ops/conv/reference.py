"""Causal depthwise convolution over ragged sequences, with the tail of inputs as its state."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_hybrid.ops.checks import (
    check_rows,
    check_shape,
    compute_dtype,
    join,
    pad_rows,
    rows_between,
    without_autocast,
)
from megatron_hybrid.ops.ragged import RaggedLayout


@without_autocast
def causal_conv1d(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    initial_states_RCk: torch.Tensor | None,
    layout: RaggedLayout,
    activation: str | None = "silu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ops.causal_conv1d` as a function of initial tails `[R, C, K - 1]`, None for zeros.

    Returns:
        Outputs, final tails and captured tails, all in the dtype of x.
    """
    check_rows("x", x_TC, layout)
    check_shape("x", x_TC, (layout.num_rows, None), "[T, C]")
    C = x_TC.shape[1]
    check_shape("weight", weight_CK, (C, None), "[C, K]")
    K = weight_CK.shape[1]
    if K < 2:
        raise ValueError(f"weight has K = {K} columns; a causal convolution needs at least 2")
    if bias_C is not None:
        check_shape("bias", bias_C, (C,), "[C]")
    if activation not in ("silu", None):
        raise ValueError(f"activation is {activation!r}; choose 'silu' or None")
    R = layout.num_sequences
    if initial_states_RCk is None:
        tails_RkC = x_TC.new_zeros((R, K - 1, C))
    else:
        if initial_states_RCk.dtype == torch.float16 and x_TC.dtype != torch.float16:
            raise TypeError(
                f"initial_states of causal_conv1d are float16 but x is {x_TC.dtype}: a tail holds "
                f"inputs, and float16 rounds and overflows them. Keep it in {x_TC.dtype}"
            )
        if not initial_states_RCk.is_floating_point():
            raise TypeError(
                f"initial_states of causal_conv1d have dtype {initial_states_RCk.dtype}; "
                f"use {x_TC.dtype}"
            )
        meaning = "[R, C, K - 1]"
        check_shape("initial_states of causal_conv1d", initial_states_RCk, (R, C, K - 1), meaning)
        tails_RkC = initial_states_RCk.to(x_TC.dtype).transpose(1, 2)

    x_TC = rows_between(x_TC, 0, layout.num_tokens)
    extended_EC = _behind_tails(x_TC, tails_RkC, layout)
    y_EC = _windows(extended_EC, weight_CK, bias_C)
    # Windows that reach into the next sequence's tail lie between those that are kept.
    num_steps = layout.num_steps
    sizes = [size for length in layout.lengths[num_steps:] for size in (length, K - 1)][:-1]
    if num_steps:
        y_steps, *y_scan = y_EC.split([len(y_EC) - sum(sizes), *sizes])
        y_TC = join([y_steps[::K], *y_scan[::2]])
    else:
        y_TC = join(y_EC.split(sizes)[::2])
    if activation == "silu":
        y_TC = F.silu(y_TC)

    rows_Rk, rows_nk = layout.cached(
        ("conv tails", K, x_TC.device), lambda: _tail_rows(layout, K, x_TC.device)
    )
    final_RCk, captured_nCk = (extended_EC[rows].transpose(1, 2) for rows in (rows_Rk, rows_nk))
    return pad_rows(y_TC.to(x_TC.dtype), layout), final_RCk, captured_nCk


def _behind_tails(
    x_TC: torch.Tensor, tails_RkC: torch.Tensor, layout: RaggedLayout
) -> torch.Tensor:
    """Each sequence behind its tail: row t of sequence r becomes row t + (r + 1)(K - 1)."""
    num_steps = layout.num_steps
    x_steps, *x_scan = x_TC.split([num_steps, *layout.lengths[num_steps:]])
    pieces = [torch.cat([tails_RkC[:num_steps], x_steps.unsqueeze(1)], dim=1).flatten(0, 1)]
    for r, x_seq in enumerate(x_scan, start=num_steps):
        pieces += [tails_RkC[r], x_seq]
    return torch.cat(pieces)


def _tail_rows(
    layout: RaggedLayout, K: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows behind the tails that are the new tails: final `[R, k]`, captured `[n, k]`."""

    def rows(counts, owners):
        ends = [count + (r + 1) * (K - 1) for count, r in zip(counts, owners, strict=True)]
        first_n1 = torch.tensor(ends, dtype=torch.int64, device=device).unsqueeze(1) - (K - 1)
        return first_n1 + torch.arange(K - 1, device=device)

    return (
        rows(layout.cu_seqlens[1:], range(layout.num_sequences)),
        rows(layout.captures, layout.capture_sequences),
    )


def _windows(
    x_EC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None
) -> torch.Tensor:
    """Sum of each full window of K rows, `[E - K + 1, C]`, in the compute dtype.

    As a 2-d convolution over a channels-last image of width 1: `[E, C]` is that layout as it is,
    and its depthwise kernels are several times faster than those of conv1d on `[C, E]`.
    """
    dtype = compute_dtype(x_EC)
    y_1CE1 = F.conv2d(
        x_EC.to(dtype)[None, :, None].permute(0, 3, 1, 2),
        weight_CK.to(dtype)[:, None, :, None],
        None if bias_C is None else bias_C.to(dtype),
        groups=x_EC.shape[1],
    )
    return y_1CE1[0, :, :, 0].t()
