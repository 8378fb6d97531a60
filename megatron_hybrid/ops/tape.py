"""Tape: the operations of one call of a function, for later calls without the Python around them.

On a CPU a forward of few rows takes less time than the Python around its operations: modules,
checks, views that change nothing. A tape calls torch's operations alone, the same ones in the same
order, on the same memory or on what the ones before have made. So its results have the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

_READS = ("aten::resolve_conj", "aten::resolve_neg", "aten::lift_fresh")
"""What torch asks for around `tolist`, `numpy`, `torch.tensor` and `torch.from_numpy`."""


class Live:
    """What stands in later calls in the place of things that one call had."""

    def __init__(self) -> None:
        self._things: dict[int, tuple[Any, Callable[[], Any]]] = {}

    def add(self, thing: Any, now: Callable[[], Any]) -> None:
        """Add a thing; `now` gives what stands in its place."""
        self._things[id(thing)] = thing, now

    def find(self, thing: Any) -> Callable[[], Any] | None:
        """Return what gives what stands in a thing's place; None if the thing stays."""
        found = self._things.get(id(thing))
        return None if found is None else found[1]

    def now(self, thing: Any) -> Any:
        """Return what stands in a thing's place, or the thing."""
        found = self.find(thing)
        return thing if found is None else found()


class Recorder(Protocol):
    """Notes what a function does, for later calls without it."""

    def takes_apart(self, op: Any) -> bool:
        """Return whether later calls call the op as it is, too."""

    def call(self, op: Any, inputs: tuple) -> Any:
        """Serve an op that is taken apart."""

    def paused(self) -> AbstractContextManager[None]:
        """Return a context of operations whose results later calls have."""


recording: ContextVar[Recorder | None] = ContextVar("recording", default=None)


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Record the function that runs in this context."""
    token = recording.set(recorder)
    try:
        yield
    finally:
        recording.reset(token)


def served(op: Any, inputs: tuple) -> Any:
    """Serve an op, which a recording may take apart."""
    recorder = recording.get()
    if recorder is None or not recorder.takes_apart(op):
        return op.serve(*inputs)
    return recorder.call(op, inputs)


def once(make: Callable[[], T]) -> T:
    """Return `make()`, whose result a recording keeps."""
    recorder = recording.get()
    if recorder is None:
        return make()
    with recorder.paused():
        return make()


class Tape:
    """A function without arguments, from its first call on.

    Args:
        run: returns a tensor. The tensors that it reads have to stay where they are.
        live: inputs of ops that are taken apart, which may be others in other calls.

    Attributes:
        reason: why later calls run the function itself: in it the host reads a tensor, or makes
            one, so that another call may do otherwise. None if they do not.
    """

    def __init__(self, run: Callable[[], Tensor], live: Live):
        recorder = _Writer(live)
        with recorded_by(recorder), recorder:
            self._first = [run()]
        replay = recorder.function(self._first[0])
        self.reason = recorder.reason
        self._call = replay if self.reason is None else run

    def take_first(self) -> Tensor:
        """Return the result of the first call. It is given once, and not kept."""
        return self._first.pop()

    def __call__(self) -> Tensor:
        """Return the result of another call."""
        return self._call()


class _Writer(TorchDispatchMode):
    """Writes a function in Python: a line for each operation."""

    def __init__(self, live: Live):
        super().__init__()
        self._live, self._is_paused = live, False
        self.reason: str | None = None
        self._kept: list[Any] = []  # all that has a name, so that no id comes twice
        self._names: dict[int, str] = {}
        self._constants: dict[str, Any] = {}
        self._made: set[int] = set()  # memory that an operation has made
        self._lines: list[tuple[list[str], str]] = []  # names of results, and the call

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave operations in this context out of the recording."""
        was, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was

    def takes_apart(self, op: Any) -> bool:
        """Select ops that read on the host, and those with kernels that torch does not see."""
        others = (each for each in op.backends if each.missing is None)
        return op.reads_host or any(each.device_type != "cuda" for each in others)

    def call(self, op: Any, inputs: tuple) -> Any:
        """Serve an op that becomes an operation of the tape."""
        with self.paused():
            result = op.serve(*map(self._live.now, inputs))
        if not self._is_paused:
            self._write(op.serve, inputs, {}, result)
        return result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        forms = _forms(given)
        result = func(*args, **kwargs)
        made = _tensors(result)
        if func._schema.name in _READS or (given and not made and func._schema.returns):
            self._give_up(f"the host reads or makes a tensor by {func}")
        elif forms != _forms(given):
            self._give_up(f"{func} gives a tensor another shape")
        elif any(isinstance(leaf, torch.Generator) for leaf in leaves):
            self._give_up(f"{func} draws from a generator of its own")
        elif func._schema.is_mutable or not self._is_known(given, made):
            self._write(_binding(func, args, kwargs, result), args, kwargs, result)
        return result

    def _is_known(self, given: list[Tensor], made: list[Tensor]) -> bool:
        """Return whether results are no work: an input as it is, or views of what stays."""
        if given and len(made) == 1 and _is_same(made[0], given[0]):
            self._kept.append(made[0])
            self._names[id(made[0])] = self._text(given[0])
            return True
        memory = set(map(_memory, given))
        return memory.isdisjoint(self._made) and memory.issuperset(map(_memory, made))

    def _give_up(self, reason: str) -> None:
        self.reason, self._is_paused = reason, True

    def _write(self, function: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        inputs = [self._text(x) for x in args]
        inputs += [f"{name}={self._text(x)}" for name, x in kwargs.items()]
        call = f"{self._constant(function)}({', '.join(inputs)})"
        if isinstance(result, Tensor):  # one in place has a name
            names = [] if id(result) in self._names else [self._name(result)]
        else:
            names = [self._name(x) + "," * (len(result) == 1) for x in result or ()]
        memory = set(map(_memory, _tensors((args, kwargs))))
        self._made.update(own for own in map(_memory, _tensors(result)) if own not in memory)
        self._lines.append((names, call))

    def _name(self, value: Tensor) -> str:
        """Give what an operation has made a new name."""
        self._kept.append(value)
        name = self._names[id(value)] = f"x{len(self._kept)}"
        return name

    def _constant(self, value: Any) -> str:
        """Return the name of something; a new one if it has none."""
        if id(value) not in self._names:
            self._kept.append(value)
            name = self._names[id(value)] = f"c{len(self._kept)}"
            self._constants[name] = value
        return self._names[id(value)]

    def _text(self, value: Any) -> str:
        """Return how Python writes an input of an operation."""
        if value is None or isinstance(value, bool | int):
            return repr(value)
        if (now := self._live.find(value)) is not None:
            return f"{self._constant(now)}()"
        if isinstance(value, list | tuple):
            parts = "".join(f"{self._text(part)}, " for part in value)
            if isinstance(value, list):
                return f"[{parts}]"
            kind = "" if type(value) is tuple else self._constant(type(value))
            return f"{kind}({parts})"
        is_new = isinstance(value, Tensor) and id(value) not in self._names
        if is_new and _memory(value) in self._made:
            self._give_up("a tensor comes from an operation that was not seen")
        return self._constant(value)

    def function(self, result: Tensor) -> Callable[[], Tensor]:
        """Compile the lines to a function, which forgets each result after its last use."""
        last = self._text(result)
        later, lines = {last}, [f"return {last}"]  # from the last one on
        for names, call in reversed(self._lines):
            own = set(re.findall(r"\bx\d+\b", f"{names} {call}"))
            if over := sorted(own - later):
                lines.append(f"del {', '.join(over)}")
            lines.append(f"{', '.join(names)} = {call}" if names else call)
            later |= own
        body = "\n    ".join(reversed(lines))
        exec(f"def replay():\n    {body}", self._constants)
        return self._constants["replay"]


class _Calls(TorchDispatchMode):
    """Notes calls of operations, and gives a result in their place."""

    def __init__(self, result: Any):
        super().__init__()
        self._result = result
        self.found: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append((func, args, kwargs or {}))
        return self._result


def _binding(func: Any, args: tuple, kwargs: dict, result: Any) -> Callable:
    """Return torch's own function for an operation, which is called in half the time; the
    operation, where there is none that does the same with these inputs."""
    namespace, _, name = func._schema.name.partition("::")
    function = getattr(torch, name, None) or getattr(Tensor, name, None)
    if namespace != "aten" or function is None:
        return func
    with _Calls(result) as calls, suppress(TypeError, ValueError, RuntimeError):
        function(*args, **kwargs)
    asked, done = tree_leaves((func, args, kwargs)), tree_leaves(calls.found)
    is_same = len(asked) == len(done) and all(
        a is b or (not isinstance(a, Tensor) and a == b) for a, b in zip(asked, done)
    )
    return function if is_same else func


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _forms(tensors: list[Tensor]) -> list[tuple]:
    return [(x.shape, x.stride()) for x in tensors if x.layout == torch.strided]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _is_same(made: Tensor, given: Tensor) -> bool:
    """Return whether a result is an input: the same values in the same memory."""
    if made is given:
        return True
    return (
        made.layout == given.layout == torch.strided
        and made.numel() > 0
        and made.data_ptr() == given.data_ptr()
        and (made.dtype, made.shape, made.stride()) == (given.dtype, given.shape, given.stride())
        and (made.is_conj(), made.is_neg()) == (given.is_conj(), given.is_neg())
    )
