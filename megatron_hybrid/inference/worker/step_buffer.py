"""StepBuffer: the inputs of steps, written on the host, at addresses that never change."""

import math
from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 256
"""Bytes, as of torch's own allocations."""


Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each array at its largest, in the order of the block."""


def _sizes(fields: Fields) -> list[int]:
    return [math.prod(shape) * dtype.itemsize for shape, dtype in fields.values()]


def _ends(fields: Fields) -> list[int]:
    return list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in _sizes(fields)))


def buffer_bytes(fields: Fields) -> int:
    """Bytes of a `StepBuffer` in host memory, and of its copy on another device."""
    return _ends(fields)[-1]


class StepBuffer:
    """Arrays in one block of pinned host memory, and their copies in one block on the device, which
    one copy mirrors. On a CPU both are the same memory.

    Args:
        fields: of the arrays.
        device: of the copies.

    Raises:
        RuntimeError: there is no memory for them.
    """

    @torch.inference_mode(False)  # a tensor made inside could not be written outside
    def __init__(self, fields: Fields, device: torch.device):
        sizes, ends = _sizes(fields), _ends(fields)
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=on_cuda)
        self._device = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        if device.type == "cpu":
            self._device = self._host
        self._copied = torch.cuda.Event() if on_cuda else None
        self.host: dict[str, np.ndarray] = {}
        """Arrays to write, between `begin` and `upload`."""
        self.device: dict[str, Tensor] = {}
        """Their copies."""
        self._starts = dict(zip(fields, (0, *ends)))
        for (name, (shape, dtype)), size in zip(fields.items(), sizes):
            start = self._starts[name]
            parts = [block[start : start + size] for block in (self._host, self._device)]
            host, copy = (part.view(dtype).view(shape) for part in parts)
            self.host[name], self.device[name] = host.numpy(), copy

    def begin(self) -> None:
        """Wait until the last upload has left host memory: until the device has begun the step
        before."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self, last: str, used: int) -> None:
        """Copy all arrays up to the first `used` elements of `last`, without waiting."""
        if self._device is self._host:
            return
        end = self._starts[last] + used * self.host[last].itemsize
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))
