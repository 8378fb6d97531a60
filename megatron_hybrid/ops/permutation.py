"""Permutation of rows and its inverse, both with gathers as gradients."""

from __future__ import annotations

import torch


class Permutation:
    """A fixed order of rows and its inverse; the identity costs nothing."""

    def __init__(self, order: list[int], device: torch.device | str) -> None:
        self.is_identity = order == list(range(len(order)))
        if not self.is_identity:
            inverse = sorted(range(len(order)), key=order.__getitem__)
            self._order = torch.tensor(order, device=device)
            self._inverse = torch.tensor(inverse, device=device)

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
