"""Bodies: JSON that is read beside the event loop, and what it may not have, in any field."""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute

from megatron_hybrid.serving.errors import ApiError
from megatron_hybrid.serving.json_response import encode_json, in_texts_thread

LARGE = 64 << 10
"""Bytes of a body that is read in a thread; where it is smaller the thread would cost more."""
_SUSPECT = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]"
    rb"|\xed[\xa0-\xbf]"
    rb"|NaN|Infinity"
    rb"|\d[eE]\+?\d{3}"
)
"""Bytes that may be half of a character, or a number that JSON lacks: most bodies have none."""
_LONGEST = 16
"""Bytes that `_SUSPECT` looks at together."""
_PIECE = 32 << 10
"""Bytes or characters that are looked at in one call: for so long no other thread runs."""
_NUMBERS = str.maketrans("", "", "0123456789+-.eE, \n\r\t")
_decode = json.JSONDecoder().raw_decode
_SPACE = re.compile(r"[ \n\r\t]*")


class BodyRequest(Request):
    """A request whose large body is read in a thread."""

    async def json(self) -> Any:
        if not hasattr(self, "_value"):
            body = await self.body()
            if len(body) < LARGE:
                self._value = json.loads(body)
            else:
                self._value = await in_texts_thread(lambda: read_json(body))
        return self._value


class BodyRoute(APIRoute):
    """A route that reads a `BodyRequest`."""

    def get_route_handler(self):
        handle = super().get_route_handler()

        async def handle_body(request: Request):
            return await handle(BodyRequest(request.scope, request.receive))

        return handle_body


async def check_json(request: Request) -> None:
    """Raise ApiError for a body with half of a character, or a number that is none: Python's JSON
    takes both, and neither can be written again."""
    if request.method != "POST":
        return
    body = await request.body()
    if len(body) < LARGE:
        if not _SUSPECT.search(body):
            return
    elif not await in_texts_thread(lambda: _is_suspect(body)):
        return
    try:
        value = await request.json()
    except ValueError:  # which the route refuses
        return
    await in_texts_thread(lambda: _check(value))


def _is_suspect(body: bytes) -> bool:
    return any(
        _SUSPECT.search(body, max(0, start - _LONGEST), start + _PIECE)
        for start in range(0, len(body) + _LONGEST, _PIECE - _LONGEST)
    )


def _check(body: Any) -> None:
    for name, value in body.items() if isinstance(body, dict) else [("", body)]:
        try:
            encode_json([name, value])
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):x}"
            raise ApiError(
                400,
                f"{_shown(name)} has {half}, half of a character: write the character itself, or "
                "both halves",
                _shown(name),
            ) from None
        except ValueError:
            raise ApiError(
                400, f"{_shown(name)} has NaN or infinity, which JSON lacks", _shown(name)
            ) from None


def _shown(name: str) -> str:
    return name.encode(errors="replace").decode() or "the body"


def read_json(body: bytes) -> Any:
    """`json.loads` for a thread beside others: lists and the body's own object are read piece by
    piece, so that the others run meanwhile.

    Raises:
        ValueError: it is no JSON.
    """
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    value, at = _read(text, _skip(text, 0), depth=0)
    if (at := _skip(text, at)) != len(text):
        raise json.JSONDecodeError("Extra data", text, at)
    return value


def _skip(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()


def _read(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value at a place, and its end."""
    if text[at : at + 1] == "[" and depth < 3:
        return _read_list(text, at, depth)
    if text[at : at + 1] == "{" and depth < 3:
        return _read_object(text, at, depth)
    try:
        return _decode(text, at)
    except StopIteration as error:
        raise json.JSONDecodeError("Expecting value", text, error.value) from None


def _read_list(text: str, at: int, depth: int) -> tuple[list, int]:
    found: list[Any] = []
    at = _skip(text, at + 1)
    if text[at : at + 1] == "]":
        return found, at + 1
    mixed_until = 0
    while True:
        if at >= mixed_until and text[at : at + 1].isdigit():
            cut = text.rfind(",", at, at + _PIECE)
            if cut > at and not (numbers := text[at:cut]).translate(_NUMBERS):
                found += json.loads(f"[{numbers}]")
                at = _skip(text, cut + 1)
                continue
            mixed_until = max(cut, at + 1)  # what is no number is looked for once
        value, at = _read(text, at, depth + 1)
        found.append(value)
        at, is_last = _next(text, at, "]")
        if is_last:
            return found, at


def _read_object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _skip(text, at + 1)
    if text[at : at + 1] == "}":
        return found, at + 1
    while True:
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name in double quotes", text, at)
        name, at = _decode(text, at)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
        found[name], at = _read(text, _skip(text, at + 1), depth + 1)
        at, is_last = _next(text, at, "}")
        if is_last:
            return found, at


def _next(text: str, at: int, end: str) -> tuple[int, bool]:
    """The place behind what follows a value: a comma, or the end, of which it tells."""
    at = _skip(text, at)
    if text[at : at + 1] == end:
        return at + 1, True
    if text[at : at + 1] != ",":
        raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    return _skip(text, at + 1), False
