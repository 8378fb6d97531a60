"""Causal depthwise convolution over ragged sequences, with the tail of inputs as its state."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_hybrid.ops.checks import check_rows, check_shape, compute_dtype, pad_rows
from megatron_hybrid.ops.ragged import RaggedLayout, index_tensor


def causal_conv1d(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    initial_states_RCk: torch.Tensor | None,
    layout: RaggedLayout,
    activation: str | None = "silu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y[t, c] = activation(bias[c] + sum_j weight[c, j] x[t - (K - 1) + j, c]), for each sequence.

    Args:
        x_TC: inputs `[T, C]`.
        weight_CK: `[C, K]`, the last column meets the newest input; K at least 2.
        bias_C: `[C]` or None.
        initial_states_RCk: the K - 1 inputs before each sequence's first, oldest first,
            `[R, C, K - 1]`; None for zeros. Never written.
        layout: lengths and captures of the sequences (positions do not matter here).
        activation: "silu" or None.

    Returns:
        y `[T, C]` (zeros in padding rows), the final tails `[R, C, K - 1]` and the captured tails
        `[n, C, K - 1]`, all in the dtype of x. Sums are fp32 (float64 for float64 inputs). A tail
        is a copy of inputs, so it loses nothing in the dtype of x.

    Raises:
        TypeError: inputs that are not floating-point, or tails in fp16 beside other inputs.
        ValueError: shapes that do not fit, or an unknown activation.
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
        meaning = "[R, C, K - 1]"
        check_shape("initial_states of causal_conv1d", initial_states_RCk, (R, C, K - 1), meaning)
        tails_RkC = initial_states_RCk.to(x_TC.dtype).transpose(1, 2)

    # Each sequence behind its tail: row t of sequence r becomes row t + (r + 1)(K - 1).
    num_steps, cu = layout.num_steps, layout.cu_seqlens
    x_scan = x_TC[num_steps : layout.num_tokens]
    pieces = [torch.cat([tails_RkC[:num_steps], x_TC[:num_steps, None]], dim=1).flatten(0, 1)]
    for r, x_seq in enumerate(x_scan.split(layout.lengths[num_steps:]), start=num_steps):
        pieces += [tails_RkC[r], x_seq]
    extended = torch.cat(pieces)

    dtype = compute_dtype(x_TC)
    y_ext = _windows(extended.to(dtype), weight_CK.to(dtype), bias_C)
    keep = [y_ext[: num_steps * K : K]] if num_steps else []
    keep += [y_ext[cu[r] + r * (K - 1) : cu[r + 1] + r * (K - 1)] for r in range(num_steps, R)]
    y_TC = torch.cat(keep)
    if activation == "silu":
        y_TC = F.silu(y_TC)

    def tails_after(counts, owners):
        ends = [count + (r + 1) * (K - 1) for count, r in zip(counts, owners, strict=True)]
        rows = index_tensor([range(end - (K - 1), end) for end in ends], x_TC.device)
        return extended[rows.view(-1, K - 1)].transpose(1, 2)

    final_RCk = tails_after(cu[1:], range(R))
    captured_nCk = tails_after(layout.captures, layout.capture_sequences)
    return pad_rows(y_TC.to(x_TC.dtype), layout), final_RCk, captured_nCk


def _windows(x_EC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None):
    """Output of each full window of K rows, `[E - K + 1, C]`."""
    K = weight_CK.shape[1]
    size = len(x_EC) - K + 1
    y_EC = x_EC[:size] * weight_CK[:, 0]
    if bias_C is not None:
        y_EC = y_EC + bias_C.to(x_EC.dtype)
    for j in range(1, K):
        y_EC.addcmul_(x_EC[j : j + size], weight_CK[:, j])
    return y_EC
