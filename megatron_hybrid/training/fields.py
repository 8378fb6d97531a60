"""Base of a recipe's sections: plain dataclasses that check themselves."""

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Self, get_args, get_type_hints

from megatron_hybrid.utils.other_names import advice
from megatron_hybrid.utils.validation import check_fields


class Fields:
    """Base of dataclasses whose fields a recipe sets."""

    @classmethod
    def of(cls, section: str, values: Mapping[str, Any] | None) -> Self:
        """Make a section of a recipe, and check it.

        Args:
            section: its name, for errors.
            values: field -> value; missing fields, or all if None, have their defaults.

        Raises:
            ValueError: an unknown field, or an illegal value; the message says where.
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
            hints = get_type_hints(cls)
            fields = cls(**{name: as_number(value, hints[name]) for name, value in values.items()})
            fields.check()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{section}: {error}") from error
        return fields

    def check(self) -> None:
        """Check the values against the annotations. Subclasses check what these cannot express.

        Raises:
            ValueError: a field has an illegal value, or contradicts another one; the message names
                the field, the value, the limit and the remedy.
        """
        check_fields(self)


def check_known(section: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError if a key is unknown; the message says which one may be meant."""
    known = list(known)
    for key in given:
        if key not in known:
            remedy = advice(section, str(key), known) or f"its fields are {', '.join(known)}"
            raise ValueError(f"{section} has no field {key!r}: {remedy}")


def as_number(value: Any, hint: Any) -> Any:
    """Return the number that a text stands for in a field of numbers, since YAML reads `1e-3` as
    text; return any other value as it is."""
    if isinstance(value, str) and float in (hint, *get_args(hint)):
        with suppress(ValueError):
            return float(value)
    return value
