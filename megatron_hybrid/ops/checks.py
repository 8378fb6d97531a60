"""Checks of arguments and the precision rule that the ops share."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from megatron_hybrid.ops.ragged import RaggedLayout


def check_shape(name: str, x: torch.Tensor, shape: tuple[int | None, ...], meaning: str) -> None:
    """Raise ValueError unless `x` has `shape` (None: any size); `meaning` spells the shape."""
    sizes = x.shape
    if len(sizes) == len(shape):
        for have, want in zip(sizes, shape):
            if want is not None and have != want:
                break
        else:
            return
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    raise ValueError(f"{name} has shape {list(sizes)}, expected {meaning} = [{wanted}]")


def check_rows(name: str, x: torch.Tensor, layout: RaggedLayout) -> None:
    """Raise unless `x` is a floating tensor with one row per row of the layout."""
    if not x.is_floating_point():
        raise TypeError(f"{name} has dtype {x.dtype}; give a floating-point tensor")
    if x.dim() < 2 or x.shape[0] != layout.num_rows:
        raise ValueError(
            f"{name} has shape {list(x.shape)}; its first dimension must be the layout's "
            f"{layout.num_rows} rows ({layout.num_tokens} tokens + {layout.num_padding} padding)"
        )


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """float32, or float64 for float64 inputs (used only to check gradients)."""
    return torch.promote_types(x.dtype, torch.float32)


def states_or_zeros(
    op: str,
    states: torch.Tensor | None,
    shape: tuple[int, ...],
    meaning: str,
    like: torch.Tensor,
) -> torch.Tensor:
    """The initial states in the compute dtype of `like`, zeros for None.

    Raises:
        TypeError: the states are float16 or not floating-point.
        ValueError: their shape is not `shape`.
    """
    dtype = compute_dtype(like)
    if states is None:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    if states.dtype == torch.float16:
        raise TypeError(
            f"initial_states of {op} are float16: a recurrent state accumulates over the whole "
            "sequence, and float16 ends at 65504 and at 6e-8, so states overflow and underflow "
            "without a sign. Keep them in float32 (or bfloat16)"
        )
    if not states.is_floating_point():
        raise TypeError(f"initial_states of {op} have dtype {states.dtype}; use {dtype}")
    check_shape(f"initial_states of {op}", states, shape, meaning)
    return states.to(dtype)


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
    """`x_T[first:end]`; the tensor itself if that is all of it: a slice costs a copy in
    backward."""
    return x_T if (first, end) == (0, len(x_T)) else x_T[first:end]


def pad_rows(y_T: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """Append the layout's padding rows, as zeros."""
    if not layout.num_padding:
        return y_T
    return F.pad(y_T, (0, 0) * (y_T.dim() - 1) + (0, layout.num_padding))


def join(parts: list[torch.Tensor]) -> torch.Tensor:
    """`torch.cat` along the rows, without a copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
