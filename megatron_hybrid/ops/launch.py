"""Launches of kernels. Each tensor is checked first: a kernel gets its address and no more.

The contracts are those of `contracts.py`. `programs` is the first size of the grid.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_hybrid.ops.contracts import Contract, check_of


def _is_constant(parameter: inspect.Parameter) -> bool:
    return str(parameter.annotation).endswith("constexpr")


class Kernel:
    """A compiled Triton function, which is launched by a call.

    Its arguments are a pointer `<name>_ptr` for each contract, then numbers, then a stride
    `stride_<name>_<dimension>` for each dimension that may have any, then constants.

    Args:
        function: the function.
        conditions: expressions of its sizes, numbers and constants that must hold.
        contracts: a contract for each of its pointers, by name.

    Raises:
        TypeError: it has other arguments, or a size that is tied to nothing.
    """

    def __init__(self, function: Any, conditions: Sequence[str], contracts: dict[str, str]) -> None:
        self.function = function
        parameters = inspect.signature(function.fn).parameters
        own = [Contract(name, text) for name, text in contracts.items()]
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
        words = set(re.findall(r"\w+", " ".join(conditions))).union(*(each.names for each in own))
        self._check = check_of(
            function.fn.__name__,
            "tensors, programs, numbers, constants",
            {f"x{number}": each for number, each in enumerate(own)},
            given=(*numbers, *constants),
            head=[
                *_head(len(own)),
                *(f"{x} = numbers[{at}]" for at, x in enumerate(numbers) if x in words),
                *(f"{x} = constants[{x!r}]" for x in constants if x in words),
            ],
            conditions=dict.fromkeys(conditions, ""),
            is_launch=True,
        )

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


def _head(num_tensors: int) -> list[str]:
    variables = ", ".join(f"x{number}" for number in range(num_tensors))
    return [f"{variables}, = tensors", "device, strides = x0.get_device(), []"]


def kernel(*conditions: str, **contracts: str) -> Callable[[Any], Kernel]:
    """Make a `Kernel` of a function that `triton.jit` compiles: a decorator above it."""
    return lambda function: Kernel(function, conditions, contracts)


def checked(function: Callable[..., Any], **contracts: str) -> Callable[..., Any]:
    """Return a function of a library that launches kernels, with a contract for each tensor.

    Args:
        function: its arguments without a contract are no tensors.
        contracts: by the names of its arguments, the first tensor first; those of the others are
            left out or None where they may be.
    """
    parameters = list(inspect.signature(function).parameters)
    own = [Contract(*each) for each in contracts.items()]
    sizes = [name for name in parameters if any(name in each.names for each in own)]
    check = check_of(
        function.__name__,
        "tensors, given",
        {f"x{number}": each for number, each in enumerate(own)},
        perhaps=sizes,
        head=[*_head(len(own)), *(f"{name} = given.get({name!r})" for name in sizes)],
        is_launch=True,
    )

    @functools.wraps(function)
    def call(*inputs: Any, **named: Any) -> Any:
        given = dict(zip(parameters, inputs)) | named
        for name, value in given.items():
            if isinstance(value, Tensor) and name not in contracts:
                raise TypeError(f"{name} of {function.__name__} has no contract: declare one")
        check([given.get(name) for name in contracts], given)
        return function(*inputs, **named)

    return call
