"""ApiError: a refusal as OpenAI's clients read it."""

from __future__ import annotations

import re
from typing import Any

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
RETRY_SECONDS = 1
"""In the header Retry-After of 429 and 503."""


class ApiError(Exception):
    """An answer with an error.

    Args:
        status: of HTTP.
        message: names the value, the limit and the remedy.
        param: field of the request.
        code: for programs.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer, or of an event in a stream."""
        kind = _KINDS.get(self.status, "server_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer."""
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_SECONDS)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


_API_NAMES = {
    "num_tokens_to_generate": "max_tokens",
    "stop_words": "stop",
    "top_n_logprobs": "top_logprobs",
    "return_log_probs": "logprobs",
    "salt": "cache_salt",
}
"""Fields of `SamplingParams` and of the engine -> those of the API, where they differ."""


def refusal_of(error: Exception) -> ApiError:
    """What the engine's TypeError or ValueError says, with the field it is about."""
    text = str(error)
    param = code = None
    found = re.match(r"SamplingParams: (\w+)", text)
    found = found or re.match(r"(n|salt|cache_breakpoints)\b", text)
    if found:
        param = _API_NAMES.get(found[1], found[1])
    elif "guide" in text:
        param = "response_format"
    elif "max_sequence_length" in text or "cache_bytes" in text:
        param, code = "messages", "context_length_exceeded"
    return ApiError(400, text, param, code)
