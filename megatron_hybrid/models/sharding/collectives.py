"""Collectives over the tensor-parallel ranks that run on any device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


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
