"""JSON that a model wrote, as text: nothing of it is lost, changed or read in two ways."""

import json
import math
import re
from typing import Any

from megatron_hybrid.serving.parsers.brackets import Brackets

_SPACE = re.compile(r"[ \t\n\r]*")
BETWEEN = re.compile(r"[\s,;]*")
_LOOSE = re.compile(r'"(?:\\.|[^"\\])*"?|,(?=\s*[}\]])', re.DOTALL)
_RAW = re.compile(r"(?<!\\)[\x00-\x1f]")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not finite")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite, strict=True
)


def decoded(text: str) -> Any:
    """Return the value of a whole JSON text.

    Raises:
        ValueError: it is not JSON; or others could read it differently: an object has a name twice,
            a text has half of a character, or a number is not finite.
    """
    try:
        value = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def object_text(text: str) -> str:
    """Return the text of a JSON object without space around it or commas before closing brackets,
    and with raw newlines and tabs escaped.

    Raises:
        ValueError: it is no JSON object.
    """
    text = _LOOSE.sub(_mended, text.strip())
    if not isinstance(decoded(text), dict):
        raise ValueError("it is no object")
    return text


def members(text: str) -> dict[str, str]:
    """Return the members of a JSON object: name -> the text of its value.

    Raises:
        ValueError: it is no JSON object.
    """
    text, found = object_text(text), {}
    at = _next(text, 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = _next(text, _next(text, at) + 1)  # after the colon
        _, end = _DECODER.raw_decode(text, start)
        found[name] = text[start:end]
        at = _next(text, end)
        at = _next(text, at + 1) if text[at] == "," else at
    return found


def objects(text: str, may_be_cut: bool = False) -> list[str]:
    """Return the texts of the objects in a list, or one after the other, also in a fence.

    may_be_cut: the last object may be open.

    Raises:
        ValueError: something else is there, or an object is open.
    """
    text = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    text, found, at = text.strip().removeprefix("[").removesuffix("]"), [], 0
    while (at := BETWEEN.match(text, at).end()) < len(text):
        stop = value_end(text, at) if text[at] == "{" else None
        if stop is None and not (may_be_cut and text[at] == "{"):
            raise ValueError(f"there is no object at {at}")
        stop = stop or len(text)
        found.append(text[at:stop])
        at = stop
    return found


def value_end(text: str, at: int = 0, quotes: tuple[str, ...] = ('"',)) -> int | None:
    """Return where the object or list that begins at a position ends, by its brackets, or None if
    it is open."""
    return Brackets(quotes, at=at).find(text, is_last=True)


def _mended(found: re.Match) -> str:
    return "" if found[0] == "," else _RAW.sub(lambda raw: json.dumps(raw[0])[1:-1], found[0])


def _next(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()
