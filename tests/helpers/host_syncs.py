"""Finds calls that wait for a device: those that need the value of a tensor on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_READS = {
    *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"),
    *("nonzero", "argwhere", "masked_select", "bincount"),
    *("unique", "unique_consecutive", "_unique2"),
    *("equal", "allclose"),
}
"""Functions whose results, or their shapes, depend on values."""


class HostSyncError(AssertionError):
    """A call waits for the device."""


class _NoHostSyncs(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _READS or self._has_shape_of_values(name, args, kwargs):
            raise HostSyncError(f"{name} needs values of a tensor on the host")
        return function(*args, **kwargs)

    @staticmethod
    def _has_shape_of_values(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
        if name in ("__getitem__", "__setitem__", "index_put", "index_put_"):
            indices = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
            return any(_needs_values(index) for index in indices)
        if name == "where":
            return len(args) + len(kwargs) == 1
        if name == "repeat_interleave":
            repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
            return isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None
        return False


def _needs_values(index: Any) -> bool:
    if isinstance(index, slice):
        return any(isinstance(at, torch.Tensor) for at in (index.start, index.stop, index.step))
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


@contextmanager
def no_host_syncs() -> Iterator[None]:
    """Raise HostSyncError at calls inside that would wait for a GPU, wherever their tensors are.

    It sees calls in Python alone: not what torch does inside of one.
    """
    with _NoHostSyncs():
        yield
