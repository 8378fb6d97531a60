"""as_tokens: checks the prompts that callers pass in."""

from __future__ import annotations

import numpy as np


def as_tokens(tokens: np.ndarray) -> np.ndarray:
    """Return tokens as int32 [L], L >= 1. Raises ValueError otherwise."""
    array = np.asarray(tokens)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise ValueError(
            f"tokens have shape {array.shape} and type {array.dtype}; a prompt is a "
            f"one-dimensional array of at least one integer"
        )
    if array.dtype == np.int32:
        return array
    narrow = array.astype(np.int32)
    if not np.array_equal(narrow, array):  # after a wrap, two tokens would be equal
        raise ValueError(
            f"tokens reach from {array.min()} to {array.max()}; they must fit in int32"
        )
    return narrow
