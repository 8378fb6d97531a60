"""Launches of kernels. Each tensor is checked first: a kernel gets its address and no more.

A contract is a string that says what a kernel takes for granted of one tensor:

    "T H | D"      16 or 32 bits, floating-point; T and H may have any strides, D are neighbours
    "int R+1"      int32 or int64, R + 1 neighbours
    "fp32 T H"     float32, all neighbours
    "H or None"    may be left out
    "T H ..."      any further dimensions

A name is the size of a dimension: a number or a constant of the launch where it has one of this
name, else the size that it has where it is first met. `programs` is the first size of the grid.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""Floating-point numbers that kernels take."""

_DTYPES = {
    "float": FLOATS,
    "fp32": frozenset((torch.float32,)),
    "int": frozenset((torch.int32, torch.int64)),
}


class _Contract:
    """What is taken for granted of one tensor."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        words = text.removesuffix(" or None").split()
        self.is_optional = text.endswith(" or None")
        self.kind = words.pop(0) if words[0] in _DTYPES else "float"
        self.num_strided = words.index("|") if "|" in words else 0
        self.has_more = words[-1] == "..."
        dimensions = [re.fullmatch(r"(\w+)([+-]\d+)?", word) for word in words]
        self.sizes = [(own[1], own[2] or "") for own in dimensions if own is not None]
        """Name of each dimension, and what is added to its size."""

    def lines(self, x: str, number: int) -> list[str]:
        """Return the lines of `_check_of` for a tensor.

        Args:
            x: name of its variable there.
            number: of the contract.
        """
        rank, fail = len(self.sizes), f"fail({x}, {number})"
        shape = f"shape[:{rank}]" if self.has_more else "shape"
        fails = [f"{x}.dtype not in {self.kind}s", f"{x}.get_device() != device"]
        fails += [f"{shape} != ({', '.join(map(''.join, self.sizes))},)"]
        if not self.num_strided:
            fails.append(f"not {x}.is_contiguous()")
        elif self.has_more or self.num_strided < rank:
            fails.append(f"not are_neighbours({x}, {self.num_strided})")
        lines = [f"shape = {x}.shape", f"if len(shape) < {rank}: {fail}"]
        for place, (name, more) in enumerate(self.sizes):
            if not name.isdigit():
                lines.append(f"if {name} is None: {name} = shape[{place}] - (0{more})")
        lines.append(f"if {' or '.join(fails)}: {fail}")
        if self.num_strided:
            lines.append(f"strides += {x}.stride()[:{self.num_strided}]")
        otherwise = f"strides += {(0,) * self.num_strided}" if self.is_optional else fail
        return [f"if {x} is None: {otherwise}", "else:", *(f"    {line}" for line in lines)]


def _are_neighbours(tensor: Tensor, first: int) -> bool:
    """Whether the numbers in the dimensions from `first` on lie one behind the other."""
    next_stride = 1
    rest = list(zip(tensor.shape, tensor.stride()))[first:]
    for size, stride in reversed(rest):
        if size > 1 and stride != next_stride:
            return False
        next_stride *= size
    return True


def _check_of(
    function: str, contracts: list[_Contract], numbers: Sequence[str] = ()
) -> Callable[..., list[int]]:
    """Return a function that checks the tensors of a launch. It is written out for the contracts,
    as loops over them would take three times as long, and steps wait for the host.

    Args:
        function: name of what is launched.
        contracts: one for each tensor.
        numbers: names of its arguments that are numbers.

    Returns:
        A function of tensors, the first size of the grid, numbers, and constants by name. It
        returns the strides of the dimensions that may have any, one tensor after the other, and
        raises ValueError where a tensor does not fit.
    """

    def fail(tensor: Tensor | None, number: int) -> None:
        own, given = contracts[number], "None"
        if tensor is not None:
            form = f"{list(tensor.shape)}, strides {tensor.stride()}"
            given = f"{tensor.dtype} {form} on {tensor.device}"
        raise ValueError(
            f"{own.name} of {function} is {given}; it takes {own.text!r}, the sizes and the device "
            "of the other tensors: give that, by contiguous() where numbers are no neighbours"
        )

    variables = [f"x{number}" for number in range(len(contracts))]
    lines = [f"{', '.join(variables)}, = tensors", "device, strides = x0.get_device(), []"]
    for name in dict.fromkeys(name for own in contracts for name, _ in own.sizes):
        if name == "programs":
            continue
        if name in numbers:
            lines.append(f"{name} = numbers[{numbers.index(name)}]")
        elif not name.isdigit():
            lines.append(f"{name} = constants.get({name!r})")
    for number, own in enumerate(contracts):
        lines += own.lines(variables[number], number)
    body = "\n    ".join([*lines, "return strides"])
    names = {f"{kind}s": dtypes for kind, dtypes in _DTYPES.items()}
    names |= {"fail": fail, "are_neighbours": _are_neighbours}
    exec(f"def check(tensors, programs, numbers, constants):\n    {body}", names)
    return names["check"]


def _is_constant(parameter: inspect.Parameter) -> bool:
    return str(parameter.annotation).endswith("constexpr")


class Kernel:
    """A compiled Triton function, which is launched by a call.

    Its arguments are a pointer `<name>_ptr` for each contract, then numbers, then a stride
    `stride_<name>_<dimension>` for each dimension that may have any, then constants.

    Args:
        function: the function.
        contracts: a contract for each of its pointers, by name.

    Raises:
        TypeError: it has other arguments.
    """

    def __init__(self, function: Any, contracts: dict[str, str]) -> None:
        self.function = function
        parameters = inspect.signature(function.fn).parameters
        own = [_Contract(name, text) for name, text in contracts.items()]
        pointers = [f"{name}_ptr" for name in contracts]
        constants = [name for name, own in parameters.items() if _is_constant(own)]
        rest = list(parameters)[len(pointers) : len(parameters) - len(constants)]
        numbers = [name for name in rest if not name.startswith("stride_")]
        strides = rest[len(numbers) :]
        owners = [each.name for each in own for _ in range(each.num_strided)]
        if (
            list(parameters) != [*pointers, *numbers, *strides, *constants]
            or len(strides) != len(owners)
            or any(not name.startswith(f"stride_{own}_") for name, own in zip(strides, owners))
        ):
            raise TypeError(
                f"{function.fn.__name__} has the arguments {list(parameters)}, and its contracts "
                f"ask for {pointers}, numbers, strides of {owners}, constants: adapt one of them"
            )
        self._check = _check_of(function.fn.__name__, own, numbers)

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor | None],
        numbers: Sequence[float] = (),
        **constants: Any,
    ) -> None:
        """Launch the kernel.

        Args:
            grid: programs in up to three dimensions.
            tensors: one for each contract, in their order.
            numbers: its other arguments, in their order.
            constants: its `constexpr` arguments, and Triton's options.

        Raises:
            ValueError: a tensor is not what the kernel takes; nothing is launched.
        """
        strides = self._check(tensors, grid[0], numbers, constants)
        self.function[grid](*tensors, *numbers, *strides, **constants)


def kernel(**contracts: str) -> Callable[[Any], Kernel]:
    """Make a `Kernel` of a function that `triton.jit` compiles: a decorator above it."""
    return lambda function: Kernel(function, contracts)


def checked(function: Callable[..., Any], **contracts: str) -> Callable[..., Any]:
    """Return a function of a library that launches kernels, with a contract for each tensor.

    Args:
        function: its arguments without a contract are no tensors.
        contracts: by the names of its arguments, the first tensor first; those of the others are
            left out or None where they may be.
    """
    check = _check_of(function.__name__, [_Contract(*own) for own in contracts.items()])
    parameters = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*inputs: Any, **named: Any) -> Any:
        given = dict(zip(parameters, inputs)) | named
        for name, value in given.items():
            if isinstance(value, Tensor) and name not in contracts:
                raise TypeError(f"{name} of {function.__name__} has no contract: declare one")
        sizes = {name: value for name, value in given.items() if isinstance(value, int)}
        check([given.get(name) for name in contracts], None, (), sizes)
        return function(*inputs, **named)

    return call
