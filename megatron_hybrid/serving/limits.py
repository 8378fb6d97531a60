"""Limits of what costs more than its bytes, beside those that a field declares."""

from __future__ import annotations

import json

from megatron_hybrid.serving.errors import ApiError
from megatron_hybrid.serving.fields import ChatFields, GenerationFields

MAX_TOOLS_CHARS = 256 << 10
"""Of the JSON of all tools: templates write it into the prompt."""


def check_tools(fields: GenerationFields) -> None:
    """Raise ApiError for tools of too many characters. It takes long for long ones."""
    if isinstance(fields, ChatFields) and fields.tools:
        size = len(json.dumps(fields.shown_tools))
        if size > MAX_TOOLS_CHARS:
            raise ApiError(
                400,
                f"tools have {size} characters of JSON, and may have {MAX_TOOLS_CHARS}: send fewer",
                "tools",
            )


def check_count(num_prompts: int, n: int, most: int) -> None:
    """Raise ApiError for more answers than the server ever takes of one key at a time."""
    if num_prompts * n > most:
        raise ApiError(
            400,
            f"{num_prompts} prompts with n={n} are {num_prompts * n} requests, and one key may "
            f"have {most} at a time: send several requests",
            "prompt" if num_prompts > 1 else "n",
        )
