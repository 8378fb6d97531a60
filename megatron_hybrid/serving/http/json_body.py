"""Reading of JSON bodies by pydantic_core. What cannot be written as JSON again is refused.

A body is measured before it is parsed: a `RequestBudget` is the most that it may hold, from what
the engine can answer. The tokenizer, which is `limited_to` the context, measures its texts: all
routes tokenize by that one.
"""

import codecs
import json
import math
import re
from typing import Any

import numpy as np
from fastapi import HTTPException, Request
from fastapi.routing import APIRoute
from pydantic_core import from_json

from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.http.json_response import LARGE_BYTES, in_turn

_MAY_BE_INFINITE = re.compile(rb"\d(?:[eE]\+?\d{3}|\d{209})")
"""Numbers beyond float64, which become infinity, have three digits of exponent, or at least 210
digits, with an exponent of two."""
_OTHERS = 64 << 10
"""Values in addition to those of prompts: schemas, tools, labels, biases."""
_MEMBERS_OF_TOKEN = 16
"""Objects, lists and members for each token of the context. A message takes at least one token, and
has a role, a content and perhaps calls with ids, names and arguments."""
_STRUCTURE = np.zeros(256, dtype=bool)
_STRUCTURE[[*b"[{:"]] = True


class BodyRequest(Request):
    """A request whose body is measured, and read by `read_json`; a large body waits its turn."""

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


class RequestBudget:
    """The most that a body of JSON may hold.

    Args:
        context: tokens of a prompt and its answer.
        max_prompts: most prompts of one request.
        vocab_size: that of the model.
    """

    def __init__(self, context: int, max_prompts: int, vocab_size: int):
        self.max_members = _MEMBERS_OF_TOKEN * context + _OTHERS
        """Most objects, lists, and members of objects."""
        self.max_elements = context * max_prompts + vocab_size + _OTHERS
        """Most commas: elements of lists, such as token ids, and members."""

    def check(self, body: bytes) -> None:
        """Raise ApiError for a body of more values than any request that can be answered."""
        if (
            sum(map(body.count, (b"[", b"{", b":"))) <= self.max_members
            and body.count(b",") <= self.max_elements
        ):
            return
        members, elements = values_of(body)
        for count, most, what in (
            (members, self.max_members, "objects, lists and members"),
            (elements, self.max_elements, "elements"),
        ):
            if count > most:
                text = f"the body has {count} {what}, and this server's context allows {most}"
                raise ApiError(400, f"{text}: send less")


def values_of(body: bytes) -> tuple[int, int]:
    """Count the objects, lists and members, and the commas of some JSON, outside of its strings.
    The JSON is not checked; up to a mistake in it the counts are right."""
    data = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    is_outside = ~np.logical_xor.accumulate(data == ord('"'))
    members = np.count_nonzero(_STRUCTURE[data] & is_outside)
    return members, np.count_nonzero((data == ord(",")) & is_outside)
