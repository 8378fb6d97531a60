"""Base of a recipe's sections: plain dataclasses that check themselves."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Self

from megatron_hybrid.validation import is_number


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
        """Numbers where the defaults are numbers, text where they are text. YAML reads `1e-3` as
        text, which becomes a number here.

        Raises:
            ValueError: another type.
        """
        for field in dataclasses.fields(self):
            value, default = getattr(self, field.name), field.default
            kinds = field.type if isinstance(field.type, str) else str(field.type)
            if value is None and "None" in kinds:
                continue
            if "float" in kinds and isinstance(value, str):
                try:
                    value = float(value)
                except ValueError:
                    pass
                else:
                    setattr(self, field.name, value)
            if isinstance(default, bool):
                fits, wanted = isinstance(value, bool), "true or false"
            elif kinds.startswith("float"):
                fits, wanted = is_number(value), "a number"
            elif kinds.startswith("int"):
                fits, wanted = isinstance(value, int) and not isinstance(value, bool), "an integer"
            elif kinds.startswith("str"):
                fits, wanted = isinstance(value, str), "text"
            else:
                continue
            if not fits:
                raise ValueError(f"{field.name} is {value!r}; it must be {wanted}.")

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

    def require_one_of(self, name: str, *choices: str) -> None:
        """Raise ValueError if the field has another value."""
        if getattr(self, name) not in choices:
            raise ValueError(f"{name} is {getattr(self, name)!r}; use one of {', '.join(choices)}.")


def check_known(section: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError if a key is not known; the message has the nearest known ones."""
    known = list(known)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3)
            hint = f"Near it: {', '.join(near)}." if near else f"It has: {', '.join(known)}."
            raise ValueError(f"{section} has no field {key!r}. {hint}")
