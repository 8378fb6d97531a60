"""json_response: bodies of any size, without a wait of the event loop."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import Callable
from math import inf
from typing import Any, TypeVar

from fastapi import Response
from pydantic_core import to_json

from megatron_hybrid.utils.daemon_threads import DaemonThreads

R = TypeVar("R")

FEW_TOKENS = 500
"""Prompt, answer and their most likely tokens together."""
_texts = DaemonThreads("texts", 4)
_LEAST_PACKED = 1024
"""Bytes that are worth it."""
_GZIP_LEVEL = 1
_GZIP = re.compile(r"(?i)\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))")


async def to_cpu_thread(job: Callable[[], R]) -> R:
    """The result of a job with long texts, such as tokenizing, templates, JSON: in threads that
    nothing else uses."""
    return await asyncio.wrap_future(_texts.submit(job))


async def json_response(make: Callable[[], Any], num_tokens: float = inf) -> Response:
    """An answer, made and encoded in a thread, so that the event loop waits for none of it; where
    it is of few tokens the thread would cost more."""
    if num_tokens < FEW_TOKENS:
        return Response(encode_json(make()), media_type="application/json")
    body = await to_cpu_thread(lambda: encode_json(make()))
    return Response(body, media_type="application/json")


async def gzip_json_response(make: Callable[[], Any], accepts: str) -> Response:
    """`json_response`, compressed where the client takes that.

    accepts: the header Accept-Encoding.
    """

    def packed() -> tuple[bytes, dict[str, str]]:
        body, headers = encode_json(make()), {"Vary": "Accept-Encoding"}
        if len(body) < _LEAST_PACKED or not _GZIP.search(accepts):
            return body, headers
        return gzip.compress(body, _GZIP_LEVEL), headers | {"Content-Encoding": "gzip"}

    body, headers = await to_cpu_thread(packed)
    return Response(body, headers=headers, media_type="application/json")


def encode_json(value: Any) -> bytes:
    """Return the compact JSON of a body or an event; NaN and infinity become null."""
    return to_json(value, inf_nan_mode="null")
