"""The selective scan of Mamba-1 (Gu and Dao 2023, arXiv 2312.00752, equation 2)."""

from __future__ import annotations

import torch

from megatron_hybrid.ops.kernels import TRITON, kernel_backend
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.selective_scan import reference
from megatron_hybrid.ops.slot_states import SlotOp, SlotStates

_selective_scan = SlotOp(
    "selective_scan",
    reference.selective_scan,
    {
        **{"x_TC": "T C", "dt_TC": "T C", "A_CN": "C N", "B_TN": "T N", "C_TN": "T N"},
        "D_C": "C or None",
    },
    state="state C N",
    conditions={"chunk_size > 0": "chunk_size is {chunk_size}; it must be at least 1"},
)
_selective_scan.register(
    kernel_backend("triton", "megatron_hybrid.ops.selective_scan.triton", TRITON, priority=10)
)


def selective_scan(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    A_CN: torch.Tensor,
    B_TN: torch.Tensor,
    C_TN: torch.Tensor,
    D_C: torch.Tensor | None,
    states: SlotStates | None,
    layout: RaggedLayout,
    chunk_size: int = 32,
) -> torch.Tensor:
    """h_t = exp(dt_t A) h_{t-1} + (dt_t x_t) (x) B_t;  y_t = h_t C_t + D x_t, for each sequence.

    Each channel of each state has its own decay, so there is no form by matrix products as for
    Mamba-2. The plain recurrence runs over one row of all sequences at a time: it needs each
    exponential once (all at most 1), a scan in chunks would need them twice. So outputs do not
    depend on how a sequence is cut into calls.

    Args:
        x_TC: values `[T, C]`.
        dt_TC: step sizes `[T, C]`, after softplus and bias.
        A_CN: `[C, N]`, negative.
        B_TN, C_TN: `[T, N]`.
        D_C: skip connection `[C]` or None.
        states: fp32 or bf16 `[C, N]` per slot; None: start from zeros and keep nothing.
        layout: lengths and captures of the sequences (positions do not matter here).
        chunk_size: the backward keeps every `chunk_size`-th state of a sequence and computes those
            between again; the result does not depend on it.

    Returns:
        y `[T, C]` in the dtype of x, zeros in padding rows. All arithmetic is fp32, whatever the
        inputs are (float64 for float64 inputs). Captures change neither y nor the states in any
        bit. Differentiable once.

    Raises:
        TypeError: fp16 states, or inputs that are not floating-point.
        ValueError: shapes that do not fit the layout or each other, or chunk_size below 1.
    """
    return _selective_scan(x_TC, dt_TC, A_CN, B_TN, C_TN, D_C, states, layout, chunk_size)
