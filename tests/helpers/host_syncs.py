"""Finds calls that wait for a device: those that need the value of a tensor on the host."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS = {
    *("item", "tolist", "numpy", "cpu", "is_nonzero", "equal", "allclose"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__"),
}
"""Functions whose results depend on values."""
_SHAPES = {
    *("nonzero", "argwhere", "masked_select", "bincount"),
    *("unique", "unique_consecutive", "_unique2"),
}
"""Functions the shapes of whose results depend on values."""
_INDEXING, _PUTS = {"__getitem__", "__setitem__"}, {"index_put", "index_put_"}


class HostSyncError(AssertionError):
    """A call waits for the device."""


class _NoHostSyncs(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _READS or name in _SHAPES or _waits(name, args, kwargs):
            raise HostSyncError(f"{name} needs values of a tensor on the host, or on the device")
        return function(*args, **kwargs)


def _waits(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    if name in _INDEXING:
        return any(map(_index_waits, args[1] if isinstance(args[1], tuple) else (args[1],)))
    if name in _PUTS:  # whose indices may be a list of tensors
        return any(map(_index_waits, args[1]))
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
        return isinstance(repeats, Tensor) and kwargs.get("output_size") is None
    if name == "to":  # a device that is an argument of ours may be any
        return "cpu" in [each for each in (*args, *kwargs.values()) if isinstance(each, str)]
    return False


def _index_waits(index: Any) -> bool:
    """Whether an index has a mask's shape, or has to be copied to the device out of pageable
    memory."""
    if isinstance(index, slice):
        return any(isinstance(at, Tensor) for at in (index.start, index.stop, index.step))
    if isinstance(index, Tensor):
        return index.dtype in (torch.bool, torch.uint8)
    return isinstance(index, (list, np.ndarray))


@contextmanager
def no_host_syncs() -> Iterator[None]:
    """Raise HostSyncError at calls inside that would wait for a GPU, wherever their tensors are.

    It sees calls in Python alone: not what torch does inside of one.
    """
    with _NoHostSyncs():
        yield
