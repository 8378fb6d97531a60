"""What counts as a number and as text, wherever a user gives one."""

from numbers import Integral, Real
from typing import Any


def is_int(value: Any) -> bool:
    """Whether a value is a whole number, numpy's among them; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a number, numpy's among them; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_text(name: str, text: str) -> None:
    """Raises ValueError where a str has halves of a surrogate pair, as JSON can write them: no text
    in UTF-8 has any."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):x}"
        raise ValueError(
            f"{name} has {half}, half of a character: write the character itself, or both halves"
        ) from error
