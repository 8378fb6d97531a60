"""ApiError: a refusal as OpenAI's clients read it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_hybrid.utils.validation import shown

_KINDS = {
    **dict.fromkeys((400, 405, 408, 413, 431), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_MAX_MESSAGE = 2000
"""Characters."""
RETRY_SECONDS = 1
"""Seconds in the header Retry-After of 429 and 503."""


class ApiError(Exception):
    """An answer with an error.

    Args:
        status: that of HTTP.
        message: names the value, the limit and the remedy.
        param: the field of the request.
        code: a name of the error, for programs.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        if len(message) > _MAX_MESSAGE:  # it may quote the request
            message = f"{message[:_MAX_MESSAGE]}..."
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer, or of an event in a stream."""
        kind = _KINDS.get(self.status, "server_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def body_of(self, path: str) -> dict[str, Any]:
        """Return `body` in the form that the clients of a route read."""
        if not path.startswith("/v1/messages"):
            return self.body
        kinds = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
        kind = kinds.get(self.status, _KINDS.get(self.status, "api_error"))
        param = {} if self.param is None else {"param": self.param}
        return {"type": "error", "error": {"type": kind, "message": str(self), **param}}

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_SECONDS)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


_API_NAMES = {
    "num_tokens_to_generate": "max_tokens",
    "stop_words": "stop",
    "bad_words_ids": "bad_words",
    "thinking_budget": "thinking_token_budget",
    "top_n_logprobs": "top_logprobs",
    "return_log_probs": "logprobs",
    "max_sequence_length": "--context",
    "cache_bytes": "--cache-mib",
    "max_requests": "--max-requests",
    "max_tokens": "the engine's max_tokens",
}
"""The engine's names -> those of the API and of `serve`, where they differ."""


def refusal_of_field(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the refusal of the first field, or of a part of it, that pydantic's `errors()` name.
    If a field has several types, the error of the type that fits best counts."""
    above = ("body", "query", "ChatFields", "CompletionFields")

    def place_of(error: Mapping[str, Any]) -> list[str]:
        return [str(part) for part in error["loc"] if part not in above]

    own = [error for error in errors if place_of(error)[:1] == place_of(errors[0])[:1]]
    error = max(own, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
    param, *inside = place_of(error) or [None]
    # Names of types are parts of a place, too.
    place = [
        param,
        *(part for part in inside if not re.fullmatch(r"(constrained-)?str|.*\[.*", part)),
    ]
    message = error["msg"].removeprefix("Value error, ")
    if param is None and error["type"] in ("missing", "model_attributes_type"):
        message = "send a JSON object, with the fields of this route"
    if error["type"] == "extra_forbidden":
        message = f"{shown(place.pop())} is unknown: leave it out"
    inner = "".join(f".{part}" for part in place[1:])
    return ApiError(400, f"{param or 'the body'}{inner}: {message}", param)


def refusal_of(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """Return the refusal for the engine's TypeError or ValueError, with its field and flag.

    Args:
        names: `GenerationFields.caller_names` of the request.
    """
    names = {**_API_NAMES, **(names or {})}
    given = str(error)
    param = code = None
    found = re.match(r"SamplingParams: (\w+)", given)
    found = found or re.match(r"(n|cache_breakpoints|priority)\b", given)
    found = found or re.search(
        r"\b(logit_bias|allowed_token_ids|bad_words_ids|thinking_budget)\b", given
    )
    if found:
        param = names.get(found[1], found[1])
    elif given.startswith("stop token"):
        param = "stop_token_ids"
    elif re.search(r"\bguide\b", given):
        param = names.get("guide")
    elif "exceed max_sequence_length" in given:
        param, code = names["num_tokens_to_generate"], "context_length_exceeded"
    else:
        param = names.get("prompt")
        if "max_sequence_length" in given or "cache_bytes" in given:
            code = "context_length_exceeded"
    engine_names = "|".join(_API_NAMES)
    text = re.sub(rf"\b({engine_names})\b", lambda name: names[name[1]], given)
    return ApiError(400, text.removeprefix("SamplingParams: "), param, code)
