"""/v1/responses without stored state: its bodies as chats, and answers to chats as its bodies.

An answer's output is a list of items: reasoning, a message, calls of functions, as they come.
"""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, WithJsonSchema

from megatron_hybrid.cache.report import PrefixReport
from megatron_hybrid.inference.requests.request import GenerationResult, RequestOutput
from megatron_hybrid.serving.answers import (
    Json,
    argument_pieces,
    num_reasoning_tokens,
    prefix_block,
)
from megatron_hybrid.serving.errors import ApiError, refusal_of_field
from megatron_hybrid.serving.fields import (
    FORMATS,
    PART,
    PART_TYPES,
    ChatFields,
    Count,
    Fields,
    Function,
    Object,
    SharedChatFields,
    neutral_values,
    refuse_unsupported,
)
from megatron_hybrid.serving.fields import UNSUPPORTED as UNSUPPORTED_ANYWHERE
from megatron_hybrid.serving.json_response import encode_json
from megatron_hybrid.serving.parsers import AnswerPart, Reasoning, Style, ToolCall
from megatron_hybrid.text.tokenizer import Tokenizer

STATEFUL: dict[str, tuple] = {
    "access_programs": ([],),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "previous_response": (),
    "previous_response_id": (),
    "prompt": (),
}
UNSUPPORTED: dict[str, tuple] = {
    "enable_response_messages": (False,),
    "image": (),
    "max_tool_calls": (),
    "multi_agent": (),
    "previous_input_messages": ([],),
    "prompt_logprobs": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields without an effect here -> values that ask for nothing, beside null."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""Other names of `max_output_tokens`. A body may have several of them, with one value."""
CHAT_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}
"""Fields of the chat that a response is made as -> the caller's."""


class FlatTool(Function):
    """A function that an answer may call, in the form of this route."""

    type: Literal["function"]
    """The kind of the tool."""


class TextOptions(Fields):
    """The form of the answer's text."""

    format: Object | None = None
    """An object with the `type` of a `response_format` in chats. A schema is a field beside the
    type."""

    @classmethod
    def refused(cls) -> dict[str, tuple]:
        """See the base class."""
        return {"verbosity": ("medium",)}


class ReasoningOptions(Fields):
    """Options of the model's reasoning."""

    effort: str | None = None
    """The same as `reasoning_effort` of chats. There are no summaries of the reasoning."""


def _item(kind: str, required: Sequence[str], **properties: Any) -> Json:
    """As JSON Schema."""
    properties |= {"type": {"const": kind}}
    return {"type": "object", "properties": properties, "required": ["type", *required]}


_TEXT: Json = {"type": "string"}
_SAID = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": PART["anyOf"][1:]}}]}
_MESSAGE = _item("message", (), role={**_TEXT, "minLength": 1}, content=_SAID)
_THOUGHT = _item("reasoning_text", ("text",), text=_TEXT)
_THOUGHTS = {
    "content": {"type": ["array", "null"], "items": _THOUGHT},
    "encrypted_content": {"type": ["string", "null"]},
}
Item = Annotated[
    Object,
    WithJsonSchema(
        {
            "anyOf": [
                {**_MESSAGE, "required": ["role", "content"]},
                _item("function_call", ("name",), name=_TEXT, arguments=_TEXT),
                _item("function_call_output", ("output",), output=_SAID),
                _item("reasoning", (), **_THOUGHTS),
            ]
        }
    ),
]


class ResponseFields(SharedChatFields):
    """Body of /v1/responses."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    """The user's text, or all items of the conversation. Consecutive items of reasoning, text and
    calls become one message of the assistant's, as the model wrote it."""
    instructions: str | None = None
    """A message of the role system, before `input`."""
    max_output_tokens: Count | None = None
    """The most tokens of the answer, reasoning included."""
    tools: Annotated[list[FlatTool], Field(max_length=128)] | None = None
    """Functions that the answer may call."""
    text: TextOptions | None = None
    """The form of the answer's text."""
    reasoning: ReasoningOptions | None = None
    """Options of the model's reasoning."""
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """The answer has its reasoning in a form that the next request may send back. The reasoning is
    encoded, not encrypted: `content` shows the same text."""
    metadata: Object | None = None
    """Labels. They have no effect."""

    @classmethod
    @cache
    def refused(cls) -> dict[str, tuple]:
        """See the base class."""
        known = neutral_values(ChatFields) | UNSUPPORTED_ANYWHERE | UNSUPPORTED | STATEFUL
        used = {*cls.model_fields, *LIMITS, "stream_options"}  # OpenAI's: padding
        return {name: nothing for name, nothing in known.items() if name not in used}

    def to_chat(self) -> ChatFields:
        """The same as a chat.

        Raises:
            ApiError: an item that no chat has.
        """
        extra = self.model_extra or {}
        refuse_unsupported(extra, STATEFUL, ": this server keeps no responses")
        refuse_unsupported(
            extra, dict.fromkeys(LIMITS, (self.max_output_tokens,)), " by this route"
        )
        self.check()
        text = self.text or TextOptions()
        refuse_unsupported(text.model_extra or {}, text.refused(), " in text")
        form = dict(text.format or {"type": "text"})
        if form.get("type") == "json_schema":  # flat here
            form["json_schema"] = {"schema": form.get("schema", True)}
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}
            for tool in self.tools or ()
        ]
        if form.get("type") not in FORMATS:
            raise ApiError(400, f"text.format is {form}; its types are {FORMATS}", "text")
        messages = list(_joined(self._messages()))
        if not messages:
            raise ApiError(400, "input has reasoning alone: give a text or a call, too", "input")
        try:
            return ResponseChat(
                **{name: getattr(self, name) for name in SharedChatFields.model_fields},
                messages=messages,
                max_completion_tokens=self.max_output_tokens,
                tools=tools or None,
                response_format=form,
                reasoning_effort=self.reasoning and self.reasoning.effort,
            )
        except ValidationError as error:
            refusal = refusal_of_field(error.errors())
            refusal.param = CHAT_NAMES.get(refusal.param, refusal.param)
            raise refusal from error

    def _messages(self) -> Iterator[Json]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        for item in self.input:
            yield from _messages_of(item)


class ResponseChat(ChatFields):
    """The chat that a response is made as."""

    @property
    def caller_names(self) -> dict[str, str]:
        """See the base class."""
        names = super().caller_names | {"num_tokens_to_generate": "max_output_tokens"}
        return {name: CHAT_NAMES.get(given, given) for name, given in names.items()}


def _messages_of(item: Json) -> Iterator[Json]:
    kind = item.get("type", "message")
    if kind == "message":
        yield {"role": item.get("role"), "content": _text_of(item.get("content"))}
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        yield {"role": "assistant", "tool_calls": [call]}
    elif kind == "function_call_output":
        said = _text_of(item.get("output"))
        yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": said}
    elif kind == "reasoning":
        yield {"role": "assistant", "reasoning": _reasoning_of(item)}
    else:
        raise ApiError(
            400, f"an item of input has the type {kind!r}, which is not supported", "input"
        )


def _joined(messages: Iterator[Json]) -> Iterator[Json]:
    """What the model said in a row is one message: its reasoning, a text, calls. Reasoning alone is
    left out."""
    last: Json = {}
    for message in messages:
        follows = last.get("role") == message["role"] == "assistant"
        new_text = "content" in message and last.keys() & {"content", "tool_calls"}
        if follows and not (new_text or "reasoning" in message):
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            last |= message | ({"tool_calls": calls} if calls else {})
            continue
        if last.keys() & {"content", "tool_calls"}:
            yield last
        last = message
    if last.keys() & {"content", "tool_calls"}:
        yield last


_MARK = "mh1."
"""Begins `encrypted_content` of this server's."""


def _encoded(text: str) -> str:
    """Reasoning for `encrypted_content`: no secret, since `content` has it, too."""
    return _MARK + b64encode(text.encode()).decode()


def _reasoning_of(item: Json) -> str:
    """The text of a reasoning item of a former answer."""
    parts = item.get("content")
    if parts not in (None, []):
        return _text_of(parts, ("reasoning_text",))
    given = item.get("encrypted_content")
    if given is None:  # a summary is no reasoning
        return ""
    try:
        mark, text = given[: len(_MARK)], given[len(_MARK) :]
        if mark != _MARK:
            raise ValueError
        return b64decode(text, validate=True).decode()
    except (TypeError, ValueError):
        raise ApiError(
            400,
            f"encrypted_content of an item of input is none of this server's: {given!r:.40}. Leave "
            "the item out",
            "input",
        ) from None


def _text_of(content: Any, types: Sequence[str] = PART_TYPES) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in types else None
        if not isinstance(text, str):
            raise ApiError(400, f"a part of input is no text: {part!r:.80}", "input")
        texts.append(text)
    return "".join(texts)


class ResponseAnswer:
    """The answer to one request of this route, whole or as events. See `Answer`.

    Args:
        tokenizer: counts tokens of reasoning.
        fields: of the request.
        chat: the same as a chat.
        id: of the request.
        model: the served name.
        style: how the model answers.
        is_thinking: see `AnswerParser`.
    """

    end_mark = b""

    def __init__(
        self,
        tokenizer: Tokenizer,
        fields: ResponseFields,
        chat: ChatFields,
        id: str,
        model: str,
        style: Style,
        is_thinking: bool,
    ):
        self._fields, self._id, self._model = fields, id, model
        self._tokenizer, self._chat = tokenizer, chat
        self._parser = style.parser(is_thinking=is_thinking, **chat.parsed_by)
        self._created = time.time()
        self._items: list[Json] = []
        self._open: type[AnswerPart] | None = None  # the kind of the last item, while it grows
        self._num_events = 0
        self._reason = ""

    def whole(self, results: Sequence[GenerationResult]) -> Json:
        """The body. results: one."""
        (result,) = results
        self._grow(result.generated_text or "", result.finish_reason)
        return self._body(self._status, [result.prefix], len(result.generated_tokens))

    def growing(self, number: int) -> list[ResponseAnswer]:
        """What takes the outputs of a stream: see `Answer.growing`."""
        return [self]

    def begin(self) -> list[Json]:
        """The events before the first output."""
        body = self._body("in_progress", [], 0)
        return [
            self._event(f"response.{kind}", response=body) for kind in ("created", "in_progress")
        ]

    def add(self, output: RequestOutput) -> bytes:
        """The events of what a step added."""
        return b"".join(map(self.encode, self._grow(output.text, output.finish_reason)))

    def last(self, prefixes: Sequence[PrefixReport], num_generated: int) -> list[Json]:
        """The events at the end."""
        body = self._body(self._status, prefixes, num_generated)
        return [self._event(f"response.{self._status}", response=body)]

    def error(self, error: ApiError) -> Json:
        """The event of a failure."""
        about = {"code": error.code, "message": str(error), "param": error.param}
        return self._event("error", **about)

    def encode(self, event: Json) -> bytes:
        """A server-sent event."""
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))

    # Items -------------------------------------------------------------------------------------

    def _grow(self, text: str, reason: str | None) -> list[Json]:
        parts = self._parser.add(text)
        if reason is not None:
            parts += self._parser.end()
            self._reason = reason
        events = [event for part in parts for event in self._add(part)]
        return events + (self._close() if reason is not None else [])

    def _add(self, part: AnswerPart) -> Iterator[Json]:
        if self._open is not type(part):
            yield from self._close()
        if isinstance(part, ToolCall):
            yield from self._call(part)
            return
        if self._open is None:
            yield from self._begin_item(type(part))
        item = self._items[-1]
        item["content"][0]["text"] += part.text
        if isinstance(part, Reasoning):
            yield self._event("response.reasoning_text.delta", **self._place, delta=part.text)
        else:
            given = {"delta": part.text, "logprobs": []}
            yield self._event("response.output_text.delta", **self._place, **given)

    def _begin_item(self, kind: type[AnswerPart]) -> Iterator[Json]:
        self._open = kind
        number = len(self._items)
        item: Json = {"id": f"{self._id}-{number}", "status": "in_progress", "content": []}
        if kind is Reasoning:
            item |= {"type": "reasoning", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        else:
            item |= {"type": "message", "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.output_item.added", output_index=number, item=dict(item))
        self._items.append({**item, "content": [part]})
        yield self._event("response.content_part.added", **self._place, part=dict(part))

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        item, kind = self._items[-1], self._open
        if kind is Reasoning and self._fields.include:
            item["encrypted_content"] = _encoded(item["content"][0]["text"])
        item["status"] = self._status
        (part,) = item["content"]
        name = "reasoning_text" if kind is Reasoning else "output_text"
        extra = {} if kind is Reasoning else {"logprobs": []}
        self._open = None
        return [
            self._event(f"response.{name}.done", **self._place, text=part["text"], **extra),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=len(self._items) - 1, item=item),
        ]

    def _call(self, call: ToolCall) -> Iterator[Json]:
        number = len(self._items)
        item = {
            "id": f"{self._id}-{number}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        self._items.append(item)
        place = {"output_index": number, "item_id": item["id"]}
        yield self._event(
            "response.output_item.added",
            output_index=number,
            item={**item, "arguments": "", "status": "in_progress"},
        )
        kind = "response.function_call_arguments"
        for piece in argument_pieces(call):
            yield self._event(f"{kind}.delta", **place, delta=piece)
        yield self._event(f"{kind}.done", **place, name=call.name, arguments=call.arguments)
        yield self._event("response.output_item.done", output_index=number, item=item)

    @property
    def _place(self) -> Json:
        number = len(self._items) - 1
        return {
            "output_index": number,
            "item_id": self._items[number]["id"],
            "content_index": 0,
        }

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason in ("length", "cancelled") else "completed"

    def _event(self, kind: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _body(self, status: str, prefixes: Sequence[PrefixReport], num_generated: int) -> Json:
        fields = self._fields
        usage = None
        if prefixes:
            (report,) = prefixes
            items = (item for item in self._items if item["type"] == "reasoning")
            reasoning = [Reasoning(item["content"][0]["text"]) for item in items]
            num_reasoning = num_reasoning_tokens(self._tokenizer, reasoning)
            usage = {
                "input_tokens": report.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": report.skipped_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": num_generated,
                "output_tokens_details": {"reasoning_tokens": num_reasoning},
                "total_tokens": report.prompt_tokens + num_generated,
                "prefix": prefix_block(report),
            }
        reason = None
        if status == "incomplete":
            reason = {"reason": "max_output_tokens" if self._reason == "length" else "aborted"}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "model": self._model,
            "output": list(self._items),
            "parallel_tool_calls": self._chat.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": fields.temperature,
            "tool_choice": fields.tool_choice or "auto",
            "tools": [
                {"strict": False, "description": None, **tool.model_dump()}
                for tool in fields.tools or ()
            ],
            "top_p": fields.top_p,
            "usage": usage,
        }
