"""Collectives over tensor- and expert-parallel ranks that run on any device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from megatron_hybrid.models.sharding.tensor_sharding import cut_of


def gather_last_dim(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate every rank's `x` along the last dimension; same result on all ranks.

    Differentiable: each rank's gradient is its own part, as all ranks compute the same with the
    result. (core's function of this kind puts its result on a CUDA device.)
    """
    return x if group.size() == 1 else _GatherLastDim.apply(x, group)


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        pieces = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(pieces, x, group=group)
        return torch.cat(pieces, -1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


# torch renamed both in 2.13, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_rows(x_Th: Tensor, group: dist.ProcessGroup, *, whole_gradient: bool = False) -> Tensor:
    """Every rank's rows one after the other, [T / ranks, ...] -> [T, ...].

    Args:
        whole_gradient: whether all ranks compute the same with all rows, so that each has the whole
            gradient of its own; else the gradients of all ranks are summed.
    """
    return _GatherRows.apply(x_Th, group, whole_gradient)


def split_rows(x_Th: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of an `x_Th` that all ranks have, [T, ...] -> [T / ranks, ...]; gradients
    are gathered."""
    return _SplitRows.apply(x_Th, group)


def sum_and_split_rows(x_Th: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum of every rank's `x_Th`, [T, ...] -> [T / ranks, ...]; gradients
    are gathered."""
    return _SumAndSplitRows.apply(x_Th, group)


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    output = x.new_empty((group.size() * len(x), *x.shape[1:]))
    _all_gather(output, x.contiguous(), group=group)
    return output


def _own_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size())[group.rank()]


def _own_rows_of_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    output = x.new_empty((len(x) // group.size(), *x.shape[1:]))
    _reduce_scatter(output, x.contiguous(), group=group)
    return output


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, whole_gradient: bool) -> Tensor:
        ctx.group, ctx.whole_gradient = group, whole_gradient
        return _gathered(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        own = _own_rows if ctx.whole_gradient else _own_rows_of_sum
        return own(gradient, ctx.group), None, None


class _SplitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_rows(x, group).clone()  # a view would keep all rows in memory

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.group), None


class _SumAndSplitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_rows_of_sum(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.group), None


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of every rank's `x`, which is overwritten.

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
    return _AllToAll.apply(x, list(sent), list(received), group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        y = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return all_to_all(gradient, received, sent, ctx.group), None, None, None


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
