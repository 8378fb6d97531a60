"""Products by slots in plain torch: one for each slot that has rows."""

import torch
from torch import Tensor

from megatron_hybrid.ops.linear import linear


def slot_linear(x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """Multiply each row by the matrix of its slot.

    Args:
        x: `[T, C]`.
        weights: `[S, O, C]`, in the dtype of x.
        slots: `[T]`, int; a row with a number below 0 is not multiplied.

    Returns:
        `[T, O]`, in the dtype of x; 0 in rows that are not multiplied.
    """
    y = x.new_zeros(len(x), weights.shape[1])
    for slot in slots.unique().tolist():
        if slot >= 0:
            rows = torch.nonzero(slots == slot)[:, 0]
            y.index_copy_(0, rows, linear(x.index_select(0, rows), weights[slot]))
    return y
