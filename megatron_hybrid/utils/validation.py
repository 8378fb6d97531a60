"""Checks of a user's values: numbers, texts, functions, and fields by their annotations."""

import math
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

LARGEST_INT = (1 << 32) - 1
"""Of a field: no size, count or seed needs more."""
LARGEST_FLOAT = 1e18
"""Of a field: float32 holds its square."""


def is_int(value: Any) -> bool:
    """Whether a value is an integer, also numpy's, but no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, also numpy's, but no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


class Range(NamedTuple):
    """The numbers that a field takes."""

    least: float
    most: float = LARGEST_FLOAT
    has_ends: bool = True
    """Whether `least` and `most` belong to it."""

    def __contains__(self, number: object) -> bool:
        least, most, has_ends = self
        return least <= number <= most and (has_ends or number not in (least, most))

    def __str__(self) -> str:
        least, most, has_ends = self
        if most == LARGEST_FLOAT:
            return f"{least:g} or more" if has_ends else f"above {least:g}"
        return f"from {least:g} to {most:g}" if has_ends else f"between {least:g} and {most:g}"


def check_field(name: str, value: Any, hint: Any, limits: Range | None = None) -> None:
    """Check a value against the annotation of its field. Numbers must be finite, whole ones lie
    from 0 to `LARGEST_INT`, others within +-`LARGEST_FLOAT`.

    Args:
        name: for the error.
        value: see there.
        hint: the annotation, resolved.
        limits: of a number that is not whole.

    Raises:
        ValueError: another value; the message has the name, the value and what it must be.
    """
    kinds = _kinds(hint)
    if any(_fits(value, kind) for kind in kinds):
        if limits is not None and is_number(value) and value not in limits:
            raise ValueError(f"{name} is {value!r}; it must be {limits}.")
        return
    choices = [choice for kind in kinds for choice in get_args(kind) if get_origin(kind) is Literal]
    if choices and set(kinds) <= {Literal[tuple(choices)], type(None)}:
        *others, last = map(repr, choices)
        listed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{name} is {value!r}; use {listed}.")
    if is_int(value) and int in kinds:
        wanted = f"a whole number from 0 to {LARGEST_INT}"
    elif is_number(value) and float in kinds:
        wanted = f"a finite number, of {LARGEST_FLOAT:g} at most"
    else:
        named = dict.fromkeys(_describe(kind) for kind in kinds if kind is not type(None))
        wanted = " or ".join(named) or "left out"
    raise ValueError(f"{name} is {value!r}; it must be {wanted}.")


def _kinds(hint: Any) -> list[Any]:
    """The members of a union, nested ones too; of another annotation itself."""
    if get_origin(hint) in (Union, UnionType):
        return [kind for each in get_args(hint) for kind in _kinds(each)]
    return [type(None) if hint is None else hint]


def _fits(value: Any, kind: Any) -> bool:
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is Any:
        return True
    if origin is Literal:
        return value in arguments
    if origin is int:
        return is_int(value) and 0 <= value <= LARGEST_INT
    if origin is float:
        return is_number(value) and math.isfinite(value) and abs(value) <= LARGEST_FLOAT
    if not isinstance(origin, type):
        return True  # nothing to check it by
    if isinstance(value, str) and origin is not str and issubclass(origin, Sequence):
        return False
    if origin is tuple:
        origin, arguments = Sequence, ()  # YAML has lists alone
    if not isinstance(value, origin):
        return False
    if not arguments or not issubclass(origin, Sequence | Mapping):
        return True
    parts = value.values() if isinstance(value, Mapping) else value
    return all(any(_fits(part, kind) for kind in _kinds(arguments[-1])) for part in parts)


def _describe(kind: Any) -> str:
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in _NAMES:
        return _NAMES[origin][0]
    if origin is Literal:
        return "one of " + ", ".join(map(repr, parts))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list of {_NAMES[parts[0]][1]}" if parts and parts[0] in _NAMES else "a list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    return f"a {getattr(origin, '__name__', origin)}"


_NAMES: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "texts"),
}
"""Type -> name of a value, of several."""


def takes_argument(function: Callable, name: str) -> bool:
    """Whether a function has an argument of this name, or takes any."""
    found = signature(function).parameters.values()
    return any(each.name == name or each.kind is Parameter.VAR_KEYWORD for each in found)


def check_text(name: str, text: str) -> None:
    """Raise ValueError if a str has half of a surrogate pair, as JSON can express it: UTF-8
    cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):x}"
        raise ValueError(
            f"{name} has {half}, half of a character: write the character itself, or both halves"
        ) from error
