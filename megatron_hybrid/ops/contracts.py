"""Contracts: what an op takes for granted of its tensors, checked before it runs.

A contract is a string for one tensor:

    "T H D"        any floating-point dtype; the sizes of all dimensions, by name
    "int R+1"      int32 or int64, R + 1 numbers
    "H or None"    may be left out
    "G C or C"     one of two shapes
    "... C"        any dimensions before the last one, the same ones in all operands
    "any H P"      a first dimension of any size

A name is the size of a dimension. It is a number of the call where it has one of this name (a
layout's T, R and n), else the size that it has where it is first met. A name that nothing else is
compared with is refused when the contract is written: each size is tied to another one, or is `any`
in so many words.
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

BYTES = frozenset((torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu))
"""Numbers of 8 bits, and codes."""

_KINDS = {
    "float": FLOATS | {torch.float64},
    "state": frozenset((torch.float32, torch.bfloat16, torch.float64)),
    "int": INTEGERS,
    "number": None,
    "stack": None,
}
"""Dtypes by the word before the sizes. A stack is one tensor, or a sequence of its parts."""


class Contract:
    """What is taken for granted of one tensor: see above."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        forms = [form.split() for form in text.split(" or ")]
        self.is_optional = forms[-1] == ["None"]
        if self.is_optional:
            forms.pop()
        self.kind = forms[0].pop(0) if forms[0] and forms[0][0] in _KINDS else "float"
        self.forms = forms

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
    given: Collection[str],
    head: Sequence[str],
    conditions: Mapping[str, str],
    names: Mapping[str, Any],
    result: str,
) -> Callable[..., tuple]:
    """Return a function that checks the tensors of a call. It is written out for the contracts, as
    loops over them would take three times as long, and steps wait for the host.

    Args:
        function: name of what is called.
        parameters: of the check, as a signature has them.
        contracts: of each tensor, by the name of its variable.
        given: names of sizes that the lines of `head` set.
        head: the first lines.
        conditions: expressions of sizes and parameters that must hold, and the error where one
            does not, with names in braces.
        names: what the lines refer to.
        result: what the check returns, an expression.

    Raises:
        TypeError: a size is tied to nothing.
    """
    words = set(re.findall(r"\w+", " ".join(conditions)))
    uses = Counter(name for own in contracts.values() for name in own.names)
    known: set[str] = set(given)
    unknown: set[str] = set()
    for own in contracts.values():
        loose = sorted(x for x in own.names - words - known if uses[x] < 2)
        if loose:
            raise TypeError(
                f"{', '.join(loose)} of {own.name} of {function} is the size of no other operand: "
                "tie it to one, or write 'any'"
            )
    body: list[str] = []
    for number, (x, own) in enumerate(contracts.items()):
        body += _lines(x, number, own, known, unknown)
    body += [
        f"if not ({condition}): refuse({number}, locals())"
        for number, condition in enumerate(conditions)
    ]
    first_seen = [f"{name} = None" for name in sorted(unknown)]
    all_names = {kind + "s": dtypes for kind, dtypes in _KINDS.items() if dtypes}
    all_names |= {"Tensor": Tensor, "torch": torch, **names}
    all_names |= _errors(function, list(contracts.values()), conditions)
    lines = "\n    ".join([*head, *first_seen, *body, f"return {result}"])
    exec(f"def check({parameters}):\n    {lines}", all_names)
    return all_names["check"]


def _lines(x: str, number: int, own: Contract, known: set[str], unknown: set[str]) -> list[str]:
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
    if _KINDS[own.kind]:
        lines.append(f"if {x}.dtype not in {own.kind}s: {fail}")
    if is_sure:
        return [f"if {x} is None: {fail}", *lines]
    lines = [f"    {line}" for line in lines]
    if own.kind == "stack":
        length = own.forms[0][0]
        parts = [f"elif not isinstance({x}, Tensor):", f"    if len({x}) != {length}: {fail}"]
        lines = [*parts, "else:", *lines]
    else:
        lines = ["else:", *lines]
    return [f"if {x} is None: {'pass' if own.is_optional else fail}", *lines]


def _errors(
    function: str, contracts: list[Contract], conditions: Mapping[str, str]
) -> dict[str, Callable[..., None]]:
    """Return what a check calls where a tensor or a condition is not as it has to be."""

    def fail(number: int, x: Any, known: dict[str, Any]) -> None:
        own = contracts[number]
        name, sizes = f"{own.name} of {function}", own.sizes(known)
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
        message = list(conditions.values())[number]
        raise ValueError(f"{function}: {message.format(**known)}")

    return {"fail": fail, "refuse": refuse}
