"""Causal depthwise convolution over ragged sequences, with the tail of inputs as its state."""

from __future__ import annotations

import torch

from megatron_hybrid.ops.conv import reference
from megatron_hybrid.ops.kernels import TRITON, kernel_backend
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.slot_states import SlotOp, SlotStates

_causal_conv1d = SlotOp(
    "causal_conv1d",
    reference.causal_conv1d,
    {"x_TC": "T C", "weight_CK": "C K", "bias_C": "C or None"},
    state="float C K-1",
    conditions={
        "K > 1": "weight_CK has K = {K} columns; a causal convolution needs at least 2",
        "activation in ('silu', None)": "activation is {activation!r}; choose 'silu' or None",
        "x_TC.dtype == torch.float16 or pool_S is None or pool_S.dtype != torch.float16": "pool_S "
        "is float16 but x_TC is {x_TC.dtype}: a tail holds inputs, and float16 rounds and "
        "overflows them",
    },
)
_causal_conv1d.register(
    kernel_backend("triton", "megatron_hybrid.ops.conv.triton", TRITON, priority=10)
)


def causal_conv1d(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    states: SlotStates | None,
    layout: RaggedLayout,
    activation: str | None = "silu",
) -> torch.Tensor:
    """y[t, c] = activation(bias[c] + sum_j weight[c, j] x[t - (K - 1) + j, c]), for each sequence.

    Args:
        x_TC: inputs `[T, C]`.
        weight_CK: `[C, K]`, the last column meets the newest input; K at least 2.
        bias_C: `[C]` or None.
        states: the K - 1 inputs before a sequence's next one, oldest first, `[C, K - 1]` per slot;
            None: start from zeros and keep nothing.
        layout: lengths and captures of the sequences (positions do not matter here).
        activation: "silu" or None.

    Returns:
        y `[T, C]` in the dtype of x, zeros in padding rows. Sums are fp32 (float64 for float64
        inputs). A tail is a copy of inputs, exact in the dtype of x.

    Raises:
        TypeError: inputs or tails that are not floating-point.
        ValueError: shapes that do not fit, an unknown activation, or fp16 tails of other inputs.
    """
    return _causal_conv1d(x_TC, weight_CK, bias_C, states, layout, activation)
