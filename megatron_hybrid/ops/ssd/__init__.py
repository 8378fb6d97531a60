"""The state-space scan of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs")."""

from __future__ import annotations

import torch

from megatron_hybrid.ops.kernels import TRITON, kernel_backend
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.slot_states import SlotOp, SlotStates
from megatron_hybrid.ops.ssd import reference

_ssd_scan = SlotOp(
    "ssd_scan",
    reference.ssd_scan,
    {
        **{"x_THP": "T H P", "dt_TH": "T H", "A_H": "H", "B_TGN": "T G N", "C_TGN": "T G N"},
        "D_H": "H or None",
    },
    state="state H P N",
    conditions={
        "G and H % G == 0": "{H} heads cannot be shared out evenly to {G} groups of B and C",
        "chunk_size > 0": "chunk_size is {chunk_size}; it must be at least 1",
    },
    has_steps_in_place=True,
)
_ssd_scan.register(
    kernel_backend(
        "mcore",
        "megatron_hybrid.ops.ssd.mcore",
        TRITON | {"megatron.core.ssm.ops.intermediate_extraction": "megatron-core>=0.19"},
        priority=10,
    )
)


def ssd_scan(
    x_THP: torch.Tensor,
    dt_TH: torch.Tensor,
    A_H: torch.Tensor,
    B_TGN: torch.Tensor,
    C_TGN: torch.Tensor,
    D_H: torch.Tensor | None,
    states: SlotStates | None,
    layout: RaggedLayout,
    chunk_size: int = 64,
) -> torch.Tensor:
    """S_t = exp(dt_t A) S_{t-1} + dt_t x_t (x) B_t;  y_t = S_t C_t + D x_t, for each sequence.

    Args:
        x_THP: values `[T, H, P]`.
        dt_TH: step sizes `[T, H]`, after softplus and bias.
        A_H: `[H]`, negative.
        B_TGN, C_TGN: `[T, G, N]`; each group serves H / G consecutive heads.
        D_H: skip connection `[H]` or None.
        states: fp32 or bf16 `[H, P, N]` per slot; None: start from zeros and keep nothing.
        layout: lengths, positions and captures of the sequences.
        chunk_size: rows of a chunk; the result does not depend on it but for rounding.

    Returns:
        y `[T, H, P]` in the dtype of x, zeros in padding rows. All arithmetic is fp32, whatever the
        inputs are (float64 for float64 inputs). Captures change neither y nor the states
        in any bit.

    Raises:
        TypeError: fp16 states, or inputs that are not floating-point.
        ValueError: shapes that do not fit the layout or each other.
    """
    return _ssd_scan(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, states, layout, chunk_size)
