"""JSON that a model wrote, as text: nothing of it is lost, changed or read in two ways."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]"]', re.DOTALL)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is too large")
    return number


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_once, parse_float=_finite, parse_constant=_refused, strict=True
)


def decoded(text: str) -> Any:
    """The value of a whole JSON text.

    Raises:
        ValueError: it is none; or an object has a name twice, or a text has half of a character,
            or a number is not finite, so that others would read something else.
    """
    try:
        value = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def object_text(text: str) -> str:
    """The text of a JSON object, without space around it.

    Raises:
        ValueError: it is none.
    """
    text = text.strip()
    if not isinstance(decoded(text), dict):
        raise ValueError("it is no object")
    return text


def members(text: str) -> dict[str, str]:
    """The members of a JSON object: name -> the text of its value.

    Raises:
        ValueError: it is none.
    """
    text, found = object_text(text), {}
    at = _next(text, 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = _next(text, _next(text, at) + 1)  # behind the colon
        _, end = _DECODER.raw_decode(text, start)
        found[name] = text[start:end]
        at = _next(text, end)
        at = _next(text, at + 1) if text[at] == "," else at
    return found


def elements(text: str) -> list[str]:
    """The texts of the values in a JSON list.

    Raises:
        ValueError: it is none.
    """
    text, found = text.strip(), []
    if not isinstance(decoded(text), list):
        raise ValueError("it is no list")
    at = _next(text, 1)
    while text[at] != "]":
        _, end = _DECODER.raw_decode(text, at)
        found.append(text[at:end])
        at = _next(text, end)
        at = _next(text, at + 1) if text[at] == "," else at
    return found


class Brackets:
    """Follows brackets through a growing text, each character once. Those in quotes do not count.

    Args:
        quotes: characters around texts.
    """

    def __init__(self, quotes: str = '"'):
        self._inside = {q: re.compile(rf"[^{q}\\]*(?:\\.[^{q}\\]*)*", re.DOTALL) for q in quotes}
        self._next = re.compile(rf"[{{}}\[\]{quotes}]")
        self._at = self._depth = 0
        self._quote = ""

    def closes(self, text: str) -> bool:
        """Whether the outermost bracket closes in what is new in the text since the last call."""
        has_closed = False
        while self._at < len(text):
            if self._quote:
                self._at = self._inside[self._quote].match(text, self._at).end()
                if not text.startswith(self._quote, self._at):
                    break
                self._at, self._quote = self._at + 1, ""
            found = self._next.search(text, self._at)
            self._at = len(text) if found is None else found.end()
            if found is not None and found[0] in self._inside:
                self._quote = found[0]
            elif found is not None:
                self._depth = max(0, self._depth + (1 if found[0] in "{[" else -1))
                has_closed |= self._depth == 0
        return has_closed


def value_end(text: str, at: int = 0) -> int | None:
    """Where the object or list that begins at a position ends, by its brackets; None: behind the
    text."""
    depth = 0
    for found in _TOKENS.finditer(text, at):
        if (token := found[0]) == '"':  # is not closed
            return None
        if len(token) == 1:
            depth += 1 if token in "{[" else -1
            if depth <= 0:
                return found.end()
    return None


def ends_in_string(text: str) -> bool:
    """Whether a text of JSON ends inside of a string."""
    return any(found[0] == '"' for found in _TOKENS.finditer(text))


def _next(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()
