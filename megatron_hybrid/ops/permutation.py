"""Permutation of rows and its inverse, both with gathers as gradients."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch


class Permutation:
    """A fixed order of rows and its inverse; the identity costs nothing."""

    def __init__(self, order: np.ndarray, device: torch.device | str) -> None:
        self.is_identity = np.array_equal(order, np.arange(len(order)))
        if not self.is_identity:
            self._order = torch.tensor(order, device=device)
            self._inverse = torch.tensor(np.argsort(order), device=device)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_identity else _Reorder.apply(x, self._order, self._inverse)

    def invert(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_identity else _Reorder.apply(x, self._inverse, self._order)


class _Reorder(torch.autograd.Function):
    """`x[order]` for a permutation: its gradient is a gather, not a sum into zeros."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.orders = order, inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        order, inverse = ctx.orders
        return _Reorder.apply(grad, inverse, order), None, None


class Waves:
    """Items of sequences as a recurrence takes them: the first ones of all, then the second ones.

    The sequences lie longest first, so that those alive in a wave are a prefix of those of the wave
    before (as in torch's PackedSequence). Items are numbered sequence by sequence.
    """

    def __init__(self, counts: Sequence[int], device: torch.device | str) -> None:
        order = np.argsort(np.negative(counts), kind="stable")
        firsts = [0, *accumulate(counts)]
        waves_of_items = np.arange(firsts[-1]) - np.repeat(firsts[:-1], counts)
        items = np.lexsort((np.repeat(np.argsort(order), counts), waves_of_items))
        self.sizes: list[int] = np.bincount(waves_of_items).tolist()
        """Number of sequences with an item in wave j."""
        self.places: np.ndarray = np.argsort(items)
        """Place of each item in the order of waves."""
        self.items = Permutation(items, device)
        self.sequences = Permutation(order, device)
