"""Base of a recipe's sections: plain dataclasses that check themselves."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Self, get_args, get_type_hints

from megatron_hybrid.utils.validation import check_field


class Fields:
    """Base of dataclasses whose fields a recipe sets."""

    @classmethod
    def of(cls, section: str, values: Mapping[str, Any] | None) -> Self:
        """The section of a recipe, checked.

        Args:
            section: its name, for errors.
            values: field -> value; those left out, and all if None, have their defaults.

        Raises:
            ValueError: an unknown field, or a value that is not legal; the message says where.
        """
        if values is not None and not isinstance(values, Mapping):
            raise ValueError(f"{section} is {values!r}; it must be a section with fields.")
        values = dict(values or {})
        check_known(section, values, (field.name for field in dataclasses.fields(cls)))
        for field in dataclasses.fields(cls):
            defaults = (field.default, field.default_factory)
            if field.name not in values and set(defaults) == {dataclasses.MISSING}:
                raise ValueError(f"{section} needs the field {field.name!r}.")
        try:
            fields = cls(**values)
            fields.check_types()
            fields.check()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{section}: {error}") from error
        return fields

    def check(self) -> None:
        """Check the values.

        Raises:
            ValueError: a field has no legal value, or contradicts another one; the message names
                the field, the value, the limit and what to do.
        """

    def check_types(self) -> None:
        """Check the values against the annotations; see `check_field` and `as_number`.

        Raises:
            ValueError: another type, or a number without bounds.
        """
        hints = _type_hints(type(self))
        for field in dataclasses.fields(self):
            value, hint = getattr(self, field.name), hints[field.name]
            setattr(self, field.name, value := as_number(value, hint))
            check_field(field.name, value, hint)

    def require_positive(self, *names: str) -> None:
        """Raise ValueError if one of the fields is 0 or less."""
        for name in names:
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name} is {value}; it must be positive.")

    def require_at_least(self, least: float, *names: str) -> None:
        """Raise ValueError if one of the fields is below `least`; None is not."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} is {value}; it must be {least} or more.")


def check_known(section: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError if a key is not known; the message has the nearest known ones."""
    known = list(known)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3)
            hint = f"Near it: {', '.join(near)}." if near else f"It has: {', '.join(known)}."
            raise ValueError(f"{section} has no field {key!r}. {hint}")


_type_hints = cache(get_type_hints)


def as_number(value: Any, hint: Any) -> Any:
    """The number that a text stands for in a field of numbers, since YAML reads `1e-3` as text; any
    other value as it is."""
    if isinstance(value, str) and float in (hint, *get_args(hint)):
        with suppress(ValueError):
            return float(value)
    return value
