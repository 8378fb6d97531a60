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

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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

    def sizes(self, known: Mapping[str, Any], shape: Sequence[int]) -> str:
        """Write its shapes in numbers, as far as they are known; `shape` gives what nothing else
        does."""

        def size(word: str, own: int | str) -> str:
            if word == "..." and known.get("_rest"):
                return ", ".join(map(str, known["_rest"]))
            if (found := known.get(_name_of(word))) is None:
                return str(own) if word[0].isalpha() and word != "any" else word
            return str(found + int(word[len(_name_of(word)) :] or 0))

        forms = []
        for form in self.forms:
            is_like = len(form) == len(shape) and "..." not in form
            forms.append(", ".join(map(size, form, shape if is_like else ["any"] * len(form))))
        return " or ".join(f"[{form}]" for form in forms)


def _name_of(word: str) -> str:
    return re.split(r"[+-]", word)[0]


def check_of(
    function: str,
    reference: Callable[..., Any],
    contracts: Mapping[str, str],
    conditions: Mapping[str, str],
    helpers: Mapping[str, Any],
) -> tuple[dict[str, Contract], Callable[..., tuple]]:
    """Return the contract of each tensor, by its name, and a function of the inputs that checks
    them, and gives them back with defaults. It is written out for the contracts, as loops over them
    would take three times as long, and steps wait for the host.

    Args:
        function: name of what is called.
        reference: has its parameters, and their defaults.
        contracts: of each tensor, or of parts of a parameter (`states.pool_S`).
        conditions: expressions of sizes and parameters that must hold, and the error where one
            does not, with names in braces.
        helpers: functions that these call.

    Raises:
        TypeError: a tensor has no contract, or a size is tied to nothing.
    """
    parameters = inspect.signature(reference, eval_str=True).parameters
    kinds = {name: str(own.annotation) for name, own in parameters.items()}
    tensors = {name for name, kind in kinds.items() if "Tensor" in kind and "Callable" not in kind}
    owners = {name.partition(".")[0] for name in contracts}
    if tensors != owners:
        raise TypeError(
            f"{function} has contracts for {sorted(owners)} and the tensors {sorted(tensors)}: "
            "give each of them one, and annotate tensors with Tensor"
        )
    parts = [name.partition(".") for name in contracts]
    found = {
        part or own: Contract(part or own, contracts[own + dot + part]) for own, dot, part in parts
    }
    body = [f"{part} = None if {own} is None else {own}.{part}" for own, _, part in parts if part]
    known = {"T", "R", "n"} if "layout" in parameters else set()
    if known:
        body.append("T, R, n = layout.num_rows, layout.num_sequences, len(layout.captures)")
    words = set(re.findall(r"\w+", " ".join(conditions)))
    uses = Counter(name for own in found.values() for name in own.names)
    for own in found.values():
        if loose := sorted(x for x in own.names - words - known if uses[x] < 2):
            raise TypeError(
                f"{', '.join(loose)} of {own.name} of {function} is the size of no other operand: "
                "tie it to one, or write 'any'"
            )
    unknown: set[str] = set()
    checks = [line for own in found.values() for line in _lines(own, known, unknown)]
    body += [f"{name} = None" for name in sorted(unknown)] + checks
    body += [
        f"if not ({condition}): refuse({number}, locals())"
        for number, condition in enumerate(conditions)
    ]
    names = {kind + "s": dtypes for kind, dtypes in _KINDS.items() if dtypes}
    names |= {"Tensor": Tensor, "torch": torch, **helpers, **_errors(function, found, conditions)}
    body.append(f"return ({''.join(f'{name}, ' for name in parameters)})")
    exec(f"def check({', '.join(parameters)}):\n    " + "\n    ".join(body), names)
    defaults = (own.default for own in parameters.values() if own.default is not own.empty)
    names["check"].__defaults__ = tuple(defaults)
    return found, names["check"]


def _lines(own: Contract, known: set[str], unknown: set[str]) -> list[str]:
    """Write the lines of a check of one tensor. Names whose sizes it gives are added to those
    `known`, or `unknown` where it may have been left out."""
    x = own.name
    fail = f"fail({x!r}, {x}, locals())"
    is_sure = not own.is_optional and len(own.forms) == 1 and own.kind != "stack"
    lines = [f"match {x}.shape:"]
    for form in own.forms:
        pattern, guards, told = [], [], {}
        for place, word in enumerate(form):
            name, size = _name_of(word), f"_{place}"
            pattern.append("_" if word == "any" else f"*{size}" if word == "..." else size)
            if word == "...":
                name, size = "_rest", f"tuple({size})"
            elif word != name:
                size += f" - (0{word[len(name) :]})"
            if name.isdigit() or name in known:
                guards.append(f"{size} == {name}")
            elif name in told:
                guards.append(f"{size} == {told[name]}")
            elif name != "any":
                told[name] = size
                if name in unknown or not is_sure:
                    guards.append(f"{name} in (None, {size})")
        guard = f" if {' and '.join(guards)}" if guards else ""
        named = f"{', '.join(told)} = {', '.join(told.values())}" if told else "pass"
        lines.append(f"    case [{', '.join(pattern)}]{guard}: {named}")
        (known if is_sure else unknown).update(told)
    lines.append(f"    case _: {fail}")
    if _KINDS[own.kind]:
        lines.append(f"if {x}.dtype not in {own.kind}s: {fail}")
    if is_sure:
        return [f"if {x} is None: {fail}", *lines]
    start = [f"if {x} is None: {'pass' if own.is_optional else fail}"]
    if own.kind == "stack":
        start += [
            f"elif not isinstance({x}, Tensor):",
            f"    if len({x}) != {own.forms[0][0]}: {fail}",
        ]
    return [*start, "else:", *(f"    {line}" for line in lines)]


def _errors(
    function: str, contracts: Mapping[str, Contract], conditions: Mapping[str, str]
) -> dict[str, Callable[..., None]]:
    """Return what a check calls where a tensor or a condition is not as it has to be."""

    def fail(name: str, x: Any, known: dict[str, Any]) -> None:
        own = contracts[name]
        name, sizes = f"{name} of {function}", own.sizes(known, getattr(x, "shape", ()))
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
