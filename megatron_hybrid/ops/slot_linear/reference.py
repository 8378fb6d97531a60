"""Products by slots in plain torch: one for each slot that has rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.ops.ragged import ROW_ALIGNMENT


def slot_linear(x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """Multiply each row by the matrix of its slot.

    Args:
        x: `[T, C]`.
        weights: `[S, O, C]`, in the dtype of x.
        slots: `[T]`, int; below 0: the row is not multiplied.

    Returns:
        `[T, O]`, in the dtype of x; 0 in rows that are not multiplied.
    """
    y = x.new_zeros(len(x), weights.shape[1])
    for slot in slots.unique().tolist():
        if slot >= 0:
            rows = torch.nonzero(slots == slot)[:, 0]
            # A product of so many rows gives each the bits that it has among any others.
            own = F.pad(x.index_select(0, rows), (0, 0, 0, -len(rows) % ROW_ALIGNMENT))
            y.index_copy_(0, rows, F.linear(own, weights[slot])[: len(rows)])
    return y
