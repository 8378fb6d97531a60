"""Collectives over tensor- and expert-parallel ranks that run on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from megatron_hybrid.models.sharding.tensor_sharding import cut_of

_Exchange = Callable[[Tensor, dist.ProcessGroup], Tensor]
"""A collective of this rank's tensor over a group."""


class _Differentiable(torch.autograd.Function):
    """A collective whose gradient comes by another one."""

    @staticmethod
    def forward(
        ctx, x: Tensor, group: dist.ProcessGroup, there: _Exchange, back: _Exchange
    ) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradient, ctx.group), None, None, None


def gather_last_dim(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate every rank's `x` along the last dimension; same result on all ranks.

    Differentiable: each rank's gradient is its own part, as all ranks compute the same with the
    result. (core's function of this kind puts its result on a CUDA device.)
    """

    def own_part(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
        return gradient.chunk(group.size(), -1)[group.rank()]

    return x if group.size() == 1 else _Differentiable.apply(x, group, _all_columns, own_part)


def _all_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return torch.cat(gather_pieces(x.contiguous(), group), -1)


def gather_pieces(piece: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather every rank's `piece`, which is contiguous and of the same shape on all of them."""
    if group.size() == 1:
        return [piece]
    # Not all backends have floats of 8 bits.
    sent = piece.view(torch.uint8) if piece.element_size() == 1 else piece
    pieces = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(pieces, sent, group=group)
    return [each.view(piece.dtype) for each in pieces]


# torch renamed both in 2.13, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_rows(x_Th: Tensor, group: dist.ProcessGroup, *, whole_gradient: bool = False) -> Tensor:
    """Gather every rank's rows one after the other, [T / ranks, ...] -> [T, ...].

    Args:
        whole_gradient: whether all ranks compute the same with all rows, so that each has the whole
            gradient of its own; else the gradients of all ranks are summed.
    """
    back = _own_rows if whole_gradient else _own_rows_of_sum
    return _Differentiable.apply(x_Th, group, _all_rows, back)


def split_rows(x_Th: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Take this rank's rows of an `x_Th` that all ranks have, [T, ...] -> [T / ranks, ...];
    gradients are gathered."""
    return _Differentiable.apply(x_Th, group, _own_rows, _all_rows)


def sum_and_split_rows(x_Th: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Take this rank's rows of the sum of every rank's `x_Th`, [T, ...] -> [T / ranks, ...];
    gradients are gathered."""
    return _Differentiable.apply(x_Th, group, _own_rows_of_sum, _all_rows)


def _all_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    output = x.new_empty((group.size() * len(x), *x.shape[1:]))
    _all_gather(output, x.contiguous(), group=group)
    return output


def _own_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A view would keep all rows in memory.
    return x.chunk(group.size())[group.rank()].clone()


def _own_rows_of_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    output = x.new_empty((len(x) // group.size(), *x.shape[1:]))
    _reduce_scatter(output, x.contiguous(), group=group)
    return output


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum every rank's `x`, which is overwritten.

    Differentiable: each rank computes something of its own with the sum, so gradients are summed,
    too.
    """
    total = reduce_from_tensor_model_parallel_region(x, group)
    return copy_to_tensor_model_parallel_region(total, group)


def sum_gradient_of_copies(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Sum the gradient of those blocks of a parameter of which several ranks hold a piece (see
    `Cut`) over these ranks, each of which applies it to its own heads only."""
    cut = cut_of(parameter)
    copied = cut.copied()
    if copied is None:
        return
    chosen = [copies > 1 for copies in cut.copies]

    def add_other_ranks(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        blocks = compress(gradient.split(cut.local_sections, cut.dim), chosen)
        # Each distinct piece has a place of its own, so one sum serves all ranks.
        shape = list(gradient.shape)
        shape[cut.dim] = copied.size
        buffer = gradient.new_zeros(shape)
        places = [buffer.narrow(cut.dim, a, b - a) for a, b in copied.ranges(group.rank())]
        pairs = list(zip(blocks, places))
        for block, place in pairs:
            place.copy_(block)
        dist.all_reduce(buffer, group=group)
        for block, place in pairs:
            block.copy_(place)
        return gradient

    parameter.register_hook(add_other_ranks)


def all_to_all(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send consecutive rows of `x` to each rank; returns the rows from each rank, in rank order.

    Differentiable: gradients travel back. All ranks call it, those without rows too.

    Args:
        x: [sum(sent), ...].
        sent: rows for each rank of the group.
        received: rows from each rank.
    """
    sent, received = list(sent), list(received)
    there, back = partial(_exchange, sent, received), partial(_exchange, received, sent)
    return _Differentiable.apply(x, group, there, back)


def _exchange(sent: list[int], received: list[int], x: Tensor, group: dist.ProcessGroup) -> Tensor:
    y = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
    return y


def sum_gradient_over_ranks(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Sum the gradient of a replicated parameter over the ranks, each of which applies it to its
    own heads only.

    (core's `finalize_model_grads` does the same for the query and key norms of attention: do not
    pass these.)
    """
    if group.size() == 1:
        return

    def add_other_ranks(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    parameter.register_hook(add_other_ranks)
