"""Limits of a request's fields beside those of its body: what costs more than its bytes."""

from __future__ import annotations

import json

from megatron_hybrid.serving.errors import ApiError
from megatron_hybrid.serving.fields import ChatFields, GenerationFields

MAX_STOPS = 64
"""Strings of `stop` and of `bad_words`; and ids of `stop_token_ids`, times 16."""
MAX_STOP_CHARS = 1024
"""Of each: every new token is looked at for all of them."""
MAX_LOGIT_BIAS = 1024
"""Entries."""
MAX_TOOLS = 128
MAX_TOOLS_CHARS = 256 << 10
"""Of the JSON of all tools: templates write it into the prompt."""


def check_limits(fields: GenerationFields) -> None:
    """Raise ApiError for a field with too many or too long values. It takes long for long ones."""
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or ()
    _check(len(stops), MAX_STOPS, "strings", "stop")
    _check(max(map(len, stops), default=0), MAX_STOP_CHARS, "characters in one string", "stop")
    _check(len(fields.bad_words or ()), MAX_STOPS, "strings", "bad_words")
    longest = max(map(len, fields.bad_words or ()), default=0)
    _check(longest, MAX_STOP_CHARS, "characters in one string", "bad_words")
    _check(len(fields.stop_token_ids or ()), 16 * MAX_STOPS, "ids", "stop_token_ids")
    _check(len(fields.logit_bias or ()), MAX_LOGIT_BIAS, "entries", "logit_bias")
    if isinstance(fields, ChatFields) and fields.tools:
        _check(len(fields.tools), MAX_TOOLS, "functions", "tools")
        size = len(json.dumps(fields.shown_tools))
        _check(size, MAX_TOOLS_CHARS, "characters of JSON", "tools")


def check_count(num_prompts: int, n: int, most: int) -> None:
    """Raise ApiError for more answers than the server ever takes of one key at a time."""
    if num_prompts * n > most:
        raise ApiError(
            400,
            f"{num_prompts} prompts with n={n} are {num_prompts * n} requests, and one key may "
            f"have {most} at a time: send several requests",
            "prompt" if num_prompts > 1 else "n",
        )


def _check(found: int, most: int, what: str, param: str) -> None:
    if found > most:
        raise ApiError(400, f"{param} has {found} {what}, and may have {most}: send fewer", param)
