"""Launches of kernels. Each tensor is checked first: a kernel gets its address and no more.

By its arguments a kernel says how a tensor may lie: `stride_x_row, stride_x_head` are the strides
of x in its first two dimensions, which may be any. Its numbers in all others are neighbours.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_hybrid.ops.contracts import BYTES, FLOATS, INTEGERS

_DTYPES = FLOATS | INTEGERS | BYTES


class Kernel:
    """A compiled Triton function, which is launched by a call; a decorator above `triton.jit`.

    Its arguments are a pointer `<name>_ptr` for each tensor, then numbers, then the strides
    `stride_<name>_<dimension>`, tensor by tensor, then constants.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        names = list(inspect.signature(function.fn).parameters)
        strides = [name for name in names if name.startswith("stride_")]
        pointers = [name.removesuffix("_ptr") for name in names if name.endswith("_ptr")]
        self._strided = {
            name: sum(stride.startswith(f"stride_{name}_") for stride in strides)
            for name in pointers
        }
        """Tensor -> its leading dimensions of any stride."""

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor | None],
        numbers: Sequence[float | None] = (),
        **constants: Any,
    ) -> None:
        """Launch the kernel.

        Args:
            grid: programs in up to three dimensions.
            tensors: one for each pointer, in their order.
            numbers: its other arguments, in their order.
            constants: its `constexpr` arguments, and Triton's options.

        Raises:
            ValueError: a tensor lies otherwise than the kernel takes it; nothing is launched.
        """
        strides = _strides(self.function.fn, self._strided, tensors)
        self.function[grid](*tensors, *numbers, *strides, **constants)


def checked(function: Callable[..., Any], **strided: int) -> Callable[..., Any]:
    """Return a function of a library that launches kernels, whose tensors are checked.

    Args:
        strided: its arguments with leading dimensions of any stride, and their number.
    """
    parameters = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*inputs: Any, **named: Any) -> Any:
        given = dict(zip(parameters, inputs)) | named
        tensors = {
            name: x
            for name, x in given.items()
            if isinstance(x, Tensor) and not name.endswith("_cpu")  # what the host reads
        }
        counts = {name: strided.get(name, 0) for name in tensors}
        _strides(function, counts, list(tensors.values()))
        return function(*inputs, **named)

    return call


def _strides(
    function: Callable[..., Any], strided: Mapping[str, int], tensors: Sequence[Tensor | None]
) -> list[int]:
    """Check the tensors of a launch; return their strides that may be any."""
    strides: list[int] = []
    device = tensors[0].get_device()
    for (name, count), x in zip(strided.items(), tensors, strict=True):
        if x is None:
            strides += [0] * count
            continue
        own = x.stride()[:count]
        if (
            x.dtype not in _DTYPES
            or x.get_device() != device
            or x.is_neg()
            or not (x.is_contiguous() or (count and _are_neighbours(x, count)))
            or len(own) < count
            # Offsets in the first dimension are computed in int64.
            or (count > 1 and max(own[1:]) > 32767 and _is_far(x, own))
        ):
            negated = ", negated when it is read" if x.is_neg() else ""
            raise ValueError(
                f"{name} of {function.__name__} is {x.dtype} {list(x.shape)}, strides {x.stride()} "
                f"on {x.device}{negated}; it takes numbers of 8 to 32 bits, or int64, on the "
                f"device of the other tensors, neighbours but in the first {count} dimensions, in "
                "less than 2^31 numbers beyond the first one: give that, by contiguous() where "
                "numbers are no neighbours"
            )
        strides += own
    return strides


def _is_far(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Return whether the numbers of one part in the first dimension have offsets beyond int32."""
    sizes = tensor.shape[1 : len(strides)]
    return sum((size - 1) * stride for size, stride in zip(sizes, strides[1:])) >= 1 << 31


def _are_neighbours(tensor: Tensor, first: int) -> bool:
    """Return whether the numbers in the dimensions from `first` on lie one after the other."""
    next_stride = 1
    rest = list(zip(tensor.shape, tensor.stride()))[first:]
    for size, stride in reversed(rest):
        if size > 1 and stride != next_stride:
            return False
        next_stride *= size
    return True
