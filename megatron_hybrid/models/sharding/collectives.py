"""Collectives over the tensor-parallel ranks that run on any device."""

from __future__ import annotations

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
