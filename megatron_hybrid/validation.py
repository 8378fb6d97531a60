"""Checks of a user's numbers and texts."""

from numbers import Integral, Real
from typing import Any


def is_int(value: Any) -> bool:
    """Whether a value is an integer, also numpy's, but no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, also numpy's, but no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


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
