"""Read JSON bodies by pydantic_core, and refuse what cannot be written as JSON again."""

import codecs
import json
import math
import re
from typing import Any

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute
from pydantic_core import from_json

from megatron_hybrid.serving.errors import ApiError
from megatron_hybrid.serving.json_response import LARGE_BYTES, in_turn

_MAY_BE_INFINITE = re.compile(rb"\d(?:[eE]\+?\d{3}|\d{308})")
"""Numbers beyond float64, which become infinity, have three digits of exponent, or 309 digits."""


class BodyRequest(Request):
    """A request whose body is measured, and read by `read_json`; a large one in its turn."""

    async def json(self) -> Any:
        body, budget = await self.body(), self.app.state.budget

        def read() -> Any:
            budget.check(body)
            return read_json(body)

        try:
            return read() if len(body) <= LARGE_BYTES else await in_turn(read, self)
        except ApiError as error:  # FastAPI's handler lets these pass
            raise HTTPException(error.status, str(error)) from error
        finally:
            self.state.body_is_read()


class BodyRoute(APIRoute):
    """A route that reads a `BodyRequest`."""

    def get_route_handler(self):
        handle = super().get_route_handler()

        async def handle_body(request: Request):
            return await handle(BodyRequest(request.scope, request.receive))

        return handle_body


def read_json(body: bytes) -> Any:
    """Return the value of a body in UTF-8.

    Raises:
        json.JSONDecodeError: the body is not JSON, or it is too deep, or has half of a character (a
            surrogate without its other half), NaN, infinity, a number beyond float64, or too many
            digits.
    """
    try:
        value = from_json(body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        text = str(error).replace("recursion limit exceeded", "lists and objects are over 200 deep")
        text = text.replace("number out of range", "an integer has more than 4300 digits")
        raise json.JSONDecodeError(text, "", 0) from None
    if _MAY_BE_INFINITE.search(body) and _has_infinity(value):
        raise json.JSONDecodeError("a number is beyond float64 (1.8e308)", "", 0)
    return value


def _has_infinity(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_has_infinity, value))
    return isinstance(value, float) and math.isinf(value)
