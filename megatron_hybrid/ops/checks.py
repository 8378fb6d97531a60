"""The precision rule, and what else the references of ops share."""

import functools
from collections.abc import Iterator

import torch
from torch.autograd import forward_ad

from megatron_hybrid.ops.ragged import RaggedLayout


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return float32, or float64 for float64 inputs (used only to check gradients)."""
    return torch.promote_types(x.dtype, torch.float32)


def has_tangent(x: torch.Tensor) -> bool:
    """Return whether torch computes a derivative in forward mode along `x`."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def without_autocast(op):
    """Run `op` outside autocast, which would run its fp32 matmuls in bf16."""

    @functools.wraps(op)
    def wrapper(*args, **kwargs):
        device_type = (args[0] if args else next(iter(kwargs.values()))).device.type
        if not torch.is_autocast_enabled(device_type):
            return op(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return op(*args, **kwargs)

    return wrapper


def rows_between(x_T: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Return `x_T[first:end]`, or the tensor itself if that is all of it: a slice costs a copy in
    backward."""
    return x_T if (first, end) == (0, x_T.shape[0]) else x_T[first:end]


def tokens_of(
    layout: RaggedLayout, dtype: torch.dtype, *tensors_T: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Take tensors without padding rows, whose gradients may be NaN in them, in a dtype."""
    return (rows_between(each, 0, layout.num_tokens).to(dtype) for each in tensors_T)


def pad_rows(y_T: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """Append the layout's padding rows, as zeros."""
    if not layout.num_padding:
        return y_T
    return torch.cat((y_T, y_T.new_zeros(layout.num_padding, *y_T.shape[1:])))


def join(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenate tensors, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
