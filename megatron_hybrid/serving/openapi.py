"""The description of the API at `/openapi.json`: what each route answers, by which status."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from megatron_hybrid.cache.report import MissReason
from megatron_hybrid.serving.door import OPEN_PATHS

Json = dict[str, Any]
COUNT: Json = {"type": "integer", "minimum": 0}
TEXT: Json = {"type": "string"}
TEXT_OR_NULL: Json = {"type": ["string", "null"]}
NUMBER_OR_NULL: Json = {"type": ["number", "null"]}
IDS: Json = {"type": "array", "items": COUNT}


def _object(required: Json, optional: Json | None = None, **more: Any) -> Json:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(kind: str, choice: Json, optional: Json | None = None) -> Json:
    head = {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT}
    return _object({**head, "choices": _list(choice), "usage": _ref("Usage")}, optional)


_CHOICE = {"index": COUNT, "finish_reason": TEXT_OR_NULL}
_LOGPROBS = {"logprobs": {"type": ["object", "null"]}}
_OF_PROMPT = {"prompt_token_ids": IDS, "prompt_logprobs": _list({"type": ["object", "null"]})}
_TOKENS = {"token_ids": IDS, "weight_epochs": _list(_list(COUNT))}
_CALL = _object(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": _object({"name": TEXT, "arguments": TEXT}),
    }
)
SCHEMAS: Json = {
    "Error": _object(
        {
            "error": _object(
                {"message": TEXT, "type": TEXT, "param": TEXT_OR_NULL, "code": TEXT_OR_NULL}
            )
        }
    ),
    "Prefix": _object(
        {
            "shared_tokens": COUNT | {"description": "Prompt tokens whose KV was reused."},
            "skipped_tokens": COUNT | {"description": "Prompt tokens that were not computed."},
            "fetched_tokens": COUNT
            | {"description": "Skipped tokens that were read from host memory or the disk."},
            "miss_reason": {
                "enum": [*(reason.value for reason in MissReason), None],
                "description": "Why no more tokens were skipped.",
            },
        }
    ),
    "Usage": _object(
        {
            **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT),
            "prompt_tokens_details": _object({"cached_tokens": COUNT}),
            "prefix": {"anyOf": [_ref("Prefix"), _list(_ref("Prefix"))]},
        },
        {"completion_tokens_details": _object({"reasoning_tokens": COUNT})},
    ),
    "Completion": _answer(
        "text_completion",
        _object({**_CHOICE, "text": TEXT, **_LOGPROBS}, {**_TOKENS, **_OF_PROMPT}),
    ),
    "Chat": _answer(
        "chat.completion",
        _object(
            {
                **_CHOICE,
                "message": _object(
                    {"role": {"const": "assistant"}, "content": TEXT_OR_NULL},
                    {"reasoning": TEXT, "tool_calls": _list(_CALL), "refusal": TEXT_OR_NULL},
                ),
                **_LOGPROBS,
            },
            _TOKENS,
        ),
        _OF_PROMPT,
    ),
    "Response": _object(
        {
            **{"id": TEXT, "object": {"const": "response"}, "created_at": {"type": "number"}},
            "status": {"enum": ["completed", "incomplete"]},
            "model": TEXT,
            "output": _list(_object({"id": TEXT, "type": TEXT, "status": TEXT})),
            "usage": {"type": "object"},
        }
    ),
    "Message": _object(
        {
            **{"id": TEXT, "type": {"const": "message"}, "role": {"const": "assistant"}},
            "model": TEXT,
            "content": _list(_object({"type": TEXT})),
            **{"stop_reason": TEXT, "stop_sequence": TEXT_OR_NULL, "usage": {"type": "object"}},
        }
    ),
    "MessageError": _object(
        {"type": {"const": "error"}, "error": _object({"type": TEXT, "message": TEXT})}
    ),
    "Model": _object(
        {
            **{"id": TEXT, "object": {"const": "model"}, "max_model_len": COUNT},
            **{"sampling_defaults": {"type": "object"}, "has_chat_template": {"type": "boolean"}},
        }
    ),
    "TokenIds": _object({"token_ids": IDS}),
}
_EVENTS = {"text/event-stream": {"schema": {"description": "server-sent events"}}}
_ANSWERS: dict[str, Json] = {
    "/v1/completions": _ref("Completion"),
    "/v1/chat/completions": _ref("Chat"),
    "/v1/responses": _ref("Response"),
    "/v1/messages": _ref("Message"),
    "/v1/messages/count_tokens": _object({"input_tokens": COUNT}),
    "/abort": _object({"aborted": {"type": "boolean"}}),
    "/tokenize": _object(
        {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": IDS,
            "token_strs": {"type": ["array", "null"], "items": TEXT},
        }
    ),
    "/detokenize": _object({"prompt": TEXT}),
    "/v1/completions/render": _list(_ref("TokenIds")),
    "/v1/chat/completions/render": _ref("TokenIds"),
    "/cache/explain": _object(
        {
            **dict.fromkeys(("prompt_tokens", "shared_tokens", "skipped_tokens"), COUNT),
            **{"known_tokens": COUNT, "reason": TEXT_OR_NULL, "text": TEXT},
        }
    ),
    "/cache/reset": _object({"reset": {"const": True}}),
    "/cache/save": _object({"saved": {"const": True}}),
    "/pause": _object({"status": {"const": "paused"}}),
    "/resume": _object({"status": {"const": "resumed"}}),
    "/is_paused": _object({"is_paused": {"type": "boolean"}}),
    "/sleep": _object({"status": {"enum": ["paused", "sleeping"]}}),
    "/wake_up": _object({"status": {"enum": ["sleeping", "awake"]}}),
    "/is_sleeping": _object({"is_sleeping": {"type": "boolean"}}),
    "/init_weight_transfer_engine": _object({"message": TEXT}),
    "/start_weight_update": _object({"message": TEXT}),
    "/update_weights": _object({"message": TEXT}),
    "/finish_weight_update": _object({"message": TEXT, "weight_epoch": COUNT}),
    "/weight_info": _object({"weight_version": TEXT_OR_NULL, "weight_epoch": COUNT}),
    "/get_world_size": _object({"world_size": COUNT}),
    "/cache/tree": {"type": "object"},
    "/cache/history": {"type": "object", "additionalProperties": _list(NUMBER_OR_NULL)},
    "/requests": _object({"requests": _list({"type": "object"})}),
    "/version": _object({"version": TEXT}),
    "/load": _object({"server_load": COUNT}),
    "/v1/models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "/v1/models/{name}": _ref("Model"),
}
"""JSON of a route with status 200; the others answer with plain text."""
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_BETWEEN_UPDATES = ("/pause", "/resume", "/sleep", "/wake_up", "/init_weight_transfer_engine")
_BETWEEN_UPDATES += ("/start_weight_update", "/update_weights", "/finish_weight_update")
_OF_OPERATOR = ("/cache/explain", "/cache/reset", "/cache/save", "/cache/tree", "/cache/history")
_OF_OPERATOR += (*_BETWEEN_UPDATES, "/is_paused", "/is_sleeping", "/weight_info", "/get_world_size")
_MEANINGS = {
    400: "a field is wrong, or not supported: `param` names it",
    401: "the API key is missing or wrong",
    403: "the route is the operator's",
    404: "there is no such model",
    409: "the cache, or the weights, cannot do so now",
    413: "the body is too large",
    429: "the key has too many unanswered requests",
    499: "the request was aborted",
    500: "the server failed",
    503: "too many requests, or the server shuts down",
    504: "the request took too long",
}


def describe(app: FastAPI) -> None:
    """Let an app describe its routes as they are."""

    def openapi() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _described(app: FastAPI) -> Json:
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            operation["responses"] = _responses(path, method)
            if path not in OPEN_PATHS:  # a server without keys needs none
                operation["security"] = [{"key": []}, {}]
    components = found.setdefault("components", {})
    schemas = components.get("schemas", {})
    unused = ("HTTPValidationError", "ValidationError")  # of FastAPI's own 422
    known = {k: _in_lines(v) for k, v in schemas.items() if k not in unused}
    components["schemas"] = known | SCHEMAS
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return found


def _in_lines(schema: Any) -> Any:
    """A schema whose descriptions, which are docstrings, have one line each."""
    if isinstance(schema, list):
        return [_in_lines(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: " ".join(value.split())
        if key == "description" and isinstance(value, str)
        else _in_lines(value)
        for key, value in schema.items()
    }


def _responses(path: str, method: str) -> Json:
    json = _ANSWERS.get(path)
    content = (
        {"text/plain": {"schema": TEXT}} if json is None else {"application/json": {"schema": json}}
    )
    found = {"200": {"description": "the answer", "content": content}}
    statuses = {500}
    if path in ("/health", "/ready", "/ping"):
        found["503"] = {"description": _MEANINGS[503], "content": content}
    if path not in OPEN_PATHS:
        statuses |= {401}
    if method == "post" and path not in OPEN_PATHS:
        statuses |= {400, 413}
    if path == "/cache/history":
        statuses |= {400}
    if path in (*_OF_OPERATOR, "/requests"):
        statuses |= {403}
    if path in ("/cache/reset", "/cache/save", *_BETWEEN_UPDATES):
        statuses |= {409}
    if path in _GENERATING:
        content |= _EVENTS
        statuses |= {404, 429, 499, 503, 504}
    if path.startswith("/v1/models/") or path.endswith(
        ("render", "tokenize", "explain", "count_tokens")
    ):
        statuses |= {404}
    kind = "MessageError" if path.startswith("/v1/messages") else "Error"
    error = {"application/json": {"schema": _ref(kind)}}
    for status in sorted(statuses):
        found[str(status)] = {"description": _MEANINGS[status], "content": error}
    return found
