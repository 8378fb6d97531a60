"""Contracts: what an op or a kernel takes for granted of its tensors, checked before it runs.

A contract is a string for one tensor:

    "T H D"        any floating-point dtype; the sizes of all dimensions, by name
    "T H | D"      of a launch: T and H may have any strides, D are neighbours
    "int R+1"      int32 or int64, R + 1 numbers
    "H or None"    may be left out
    "G C or C"     one of two shapes
    "... C"        any dimensions before the last one, the same ones in all operands
    "any H P"      a first dimension of any size

A name is the size of a dimension. It is a number of the call where it has one of this name (a
layout's T, R and n; a number or a constant of a launch), else the size that it has where it is
first met. A name that nothing else is compared with is refused when the contract is written: each
size is tied to another one, or is `any` in so many words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""Floating-point numbers that kernels take."""

INTEGERS = frozenset((torch.int32, torch.int64))
"""Numbers of rows, pages and slots."""

_KINDS = {
    "float": FLOATS | {torch.float64},
    "state": frozenset((torch.float32, torch.bfloat16, torch.float64)),
    "fp32": frozenset((torch.float32,)),
    "int": INTEGERS,
    "number": None,
    "stack": None,
}
"""Dtypes by the word before the sizes. A stack is one tensor, or a sequence of its parts."""


class Contract:
    """What is taken for granted of one tensor: see above."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        forms = [form.split() for form in text.split(" or ")]
        self.is_optional = forms[-1] == ["None"]
        if self.is_optional:
            forms.pop()
        self.kind = forms[0].pop(0) if forms[0] and forms[0][0] in _KINDS else "float"
        self.num_strided = forms[0].index("|") if "|" in forms[0] else 0
        self.forms = [[word for word in form if word != "|"] for form in forms]

    @property
    def names(self) -> set[str]:
        """Names of its sizes."""
        words = {word for form in self.forms for word in form}
        return {_name_of(word) for word in words if not word.isdigit()} - {"any", "..."}

    @property
    def shape(self) -> str:
        """Its shapes, as errors spell them."""
        return " or ".join(f"[{', '.join(form)}]" for form in self.forms)

    def sizes(self, known: Mapping[str, Any]) -> str:
        """Its shapes in numbers, as far as they are known."""

        def size(word: str) -> str:
            if word == "..." and known.get("_rest"):
                return ", ".join(map(str, known["_rest"]))
            if (found := known.get(_name_of(word))) is None:
                return word if word.isdigit() or word == "..." else "any"
            return str(found + int(word[len(_name_of(word)) :] or 0))

        return " or ".join(f"[{', '.join(map(size, form))}]" for form in self.forms)


def _name_of(word: str) -> str:
    return re.split(r"[+-]", word)[0]


def check_of(
    function: str,
    parameters: str,
    contracts: Mapping[str, Contract],
    *,
    given: Collection[str] = (),
    perhaps: Collection[str] = (),
    head: Sequence[str] = (),
    conditions: Mapping[str, str] | None = None,
    names: Mapping[str, Any] | None = None,
    is_launch: bool = False,
) -> Callable[..., list[int] | None]:
    """Return a function that checks the tensors of a call. It is written out for the contracts, as
    loops over them would take three times as long, and steps wait for the host.

    Args:
        function: name of what is called.
        parameters: of the check, as a signature has them.
        contracts: of each tensor, by the name of its variable.
        given: names of sizes that the lines of `head` set.
        perhaps: those that they may set to None.
        head: the first lines.
        conditions: expressions of sizes and parameters that must hold, and the error where one
            does not, with names in braces.
        names: what the lines refer to.
        is_launch: whether the tensors are for a kernel, which is given addresses. Then the check
            returns the strides of the dimensions that may have any, one tensor after the other.

    Raises:
        TypeError: a size is tied to nothing.
    """
    conditions = conditions or {}
    words = set(re.findall(r"\w+", " ".join(conditions)))
    uses = Counter(name for own in contracts.values() for name in own.names)
    known, unknown = {*given, "programs"}, set(perhaps)
    for own in contracts.values():
        loose = sorted(x for x in own.names - words - known - unknown if uses[x] < 2)
        if loose:
            raise TypeError(
                f"{', '.join(loose)} of {own.name} of {function} is the size of no other operand: "
                "tie it to one, or write 'any'"
            )
    body: list[str] = []
    for number, (x, own) in enumerate(contracts.items()):
        body += _lines(x, number, own, known, unknown, is_launch)
    body += [
        f"if not ({condition}): refuse({number}, locals())"
        for number, condition in enumerate(conditions)
    ]
    first_seen = [f"{name} = None" for name in sorted(unknown - set(perhaps))]
    all_names = {kind + "s": dtypes for kind, dtypes in _KINDS.items() if dtypes}
    all_names |= {
        "are_neighbours": _are_neighbours,
        "is_far": _is_far,
        "Tensor": Tensor,
        "torch": torch,
    }
    all_names |= names or {}
    if is_launch:
        all_names["floats"] = FLOATS
    all_names |= _errors(function, list(contracts.values()), conditions, is_launch)
    lines = "\n    ".join([*head, *first_seen, *body, "return strides" if is_launch else "pass"])
    exec(f"def check({parameters}):\n    {lines}", all_names)
    return all_names["check"]


def _lines(
    x: str, number: int, own: Contract, known: set[str], unknown: set[str], is_launch: bool
) -> list[str]:
    """Lines of a check for the tensor in the variable `x`. Names whose size it tells are added to
    those `known`, or `unknown` where it may have been left out."""
    fail = f"fail({number}, {x}, locals())"
    is_sure = not own.is_optional and len(own.forms) == 1 and own.kind != "stack"
    lines = [f"_shape = {x}.shape"]
    for place, form in enumerate(own.forms):
        binds, wanted = [], []
        rest = form.index("...") if "..." in form else len(form)
        for index, word in enumerate(form):
            at = f"_shape[{index if index <= rest else index - len(form)}]"
            name = "_rest" if word == "..." else _name_of(word)
            if word == "...":
                at = f"_shape[{index}:len(_shape) - {len(form) - 1 - index}]"
            wanted.append(f"*{name}" if word == "..." else at if word == "any" else word)
            if name.isdigit() or name == "any" or name in known:
                continue
            bind = f"{name} = {at}" + (
                f" - (0{word[len(name) :]})" if name not in (word, "_rest") else ""
            )
            if not is_sure:
                unknown.add(name)
            binds.append(f"if {name} is None: {bind}" if name in unknown else bind)
            if is_sure:
                known.add(name)
        count = f"len(_shape) {'<' if '...' in form else '!='} {len(form) - ('...' in form)}"
        inner = [*binds, f"if _shape != ({', '.join(wanted)},): {fail}"]
        if place + 1 < len(own.forms):
            lines += [f"{'el' if place else ''}if not {count}:", *(f"    {one}" for one in inner)]
        elif place:
            lines += [f"elif {count}: {fail}", "else:", *(f"    {one}" for one in inner)]
        else:  # another number of dimensions is another shape, too
            lines += [f"if {count}: {fail}"] * (binds != [] or "any" in form) + inner
    dtype = [f"{x}.dtype not in {own.kind}s"] if _KINDS[own.kind] else []
    if is_launch:
        flaws = [*dtype, f"{x}.get_device() != device", f"{x}.is_neg()"]
        if not own.num_strided:
            flaws.append(f"not {x}.is_contiguous()")
        elif own.num_strided < max(map(len, own.forms)):
            flaws.append(f"not are_neighbours({x}, {own.num_strided})")
        lines.append(f"if {' or '.join(flaws)}: {fail}")
        if own.num_strided:
            lines += [f"_strides = {x}.stride()[:{own.num_strided}]", "strides += _strides"]
        if own.num_strided > 1:  # offsets in the first dimension are computed in int64
            lines.append(f"if max(_strides[1:]) > 32767 and is_far({x}, _strides): {fail}")
    elif dtype:
        lines.append(f"if {dtype[0]}: {fail}")
    if is_sure and not is_launch:
        return [f"if {x} is None: {fail}", *lines]
    absent = f"strides += {(0,) * own.num_strided}" if is_launch else "pass"
    lines = [f"    {line}" for line in lines]
    if own.kind == "stack":
        length = own.forms[0][0]
        parts = [f"elif not isinstance({x}, Tensor):", f"    if len({x}) != {length}: {fail}"]
        lines = [*parts, "else:", *lines]
    else:
        lines = ["else:", *lines]
    return [f"if {x} is None: {absent if own.is_optional else fail}", *lines]


def _errors(
    function: str, contracts: list[Contract], conditions: Mapping[str, str], is_launch: bool
) -> dict[str, Callable[..., None]]:
    """Return what a check calls where a tensor or a condition is not as it has to be."""

    def fail(number: int, x: Any, known: dict[str, Any]) -> None:
        own = contracts[number]
        name, sizes = f"{own.name} of {function}", own.sizes(known)
        if is_launch:
            given = "None"
            if x is not None:
                given = f"{x.dtype} {list(x.shape)}, strides {x.stride()} on {x.device}"
                given += ", negated when it is read" if x.is_neg() else ""
            raise ValueError(
                f"{name} is {given}; it takes {own.text!r} = {sizes}, on the device of the other "
                "tensors, in less than 2^31 numbers beyond the first dimension: give that, by "
                "contiguous() where numbers are no neighbours"
            )
        if x is None or not isinstance(x, Tensor):
            given = "is None" if x is None else f"has {len(x)} parts"
        elif (dtypes := _KINDS[own.kind]) and x.dtype not in dtypes:
            taken = ", ".join(sorted(map(str, dtypes)))
            reason = ""
            if (own.kind, x.dtype) == ("state", torch.float16):
                reason = (
                    ": a recurrent state accumulates over the whole sequence, and float16 ends at "
                    "65504 and at 6e-8, so states overflow and underflow without a sign"
                )
            raise TypeError(f"{name} has dtype {x.dtype}; give one of {taken}{reason}")
        else:
            given = f"has shape {list(x.shape)}"
        raise ValueError(f"{name} {given}, expected {own.shape} = {sizes}")

    def refuse(number: int, known: dict[str, Any]) -> None:
        condition, message = list(conditions.items())[number]
        words = dict.fromkeys(re.findall(r"[A-Za-z]\w*", condition))
        values = ", ".join(f"{word} is {known[word]!r}" for word in words if word in known)
        message = message.format(**known) or f"it takes {condition}, and {values}"
        raise ValueError(f"{function}: {message}")

    return {"fail": fail, "refuse": refuse}


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
