"""/v1/messages, Anthropic's API: its bodies as chats, and answers to chats as its bodies.

An answer's content is a list of blocks: thinking, text, uses of tools, as they come.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from megatron_hybrid.cache.report import PrefixReport
from megatron_hybrid.inference.requests.options import Positive, Priority
from megatron_hybrid.inference.requests.request import GenerationResult
from megatron_hybrid.inference.sampling_params import Share, Temperature
from megatron_hybrid.serving.http.changes import IMAGE_LEFT_OUT
from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.parsers.dialect import ToolCall
from megatron_hybrid.serving.protocols import schemas
from megatron_hybrid.serving.protocols.answers import (
    EventAnswer,
    Json,
    argument_pieces,
    prefix_block,
)
from megatron_hybrid.serving.protocols.fields import (
    ChatFields,
    CountOrAll,
    Fields,
    OtherFields,
    Salt,
    Text,
    Words,
)

SAME = ("temperature", "top_p", "top_k", "stream", "cache_salt", "priority")
"""Fields of a message that are a chat's, too, and no part of a prompt."""
_LEFT_OUT_BLOCK = re.compile(
    "redacted_thinking|image|document|compaction|server_tool_use|mcp_tool_use|.+_tool_result"
)
"""Blocks of an answer, or of a tool's result, that this server does not show to a model, also all
those of Anthropic's own tools."""
Note = Callable[[str], None]
"""A function that takes note of what is left out."""
_SIGNATURE = "mh1"
"""Signature of thinking. It is not checked: the text is no secret."""


class MessageTool(Fields):
    """A function that an answer may call, in the form of this route."""

    type: str | None = None
    """The kind of the tool: custom. Tools of another kind, which Anthropic defines, are left out,
    and the header X-Request-Changes says so."""
    name: Text | None = None
    """The name of the function."""
    description: str | None = None
    """A description of the function, for the model."""
    input_schema: dict[str, Any] | None = None
    """The JSON Schema of the arguments."""

    @property
    def is_custom(self) -> bool:
        return self.type in (None, "custom")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.is_custom and None in (self.name, self.input_schema):
            raise ValueError("give the function's name, and input_schema, that of its arguments")
        return self


class MessageChat(ChatFields):
    """The chat that the body of a message becomes."""

    own_names: ClassVar = {
        "chat_template_kwargs": "thinking",
        "max_completion_tokens": "max_tokens",
        "reasoning_effort": "output_config",
        "response_format": "output_config",
        "stop": "stop_sequences",
        "thinking_token_budget": "thinking",
    }

    def too_long(self, num_prompt: int, num_asked: int, limit: int, least: str = "") -> ApiError:
        """Return the base class's refusal in the words that clients of Anthropic read."""
        if num_prompt >= limit:
            text = f"prompt is too long: {least}{num_prompt} tokens > {limit} maximum"
            return ApiError(400, text, "messages")
        text = "input length and `max_tokens` exceed context limit: "
        text += f"{num_prompt} + {num_asked} > {limit}, decrease input length or `max_tokens` and "
        return ApiError(400, f"{text}try again", "max_tokens")


class PromptFields(OtherFields):
    """Fields of a prompt: the body of /v1/messages/count_tokens."""

    chat = MessageChat
    left_out: ClassVar = {"context_management": ({}, {"edits": []}), "speed": ("standard",)}
    taken: ClassVar = {"max_tokens", *SAME}

    model: str | None = None
    """The name of the served model. It may be left out."""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    """The messages of the user and the assistant: texts, thinking, uses of tools and results of
    tools. Images and documents are refused with 400, and left out of results of tools.
    `cache_control` has no effect: all prompts are cached."""
    system: str | list[dict[str, Any]] | None = None
    """Instructions, which stand before the messages."""
    tools: list[MessageTool] | None = None
    """Functions that the answer may call."""
    tool_choice: dict[str, Any] | None = None
    """An object whose `type` is auto, any, tool or none. With `disable_parallel_tool_use` the
    answer has one call at most."""
    thinking: dict[str, Any] | None = None
    """An object. The types enabled and adaptive set the template's variables `enable_thinking` and
    `thinking`; the type disabled sets them to false. `budget_tokens` is the `thinking_token_budget`
    of chats."""
    output_config: dict[str, Any] | None = None
    """An object: `effort` is the `reasoning_effort` of chats, and `format` has a JSON Schema that
    the answer fits."""

    context_management: dict[str, Any] | None = None
    """It has no effect: nothing is left out of the messages. The header X-Request-Changes says
    so."""
    speed: str | None = None
    """It has no effect, as `context_management`."""

    def to_chat(self, **more: Any) -> ChatFields:
        """Return the body as a chat.

        Raises:
            ApiError: a block or a choice that no chat has.
        """
        config, thinking = self.output_config or {}, self.thinking or {}
        choice = self.tool_choice or {}
        given = {
            "model": self.model,
            "messages": [*self._messages()],
            "tools": [_function(tool) for tool in self.tools or () if tool.is_custom] or None,
            "tool_choice": _choice(choice),
            "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
            "reasoning_effort": config.get("effort"),
            "response_format": _format(config.get("format")),
        }
        if (kind := thinking.get("type")) is not None:
            thinks = kind != "disabled"
            names = ("enable_thinking", "thinking")
            given["chat_template_kwargs"] = dict.fromkeys(names, thinks)
            given["thinking_token_budget"] = thinking.get("budget_tokens") if thinks else None
        for name in sorted(config.keys() - {"effort", "format"}):
            self.note(f"left out output_config.{name}")
        for tool in self.tools or ():
            if not tool.is_custom:
                self.note(f"left out the tool {tool.name or tool.type} ({tool.type})")
        return self.chat_of(given | more)

    def _messages(self) -> Iterator[Json]:
        if system := _texts(self.system or "", "system"):
            yield {"role": "system", "content": system}
        for index, message in enumerate(self.messages):
            role, content = message.get("role"), message.get("content")
            place = f"messages[{index}]"
            if role not in ("user", "assistant", "system"):
                raise ApiError(400, f"{place}.role is {role!r}: use user or assistant", "messages")
            if role == "assistant" and not isinstance(content, str):
                yield _said(_blocks(content, place), place, self.note)
            elif role == "user" and not isinstance(content, str):
                yield from _asked(_blocks(content, place), place, self.note)
            else:
                yield {"role": role, "content": _texts(content, place)}


class MessageFields(PromptFields):
    """Body of /v1/messages."""

    max_tokens: Positive
    """The most tokens of the answer, thinking included."""
    temperature: Temperature | None = None
    """The same as in chats."""
    top_p: Share | None = None
    """The same as in chats."""
    top_k: CountOrAll | None = None
    """The same as in chats."""
    stop_sequences: Words | None = None
    """Texts that end the answer."""
    stream: bool = False
    """The answer is sent as Anthropic's events."""
    cache_salt: Salt | None = None
    """The same as in chats."""
    priority: Priority = 0
    """The same as in chats."""

    def to_chat(self, **more: Any) -> ChatFields:
        given = {name: getattr(self, name) for name in SAME}
        stops = self.stop_sequences or None
        return super().to_chat(max_completion_tokens=self.max_tokens, stop=stops, **given, **more)


def _function(tool: MessageTool) -> Json:
    given = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        given["description"] = tool.description
    return {"type": "function", "function": given}


def _choice(choice: Json) -> str | Json | None:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "tool", "name": choice.get("name")}
    kinds = {None: None, "auto": "auto", "any": "required", "none": "none"}
    if kind not in kinds:
        raise ApiError(
            400, f"tool_choice.type is {kind!r}: use auto, any, tool or none", "tool_choice"
        )
    return kinds[kind]


def _format(form: Any) -> Json | None:
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        text = f"output_config.format is {form!r:.80}; its type is json_schema"
        raise ApiError(400, text, "output_config")
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema", True)}}


def _blocks(content: Any, place: str) -> list[Json]:
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return content
    raise ApiError(400, f"{place}.content is no text, and no list of blocks", "messages")


def _texts(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, place) for block in _blocks(content, place))


def _text(block: Json, place: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise ApiError(
            400,
            f"{place} has a block of the type {block.get('type')!r}, which is not supported here: "
            "this server takes texts, thinking and uses of tools",
            "system" if place == "system" else "messages",
        )
    return block["text"]


def _result(block: Json, place: str, note: Note) -> str:
    kind = block.get("type")
    if kind == "tool_reference":
        return f"[The tool {block.get('tool_name')} is there.]"
    if kind == "search_result":
        named = f"{block.get('title')} ({block.get('source')})"
        return f"{named}\n{_texts(block.get('content'), place)}"
    if kind in ("image", "document"):
        note(f"left out a block {kind}")
        return IMAGE_LEFT_OUT if kind == "image" else "[A document was left out.]"
    return _text(block, place)


def _said(blocks: Sequence[Json], place: str, note: Note) -> Json:
    """Return what the model said in one turn."""
    message: Json = {"role": "assistant", "content": ""}
    for block in blocks:
        if block.get("type") == "thinking":
            message["reasoning"] = message.get("reasoning", "") + str(block.get("thinking", ""))
        elif block.get("type") == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif _LEFT_OUT_BLOCK.fullmatch(str(block.get("type"))):
            note(f"left out a block {block['type']}")
        else:
            message["content"] += _text(block, place)
    return message


def _asked(blocks: Sequence[Json], place: str, note: Note) -> Iterator[Json]:
    """Yield the messages of one turn of the user's: results of tools, then texts."""
    texts = []
    for block in blocks:
        if block.get("type") == "tool_result":
            said = block.get("content") or ""
            if not isinstance(said, str):
                said = "\n".join(_result(each, place, note) for each in _blocks(said, place))
            if block.get("is_error"):
                note("left out is_error of a tool's result")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said}
        else:
            texts.append(_text(block, place))
    if texts:
        yield {"role": "user", "content": "\n".join(texts)}


class MessageAnswer(EventAnswer):
    """The answer to one request of this route."""

    _stop: ClassVar[Json] = {"stop_reason": None, "stop_sequence": None}

    def last(self, prefixes: Sequence[PrefixReport], num_generated: int) -> list[Json]:
        """Return the events at the end."""
        usage = self._usage(prefixes[0], num_generated)
        end = {"type": "message_delta", "delta": self._stop, "usage": usage}
        return [end, {"type": "message_stop"}]

    def error(self, error: ApiError) -> Json:
        """Return the event of a failure."""
        return error.body_of("/v1/messages")

    def _begin(self, report: PrefixReport) -> list[Json]:
        return [{"type": "message_start", "message": self._body(report, 0)}]

    def _end(self, result: GenerationResult) -> None:
        reason, stop = self._parser.finish_reason(result.finish_reason), result.stop_reason
        names = {"tool_calls": "tool_use", "length": "max_tokens", "cancelled": "pause_turn"}
        self._stop = {"stop_reason": names.get(reason, "end_turn"), "stop_sequence": None}
        if reason == "stop" and isinstance(stop, str):
            self._stop = {"stop_reason": "stop_sequence", "stop_sequence": stop}

    def _begin_item(self, is_reasoning: bool) -> list[Json]:
        block: Json = {"type": "text", "text": ""}
        if is_reasoning:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        return [self._start(block)]

    def _start(self, block: Json) -> Json:
        self._items.append(block)
        return self._event("start", content_block=dict(block))

    def _more(self, text: str) -> list[Json]:
        name = self._items[-1]["type"]
        self._items[-1][name] += text
        return [self._delta(f"{name}_delta", **{name: text})]

    def _call(self, call: ToolCall) -> list[Json]:
        id = call.id.replace("call_", "toolu_", 1)
        start = self._start({"type": "tool_use", "id": id, "name": call.name, "input": {}})
        self._items[-1]["input"] = json.loads(call.arguments)
        pieces = argument_pieces(call)
        deltas = [self._delta("input_json_delta", partial_json=piece) for piece in pieces]
        return [start, *deltas, self._event("stop")]

    def _end_item(self, is_reasoning: bool) -> list[Json]:
        signed = []
        if is_reasoning:
            self._items[-1]["signature"] = _SIGNATURE
            signed = [self._delta("signature_delta", signature=_SIGNATURE)]
        return [*signed, self._event("stop")]

    def _delta(self, kind: str, **said: str) -> Json:
        return self._event("delta", delta={"type": kind, **said})

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"content_block_{kind}", "index": len(self._items) - 1, **fields}

    def _body(self, report: PrefixReport, num_generated: int) -> schemas.Message:
        return {
            "id": self._answer.id,
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            "content": list(self._items),
            **self._stop,
            "usage": self._usage(report, num_generated),
        }

    def _usage(self, report: PrefixReport, num_generated: int) -> Json:
        return {
            "input_tokens": report.prompt_tokens - report.skipped_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": report.skipped_tokens,
            "output_tokens": num_generated,
            "output_tokens_details": {"thinking_tokens": self._answer.count(self._reasoning)},
            "prefix": prefix_block(report),
        }
