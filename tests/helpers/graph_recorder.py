"""Graphs on a CPU: every operation of torch is recorded, and replayed into the same memory.

A `RecordedGraph` stands in for `CudaGraph`. Before each replay the function runs once more, without
computing anything, and has to ask for the recorded operations at the recorded addresses: what it
reads anew from the host, a replay on a GPU would not see.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from host_syncs import HostSyncError, no_host_syncs
from matrix import matrix_rows
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
EVERY_LAYER = matrix_rows(
    ["M*SGCW-", "+E", "K-", "H", "L-", "Z", "P*", "B", "QRUV", "SJ"], "M*SGCW-", "+E"
)
"""Patterns that have every kind of layer."""


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

    def known(self) -> set[int]:
        return self.read.keys() | self.made

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

    def __init__(
        self,
        run: Callable[[], Tensor],
        device: torch.device,
        pool: Any,
        pieces: graph_runner.Pieces | None = None,
    ):
        self._run, self._is_whole = run, pieces is None
        self.open_piece, self.steps = None, []
        self._before = _Recorder()
        with nullcontext() if pieces is None else pieces.of(self):
            with self._before:
                run()
            try:
                self.begin_piece()
                self.output = run()
                self.end_piece()
            except HostSyncError as error:
                raise RuntimeError(str(error)) from error
            finally:
                if self.open_piece is not None:
                    self.open_piece.close()

    def begin_piece(self) -> None:
        self.open_piece, self._capture = ExitStack(), _Recorder()
        self.open_piece.enter_context(no_host_syncs())
        self.open_piece.enter_context(self._capture)

    def end_piece(self) -> None:
        piece, self.open_piece = self.open_piece, None
        piece.close()
        for address, (tensor, func) in self._capture.read.items():
            assert address in self._before.known(), (
                f"{func} reads {tensor.dtype} {list(tensor.shape)}, which the capture has made on "
                "the host: a replay would read what is there then"
            )
        self._before.made |= self._capture.made
        operations = self._capture.operations
        self.steps.append(lambda: [operation.replay() for operation in operations])
        self._operations = operations

    def replay(self) -> None:
        if self._is_whole:
            check = _Check(self._operations)
            with check:
                self._run()
            check.end()
        for step in self.steps:
            step()


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Let engines on a CPU have graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(graph_runner.CAPTURES, "cpu", RecordedGraph)
        patch.setattr(graph_runner, "_PROMPT_ROWS", (16, 40, 80))
        yield
