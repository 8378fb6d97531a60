"""Graphs on a CPU: every operation of torch is recorded, and replayed into the same memory.

A `RecordedGraph` stands in for `CudaGraph`. Before each replay the function runs once more, without
computing anything, and has to ask for the recorded operations at the recorded addresses: what it
reads anew from the host, a replay on a GPU would not see.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from host_syncs import HostSyncError, no_host_syncs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from megatron_hybrid.inference.worker import graph_runner

_aten = torch.ops.aten
_SAME = (
    *(_aten.detach.default, _aten.detach_.default, _aten.alias.default),
    *(_aten.lift_fresh.default, _aten.lift_fresh_copy.default),
)
"""The same memory: torch asks for them as it likes."""


@dataclass
class _Operation:
    func: Any
    args: tuple
    kwargs: dict
    result: Any

    def replay(self) -> None:
        given = self.func(*self.args, **self.kwargs)
        own = {_memory(t) for t in _tensors((self.args, self.kwargs))}
        for made, kept in zip(_tensors(given), _tensors(self.result), strict=True):
            if made is not kept and _memory(made) not in own:
                kept.copy_(made)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _marks(tree: Any) -> list:
    """What a graph keeps of arguments: addresses and forms of tensors, and all else."""
    return [
        (leaf.data_ptr() if leaf.numel() else 0, leaf.shape, leaf.stride(), leaf.dtype)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in tree_flatten(tree)[0]
    ]


class _Recorder(TorchDispatchMode):
    """Notes operations, and the memory that they read and none of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.made: set[int] = set()
        self.read: dict[int, tuple[Tensor, Any]] = {}  # by address: the tensor and its reader

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _SAME:
            return result
        for tensor in _tensors((args, kwargs)):
            if tensor.numel() and _memory(tensor) not in self.made:
                self.read.setdefault(_memory(tensor), (tensor, func))
        self.made |= {_memory(t) for t in _tensors(result)} - self.read.keys()
        self.operations.append(_Operation(func, args, kwargs, result))
        return result


class _Check(TorchDispatchMode):
    """Computes nothing: compares each operation with the recorded one, and returns its result."""

    def __init__(self, operations: list[_Operation]) -> None:
        super().__init__()
        self._expected = iter(enumerate(operations))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SAME:
            return func(*args, **kwargs)
        number, recorded = next(self._expected, (None, None))
        assert recorded is not None, f"{func} was not recorded"
        assert func is recorded.func, f"operation {number} is {func}, not {recorded.func}"
        given, kept = _marks((args, kwargs)), _marks((recorded.args, recorded.kwargs))
        assert given == kept, f"operation {number}, {func}, has {given} in place of {kept}"
        own = {id(tensor): tensor for tensor in _tensors((recorded.args, recorded.kwargs))}
        return tree_map_only(
            Tensor, lambda t: t if id(t) in own else _aten.alias(t), recorded.result
        )

    def end(self) -> None:
        number, _ = next(self._expected, (None, None))
        assert number is None, f"operation {number} and those behind it are missing"


class RecordedGraph:
    """See `graph_runner.CudaGraph`."""

    num_bytes = 0

    @staticmethod
    def new_pool() -> None:
        return None

    def __init__(self, run: Callable[[], Tensor], device: torch.device, pool: Any):
        self._run = run
        before, capture = _Recorder(), _Recorder()
        with before:
            run()
        try:
            with no_host_syncs(), capture:
                self.output = run()
        except HostSyncError as error:
            raise RuntimeError(str(error)) from error
        for address, (tensor, func) in capture.read.items():
            assert address in before.read, (
                f"{func} reads {tensor.dtype} {list(tensor.shape)}, which the capture has made on "
                "the host: a replay would read what is there then"
            )
        self._operations = capture.operations

    def replay(self) -> None:
        check = _Check(self._operations)
        with check:
            self._run()
        check.end()
        for operation in self._operations:
            operation.replay()


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Let engines on a CPU have graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(graph_runner.CAPTURES, "cpu", RecordedGraph)
        yield
