"""What no JSON of a body may have, in any field."""

from __future__ import annotations

import json
import re

from fastapi import Request

from megatron_hybrid.serving.errors import ApiError

_SUSPECT = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]"
    rb"|\xed[\xa0-\xbf]"
    rb"|NaN|Infinity"
    rb"|\d[eE]\+?\d{3}"
)
"""Bytes that may be half of a character, or a number that JSON lacks: most bodies have none."""


async def check_json(request: Request) -> None:
    """Raise ApiError for a body with half of a character, or a number that is none: Python's JSON
    takes both, and neither can be written again."""
    if request.method != "POST" or not _SUSPECT.search(await request.body()):
        return
    try:
        body = await request.json()
    except ValueError:  # which the route refuses
        return
    for name, value in body.items() if isinstance(body, dict) else [("", body)]:
        try:
            json.dumps([name, value], ensure_ascii=False, allow_nan=False).encode()
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
