"""Checks of a user's values: numbers, texts, functions, and fields by their annotations."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from inspect import Parameter, signature
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

LARGEST_INT = (1 << 32) - 1
"""Largest integer of a field: no size, count or seed needs more."""
LARGEST_FLOAT = 1e18
"""Largest number of a field without an upper limit: float32 holds its square."""
_MOST_SHOWN = 200
"""Characters of a value in an error."""


def is_int(value: Any) -> bool:
    """Return whether a value is an integer, also one of numpy, but not a bool."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, also one of numpy, but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class Range:
    """Limits of a number, in the annotation of its field: `Annotated[int, Range(ge=1)]`. For a text
    or a list they are limits of its length."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __contains__(self, value: Any) -> bool:
        number = len(value) if hasattr(value, "__len__") else value
        return (
            (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
        )

    def __str__(self) -> str:
        if self.ge is not None and self.le is not None:
            return f"from {self.ge} to {self.le}"
        words = {"ge": "of {} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
        given = {name: getattr(self, name) for name in words}
        texts = [words[name].format(limit) for name, limit in given.items() if limit is not None]
        return " and ".join(texts)

    def __get_pydantic_core_schema__(self, source: type, handler: Callable) -> dict[str, Any]:
        """Return a schema with which pydantic enforces the same limits of a number."""
        limits = vars(_limits_of(source, self)).items()
        return {**handler(source), **{name: limit for name, limit in limits if limit is not None}}


WHOLE = Range(ge=0, le=LARGEST_INT)
"""Limits of whole numbers whose annotation has none."""


def check_fields(instance: Any, prefix: str = "") -> None:
    """Check the fields of a dataclass against their annotations; see `check_field`. Numbers become
    Python's, and whole ones in fields of floats become floats.

    prefix: of a field's name, for the error.

    Raises:
        ValueError: a field has an illegal value.
    """
    for name, hint, takes in _field_takers(type(instance)):
        value = getattr(instance, name)
        if not takes(value):
            check_field(prefix + name, value, hint)
        elif is_number(value):
            kinds = [_without_limits(kind) for kind in kinds_of(hint)]
            is_whole = is_int(value) and (int in kinds or float not in kinds)
            object.__setattr__(instance, name, int(value) if is_whole else float(value))


@cache
def _field_takers(of: type) -> list[tuple[str, Any, Callable[[Any], bool]]]:
    hints = type_hints(of)
    return [(each.name, hints[each.name], _taker(hints[each.name])) for each in fields(of)]


@cache
def type_hints(of: type) -> dict[str, Any]:
    """Return field -> annotation, resolved, with its limits."""
    return get_type_hints(of, include_extras=True)


def check_field(name: str, value: Any, hint: Any) -> None:
    """Check a value against the annotation of its field. Numbers must be finite, within
    +-`LARGEST_FLOAT` and the annotation's `Range`; whole ones without a range must lie from 0 to
    `LARGEST_INT`.

    Args:
        name: of the field, for the error.
        value: of the field.
        hint: the annotation, resolved.

    Raises:
        ValueError: the value is illegal; the message has the name, the value and what it must be.
    """
    kinds = kinds_of(hint)
    if _taker(hint)(value):
        return
    for kind in map(_without_limits, kinds):
        for key, part in _parts_of(value, kind):
            *of_keys, of_parts = _part_hints(kind)
            for of_key in of_keys:
                check_field(f"{name}: a key", key, of_key)
            check_field(f"{name}[{key!r}]", part, of_parts)
    choices = [choice for kind in kinds for choice in get_args(kind) if get_origin(kind) is Literal]
    if choices and set(kinds) <= {Literal[tuple(choices)], type(None)}:
        *others, last = map(repr, choices)
        listed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{name} is {shown(value)}; use {listed}.")
    if is_int(value) and int in kinds:
        wanted = f"a whole number {WHOLE}"
    elif is_number(value) and not _is_finite(value) and any(map(_is_open_float, kinds)):
        wanted = f"a finite number, of {LARGEST_FLOAT:g} at most"
    else:
        named = dict.fromkeys(_describe(kind) for kind in kinds if kind is not type(None))
        wanted = " or ".join(named) or "left out"
    if _taker(hint)([value]):
        wanted += f", such as {shown([value])}"
    raise ValueError(f"{name} is {shown(value)}; it must be {wanted}.")


def shown(value: Any) -> str:
    """Format a value for an error; of a long one, only the beginning is shown."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


@cache
def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, also of nested ones, or another annotation itself."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for each in get_args(hint) for kind in kinds_of(each))
    return (type(None) if hint is None else hint,)


@cache
def _taker(hint: Any) -> Callable[[Any], bool]:
    """Return a function that checks whether a value fits an annotation, fast, as lists are long."""
    kind, *others = kinds_of(hint)
    if others:
        takers = [_taker(each) for each in (kind, *others)]
        return lambda value: any(takes(value) for takes in takers)
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return lambda value: value in arguments and (is_int(value) or not is_number(value))
    if origin is Annotated:
        base, limits = arguments[0], _limits_of(*arguments)
        if base is int:
            return lambda value: is_int(value) and value in limits
        if base is float and limits.le is not None:
            return lambda value: is_number(value) and value > -math.inf and value in limits
        takes_base = _taker(base)
        return lambda value: takes_base(value) and value in limits
    if origin is int:
        return lambda value: is_int(value) and value in WHOLE
    if origin is float:
        return lambda value: is_number(value) and _is_finite(value)
    if origin is Any or not isinstance(origin, type):
        return lambda value: True  # nothing to check it by
    if not arguments or not issubclass(origin, Sequence | Mapping):
        return lambda value: _is_instance(value, origin)
    *takes_key, takes_part = map(_taker, _part_hints(kind))
    if issubclass(origin, Mapping):
        return lambda value: (
            _is_instance(value, origin)
            and all(map(takes_key[0], value))
            and all(map(takes_part, value.values()))
        )
    if takes_key:  # a tuple of some parts
        return lambda value: _is_instance(value, origin)
    return lambda value: _is_instance(value, origin) and all(map(takes_part, value))


def _without_limits(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _is_instance(value: Any, origin: type) -> bool:
    if isinstance(value, str) and not issubclass(origin, str) and issubclass(origin, Sequence):
        return False
    return isinstance(value, Sequence if origin is tuple else origin)  # YAML has lists alone


def _parts_of(value: Any, kind: Any) -> Iterable[tuple[Any, Any]]:
    """Return places and parts of a sequence or a mapping, if its annotation says what they are."""
    origin = get_origin(kind)
    if not isinstance(origin, type) or not _is_instance(value, origin):
        return ()
    if issubclass(origin, Mapping):
        return value.items()
    if origin is tuple and Ellipsis not in get_args(kind):
        return ()
    return enumerate(value) if issubclass(origin, Sequence) else ()


def _part_hints(kind: Any) -> list[Any]:
    """Return the annotations of the keys, if it is a mapping, and of the parts."""
    return [each for each in get_args(kind) if each is not Ellipsis]


def _is_open_float(kind: Any) -> bool:
    base, *limits = get_args(kind) or (kind,)
    return base is float and all(limit.le is None for limit in limits)


def _is_finite(value: Any) -> bool:
    return -LARGEST_FLOAT <= value <= LARGEST_FLOAT


def _limits_of(kind: type, limits: Range) -> Range:
    is_open = limits.le is None and limits.lt is None
    return replace(limits, le=LARGEST_INT) if kind is int and is_open else limits


def _describe(kind: Any) -> str:
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in _NAMES:
        return _NAMES[origin][0]
    if origin is Annotated:
        of_length = "" if parts[0] in (int, float) else "with a length "
        return f"{_describe(parts[0])} {of_length}{_limits_of(*parts)}"
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
"""Type -> name of one value, name of several."""


def takes_argument(function: Callable, name: str) -> bool:
    """Return whether a function has an argument of this name, or takes any."""
    found = signature(function).parameters.values()
    return any(each.name == name or each.kind is Parameter.VAR_KEYWORD for each in found)


def json_value(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or it is too deep or has too many digits for Python.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:  # after a semicolon Python names a function of its own
        raise ValueError(str(error).partition(";")[0]) from None


def check_text(name: str, text: str) -> None:
    """Raise ValueError if a str has half of a surrogate pair, which JSON can express, but not
    UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):x}"
        raise ValueError(
            f"{name} has {half}, half of a character: write the character itself, or both halves"
        ) from error
