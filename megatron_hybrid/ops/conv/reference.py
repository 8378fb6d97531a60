"""Causal depthwise convolution over ragged sequences, with the tail of inputs as its state."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from megatron_hybrid.ops.activations import silu
from megatron_hybrid.ops.checks import compute_dtype, join, pad_rows, without_autocast
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.scan import ragged_scan
from megatron_hybrid.ops.to_device import to_device

ROWS = 64
"""Rows that a scan sums at once, to fit a CPU's cache."""


@without_autocast
def causal_conv1d(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    initial_states_RCk: torch.Tensor | None,
    layout: RaggedLayout,
    activation: str | None = "silu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute y[t, c] = activation(bias[c] + sum_j weight[c, j] x[t - (K - 1) + j, c]) by sequence.

    This function also takes states `[R, C, K - 1]`, and returns final and captured ones after y:
    see `in_slots`.

    Args:
        x_TC: inputs `[T, C]`.
        weight_CK: `[C, K]`, the last column meets the newest input; K at least 2.
        bias_C: `[C]` or None.
        initial_states_RCk: the K - 1 inputs before a sequence's next one, oldest first, as
            `SlotStates` `[C, K - 1]`; None starts from zeros and keeps nothing.
        layout: lengths and captures of the sequences (positions do not matter here).
        activation: "silu" or None.

    Returns:
        y `[T, C]` in the dtype of x, zeros in padding rows. Sums are fp32 (float64 for float64
        inputs). A tail is a copy of inputs, exact in the dtype of x.

    Raises:
        TypeError: inputs or tails that are not floating-point.
        ValueError: shapes that do not fit, an unknown activation, or fp16 tails of other inputs.
    """
    (C, K), R = weight_CK.shape, layout.num_sequences
    if initial_states_RCk is None:
        initial_states_RCk = x_TC.new_zeros((R, C, K - 1))
    y_TC, final_RCk, captured_nCk = ragged_scan(
        lambda *inputs: _step(weight_CK, bias_C, *inputs),
        lambda *inputs: _scan(weight_CK, bias_C, *inputs),
        (x_TC,),
        initial_states_RCk,
        layout,
        lambda: layout.cached(
            ("conv windows", K, x_TC.device), lambda: _windows(layout, K, x_TC.device)
        ),
        layout.num_singles,
    )
    if activation == "silu":
        y_TC = silu(y_TC)
    return pad_rows(y_TC.to(x_TC.dtype), layout), final_RCk, captured_nCk


def _step(
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    x_RC: torch.Tensor,
    tails_RCk: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one token for each of R sequences."""
    windows_RCK = torch.cat([tails_RCk, x_RC.unsqueeze(2)], dim=2)
    y_RC = _sums(windows_RCK.to(compute_dtype(x_RC)).unbind(2), weight_CK, bias_C)
    return y_RC, windows_RCK[:, :, 1:]


def _sums(
    x_K: Sequence[torch.Tensor], weight_CK: torch.Tensor, bias_C: torch.Tensor | None
) -> torch.Tensor:
    """Sum over K inputs `[T, C]`, oldest first, in one order for steps and for scans."""
    *weights, weight_C = weight_CK.to(x_K[0].dtype).t().contiguous()
    *older, newest_TC = x_K
    y_TC = newest_TC * weight_C
    for x_TC, weight_C in zip(older, weights, strict=True):
        y_TC.addcmul_(x_TC, weight_C)
    return y_TC if bias_C is None else y_TC.add_(bias_C)


def _windows(
    layout: RaggedLayout, K: int, device: torch.device
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Lay out the sequences after the leading single tokens, each preceded by its tail: row t of
    sequence r becomes row t + (r + 1)(K - 1). Return their lengths, and the rows of the tails after
    them, `[R, k]`, and at captures, `[n, k]`."""
    first = layout.num_singles
    ends = [(layout.cu_seqlens[r + 1], r) for r in range(first, layout.num_sequences)]
    captures = zip(layout.captures, layout.capture_sequences, strict=True)

    def rows(ends_owners):
        ends = [end + owner * (K - 1) for end, owner in ends_owners if owner >= first]
        return to_device(np.reshape(ends, (-1, 1)) - first * K + np.arange(K - 1), device)

    return layout.lengths[first:], rows(ends), rows(captures)


def _scan(
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    x_TC: torch.Tensor,
    tails_RCk: torch.Tensor,
    windows: tuple[list[int], torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run all sequences, after their tails, as one convolution."""
    lengths, *ends = windows
    pieces = []
    for tail_kC, x_seq in zip(tails_RCk.mT, x_TC.split(lengths), strict=True):
        pieces += [tail_kC, x_seq]
    x_EC = torch.cat(pieces)
    y_EC = _Convolved.apply(x_EC.to(compute_dtype(x_EC)), weight_CK, bias_C)
    # Windows that reach into the next sequence's tail lie between those that are kept.
    gap = weight_CK.shape[1] - 1
    sizes = [size for length in lengths for size in (length, gap)][:-1]
    y_TC = join(y_EC.split(sizes)[::2])
    final_RCk, captured_nCk = (x_EC[rows].transpose(1, 2) for rows in ends)
    return y_TC, final_RCk, captured_nCk


class _Convolved(torch.autograd.Function):
    """The sums of a decode over each row and those before it, with the gradient of torch's
    convolution."""

    @staticmethod
    def forward(ctx, x_EC, weight_CK, bias_C):
        ctx.save_for_backward(x_EC, weight_CK, bias_C)
        gap = weight_CK.shape[1] - 1
        blocks = [
            [x_EC[first + j : min(first + ROWS, len(x_EC) - gap) + j] for j in range(gap + 1)]
            for first in range(0, len(x_EC) - gap, ROWS)
        ]
        return join([_sums(block, weight_CK, bias_C) for block in blocks])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_EC):
        x_EC, weight_CK, bias_C = ctx.saved_tensors
        # As a 2-d convolution over a channels-last image of width 1: [E, C] is that layout as it
        # is, and its depthwise kernels are several times faster than those of conv1d on [C, E].
        image, kernel = x_EC[None, :, None].permute(0, 3, 1, 2), weight_CK[:, None, :, None]
        grad = grad_EC[None, :, None].permute(0, 3, 1, 2)
        C, wanted = x_EC.shape[1], [True, True, bias_C is not None]
        settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], C, wanted)
        grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
            grad, image, kernel.to(image.dtype), [C], *settings
        )
        grad_weight = grad_weight[:, 0, :, 0].to(weight_CK.dtype)
        grad_bias = None if bias_C is None else grad_bias.to(bias_C.dtype)
        return grad_x[0, :, :, 0].t(), grad_weight, grad_bias
