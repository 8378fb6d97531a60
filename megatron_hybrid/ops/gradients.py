"""Gradients of kernels without a backward pass: another function computes the op again for them.

So the forward pass of training is that of inference, to the bit, and of an op its inputs alone are
kept.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def are_wanted(inputs: tuple) -> bool:
    """Return whether autograd is to record a function of these inputs."""
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(one, Tensor) and one.requires_grad for one in inputs)


def with_gradient(run: Callable[..., Any], again: Callable[..., Any], inputs: tuple) -> Any:
    """Return `run(*inputs)`, a tensor or a tuple of tensors and None, with the gradient of `again`,
    which computes the same in the backward pass."""
    return _Again.apply(run, again, *inputs)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, again, *inputs):
        tensors = [one if isinstance(one, Tensor) else None for one in inputs]
        ctx.save_for_backward(*tensors)
        ctx.again = again
        ctx.others = [one if own is None else None for one, own in zip(inputs, tensors)]
        ctx.set_materialize_grads(False)
        return run(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        needed = ctx.needs_input_grad[2:]
        inputs = [
            other if tensor is None else tensor.detach().requires_grad_(need)
            for tensor, other, need in zip(ctx.saved_tensors, ctx.others, needed, strict=True)
        ]
        with torch.enable_grad():
            outputs = ctx.again(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [one for one, need in zip(inputs, needed) if need]
        known = [pair for pair in zip(outputs, gradients, strict=True) if pair[1] is not None]
        if not known:
            return (None,) * (2 + len(needed))
        outputs, gradients = zip(*known)
        found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))
        return (None, None, *(next(found) if need else None for need in needed))
