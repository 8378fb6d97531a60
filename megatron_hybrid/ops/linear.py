"""Products with a weight; on a CPU a row has the same bits among any number of rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.ops.ragged import ROW_ALIGNMENT

_DTYPES: tuple[torch.dtype, ...] = ()
"""Dtypes whose products oneDNN has on this machine."""
if torch.backends.mkldnn.is_available():
    _onednn = torch.ops.mkldnn._linear_pointwise.default
    takes_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    _DTYPES = (torch.float32, torch.bfloat16) if takes_bf16 else (torch.float32,)


class _Linear(torch.autograd.Function):
    """oneDNN's product, which torch has no derivative of."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return _onednn(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            gradient @ weight if needs_x else None,
            gradient.mT @ x if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + b, `[..., in] -> [..., out]`. Differentiable, but for a `reordered` weight.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`, in the dtype of x.
        bias: `[out]` or None.
    """
    if not x.is_cpu or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    if x.dim() != 2:
        rows = linear(x.reshape(-1, x.shape[-1]), weight, bias)
        return rows.view(*x.shape[:-1], weight.shape[0])  # not -1: there may be no row
    if x.dtype not in _DTYPES:
        return F.linear(full_rows(x), weight, bias)[: len(x)]
    if x.shape[0] == 1:  # another kernel's bits
        return linear(torch.cat((x, x)), weight, bias)[:1]
    if weight.shape[0] == 1:  # as well
        bias = None if bias is None else bias.repeat(2)
        return linear(x, weight.repeat(2, 1), bias)[:, :1]
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)
    return _onednn(x, weight, bias, "none", [], "")


def full_rows(x: Tensor) -> Tensor:
    """Append rows of zeros to x `[T, ...]` up to a multiple of `ROW_ALIGNMENT`: MKL's products, and
    many of a GPU, round a row otherwise among fewer."""
    missing = -len(x) % ROW_ALIGNMENT
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def can_reorder(weight: Tensor) -> bool:
    """Return whether `reordered` makes a copy; not of a part of a tensor, which has other bits, nor
    of few outputs, which take up to 64 times their bytes."""
    is_whole = weight.is_contiguous() and weight.shape[0] >= 16
    return weight.is_cpu and weight.dtype in _DTYPES and is_whole


def reordered(weight: Tensor) -> Tensor:
    """Return a weight `[out, in]` in the layout that `linear` reads fastest: with equal results,
    those of few rows in as little as half the time."""
    if not can_reorder(weight):
        return weight
    # From 8 rows on, the layout for so many is that for any number.
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 64)
