"""/v1/responses without stored state: its bodies as chats, and answers to chats as its bodies.

An answer's output is a list of items: reasoning, a message, calls of functions, as they come.
"""

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from megatron_hybrid.cache.report import PrefixReport
from megatron_hybrid.inference.requests.request import GenerationResult, RequestOutput
from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.parsers.dialect import Reasoning, ToolCall
from megatron_hybrid.serving.protocols import schemas
from megatron_hybrid.serving.protocols.answers import (
    Answer,
    EventAnswer,
    Json,
    argument_pieces,
    prefix_block,
)
from megatron_hybrid.serving.protocols.fields import (
    FORMATS,
    PART,
    ChatFields,
    Count,
    Fields,
    Function,
    NumTop,
    Object,
    OtherFields,
    SharedChatFields,
    Text,
    refuse_unsupported,
)
from megatron_hybrid.text.chat_template import PART_TYPES

HOSTED = (
    *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search"),
    *("image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell"),
    *("tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"),
    "web_search_preview_2025_03_11",
)
"""Kinds of tools that only OpenAI's servers or models know. They are left out."""
_ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
DEFAULT_NAMESPACE = "functions"
"""Namespace whose functions have no prefix."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""Other names of `max_output_tokens`. A body may have several of them, with one value."""


class FlatTool(Function):
    """A function that an answer may call, in the form of this route."""

    type: Literal["function"]
    """The kind of the tool."""

    def function(self, name: str) -> Json:
        """Return the function that the model sees under this name."""
        return self.model_dump(exclude={"type"}, exclude_unset=True) | {"name": name}


class CustomTool(Fields):
    """A tool whose input is a text. The model sees a function with the parameter `input`."""

    type: Literal["custom"]
    """The kind of the tool."""
    name: Text
    """The name of the tool."""
    description: str | None = None
    """A description of the tool, for the model."""
    format: Object | None = None
    """The form of the input. A grammar's definition is shown to the model, and not enforced."""

    def function(self, name: str) -> Json:
        """Return the function that the model sees under this name, with the parameter `input`."""
        about = [self.description, (self.format or {}).get("definition")]
        text = "\n\n".join(each for each in about if isinstance(each, str))
        return {"name": name, "description": text, "parameters": _CUSTOM_PARAMETERS}


class HostedTool(Fields):
    """A tool of OpenAI's servers. It is left out, and the header X-Request-Changes says so."""

    type: Literal[HOSTED]
    """The kind of the tool."""


InnerTool = Annotated[FlatTool | CustomTool | HostedTool, Field(discriminator="type")]


class NamespaceTool(Fields):
    """Functions under one name. The model sees each as a function with both names."""

    type: Literal["namespace"]
    """The kind of the tool."""
    name: Text
    """The name of all."""
    description: str | None = None
    """A description. It has no effect."""
    tools: list[InnerTool]
    """The functions."""


AnyTool = Annotated[FlatTool | CustomTool | HostedTool | NamespaceTool, Field(discriminator="type")]


class TextOptions(Fields):
    """The form of the answer's text."""

    format: Object | None = None
    """An object with the `type` of a `response_format` in chats. A schema is a field next to the
    type."""

    verbosity: Literal["low", "medium", "high"] | None = None
    """It has no effect; the header X-Request-Changes says so."""


class ReasoningOptions(Fields):
    """Options of the model's reasoning."""

    effort: str | None = None
    """The same as `reasoning_effort` of chats. There are no summaries of the reasoning."""


def _item(kind: str, required: Sequence[str], **properties: Any) -> Json:
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
                _item("custom_tool_call", ("name", "input"), name=_TEXT, input=_TEXT),
                _item("custom_tool_call_output", ("output",), output=_SAID),
                _item("reasoning", (), **_THOUGHTS),
            ]
        }
    ),
]


class ResponseChat(ChatFields):
    """The chat that the body of a response becomes."""

    own_names: ClassVar = {
        **dict.fromkeys(LIMITS, "max_output_tokens"),
        "messages": "input",
        "reasoning_effort": "reasoning",
        "response_format": "text",
    }


class ResponseFields(OtherFields, SharedChatFields):
    """Body of /v1/responses."""

    chat = ResponseChat
    left_out: ClassVar = {"context_management": ([],), "truncation": ("disabled",)}
    taken: ClassVar = {*LIMITS, "stream_options"}  # OpenAI's: padding

    input: str | Annotated[list[Item], Field(min_length=1)]
    """The user's text, or all items of the conversation. Consecutive items of reasoning, text and
    calls become one message of the assistant's, as the model wrote it."""
    instructions: str | None = None
    """A message of the role system, before `input`."""
    max_output_tokens: Count | None = None
    """The most tokens of the answer, reasoning included."""
    tools: Annotated[list[AnyTool], Field(max_length=128)] | None = None
    """Functions and custom tools that the answer may call, also in namespaces. OpenAI's own tools
    are left out."""
    text: TextOptions | None = None
    """The form of the answer's text."""
    reasoning: ReasoningOptions | None = None
    """Options of the model's reasoning."""
    include: list[str] | None = None
    """With "reasoning.encrypted_content" the answer has its reasoning in a form that the next
    request may send back. The reasoning is encoded, not encrypted: `content` shows the same text.
    With "message.output_text.logprobs" the answer's texts have log-probabilities. Others have no
    effect."""
    top_logprobs: NumTop | None = None
    """The number of most likely tokens that are shown at each position of a text. Above 0 the texts
    have log-probabilities, also without `include`."""
    metadata: Object | None = None
    """Labels. They have no effect."""
    truncation: str | None = None
    """It has no effect: prompts are never cut. The header X-Request-Changes says so."""
    context_management: list[Object] | None = None
    """It has no effect, as `truncation`."""

    def check(self) -> None:
        limits = dict.fromkeys(LIMITS, (self.max_output_tokens,))
        refuse_unsupported(self, limits)
        super().check()

    def to_chat(self) -> ChatFields:
        """Return the body as a chat.

        Raises:
            ApiError: an item that no chat has.
        """
        text = self.text or TextOptions()
        form = dict(text.format or {"type": "text"})
        if form.get("type") == "json_schema":  # flat here
            form["json_schema"] = {"schema": form.get("schema", True)}
        seen = ((name, tool) for name, (_, tool) in self.origins.items())
        tools = [{"type": "function", "function": tool.function(name)} for name, tool in seen]
        if form.get("type") not in FORMATS:
            raise ApiError(400, f"text.format is {form}; its types are {FORMATS}", "text")
        self._note_left_out(text)
        messages = list(_joined(self._messages(), self.note))
        if not messages:
            raise ApiError(400, "input has reasoning alone: give a text or a call, too", "input")
        given = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": tools or None,
            "response_format": form,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "logprobs": _LOGPROBS in (self.include or ()) or bool(self.top_logprobs),
            "top_logprobs": self.top_logprobs or None,
        }
        return self.chat_of(
            {name: getattr(self, name) for name in SharedChatFields.model_fields} | given
        )

    def _each_tool(self) -> Iterator[tuple[str | None, InnerTool]]:
        """Yield each tool after its namespace, which may be None."""
        for tool in self.tools or ():
            if isinstance(tool, NamespaceTool):
                yield from ((tool.name, inner) for inner in tool.tools)
            else:
                yield None, tool

    @cached_property
    def origins(self) -> dict[str, tuple[str | None, FlatTool | CustomTool]]:
        """Names that the model sees -> the caller's namespace and tool."""
        return {
            full_name(tool.name, namespace): (namespace, tool)
            for namespace, tool in self._each_tool()
            if not isinstance(tool, HostedTool)
        }

    def _note_left_out(self, text: TextOptions) -> None:
        """Note what of the request this server does not do."""
        if text.verbosity not in (None, "medium"):
            self.note("left out text.verbosity")
        for _, tool in self._each_tool():
            if isinstance(tool, HostedTool):
                self.note(f"left out the tool {tool.type}")
            elif isinstance(tool, CustomTool) and (tool.format or {}).get("type") == "grammar":
                self.note(f"does not enforce the grammar of {tool.name}")

    def _messages(self) -> Iterator[Json]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        for item in self.input:
            yield from _messages_of(item, self.note)


_CUSTOM_PARAMETERS: Json = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def full_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool that the model sees."""
    if namespace in (None, DEFAULT_NAMESPACE):
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def _messages_of(item: Json, note: Callable[[str], None]) -> Iterator[Json]:
    """Yield the messages of an item. `note` is called for what is left out."""
    kind = item.get("type", "message")
    if kind == "message":
        yield {"role": item.get("role"), "content": _text_of(item.get("content"))}
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments", "{}")
        if kind == "custom_tool_call":
            arguments = json.dumps({"input": item.get("input", "")}, ensure_ascii=False)
        name = item.get("name")
        if isinstance(item.get("namespace"), str) and isinstance(name, str):
            name = full_name(name, item["namespace"])
        function = {"name": name, "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        yield {"role": "assistant", "tool_calls": [call]}
    elif kind in ("function_call_output", "custom_tool_call_output"):
        said = item.get("output")
        said = said if isinstance(said, list) else _text_of(said)
        yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": said}
    elif kind == "reasoning":
        if (text := _reasoning_of(item)) is None:
            note("left out reasoning that another server encrypted")
        else:
            if not text and item.get("summary"):
                note("left out a summary of reasoning")
            yield {"role": "assistant", "reasoning": text}
    elif _HOSTED_ITEM.fullmatch(str(kind)):
        note(f"left out an item {kind}")
    else:
        raise ApiError(
            400, f"an item of input has the type {kind!r}, which is not supported", "input"
        )


_HOSTED_ITEM = re.compile(
    r"\w+_call(_output)?|mcp_\w+|tool_search_output|\w*compaction\w*|additional_tools"
    "|agent_message|ghost_snapshot"
)
"""Kinds of items that stand for work of OpenAI's servers. They are left out."""


def _joined(messages: Iterator[Json], note: Callable[[str], None]) -> Iterator[Json]:
    """Join what the model said in a row into one message: its reasoning, a text, calls. Reasoning
    alone is left out, which `note` is called for."""
    last: Json = {}
    end: Json = {"role": None}  # of what was said before
    for message in (*messages, end):
        follows = last.get("role") == message["role"] == "assistant"
        new_text = "content" in message and last.keys() & {"content", "tool_calls"}
        if follows and not (new_text or "reasoning" in message):
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            last |= message | ({"tool_calls": calls} if calls else {})
            continue
        if last.keys() & {"content", "tool_calls"}:
            yield last
        elif last.get("reasoning"):
            note("left out reasoning that no text or call follows")
        last = message


_MARK = "mh1."
"""The beginning of this server's `encrypted_content`."""


def _reasoning_of(item: Json) -> str | None:
    """Return the text of a former answer's reasoning item, or None if it is another server's."""
    parts = item.get("content")
    if parts not in (None, []):
        return _text_of(parts, ("reasoning_text",))
    given = item.get("encrypted_content")
    if given is None:  # a summary is no reasoning
        return ""
    try:
        mark, text = given[: len(_MARK)], given[len(_MARK) :]
        return b64decode(text, validate=True).decode() if mark == _MARK else None
    except (TypeError, ValueError):
        return None


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


def _input_of(arguments: str) -> str:
    """Return the text that a custom tool is called with: the parameter `input` or the only one, or
    all of the arguments if that is no text."""
    given = json.loads(arguments)
    values = [given["input"]] if "input" in given else [*given.values()]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments


class TextLogProbs:
    """Log-probabilities of an answer's texts. Those of a token belong to the text in which it
    begins.

    answer: writes the log-probabilities.
    """

    def __init__(self, answer: Answer):
        self._answer = answer
        self._waiting: list[tuple[int, Json]] = []  # where a token begins, and its entry
        self._written, self._end = bytearray(), 0

    def add(self, said: GenerationResult | RequestOutput) -> None:
        """Keep the log-probabilities of new tokens."""
        given = said.token_ids, said.log_probs, said.top_n_logprobs
        found = self._answer.logprobs(*given, 0)
        for entry in [] if found is None else found["content"]:
            self._waiting.append((len(self._written), entry))
            self._written += bytes(entry["bytes"])

    def take(self, text: str) -> list[Json]:
        """Return those of the next text, which follows the last one or marks after that."""
        given = text.encode()
        start = max(self._end, self._written.find(given, self._end))
        self._end = start + len(given)
        taken = [entry for at, entry in self._waiting if start <= at < self._end]
        self._waiting = [(at, entry) for at, entry in self._waiting if at >= self._end]
        return taken


class ResponseAnswer(EventAnswer):
    """The answer to one request of this route.

    Args:
        answer: the answer to the request's chat.
        fields: those of the request.
    """

    def __init__(self, answer: Answer, fields: ResponseFields):
        super().__init__(answer)
        self._fields, self._log_probs = fields, TextLogProbs(answer)
        self._num_events = 0
        self._reason = ""

    def last(self, prefixes: Sequence[PrefixReport], num_generated: int) -> list[Json]:
        """Return the events at the end."""
        body = self._body(prefixes[0], num_generated)
        return [self._event(f"response.{self._status}", response=body)]

    def error(self, error: ApiError) -> Json:
        """Return the event of a failure."""
        code = error.code or error.body["error"]["type"]
        about = {"code": code, "message": str(error), "param": error.param}
        return self._event("error", **about)

    # Items -------------------------------------------------------------------------------------

    def _begin(self, report: PrefixReport) -> list[Json]:
        body = self._body(None, 0)
        kinds = ("created", "in_progress")
        return [self._event(f"response.{kind}", response=body) for kind in kinds]

    def _grow(
        self, said: GenerationResult | RequestOutput, result: GenerationResult | None
    ) -> list[Json]:
        self._log_probs.add(said)
        return super()._grow(said, result)

    def _end(self, result: GenerationResult) -> None:
        self._reason = result.finish_reason

    def _more(self, text: str) -> list[Json]:
        (content,) = self._items[-1]["content"]
        content["text"] += text
        log_probs = self._log_probs.take(text)
        if self._open is Reasoning:
            return [self._event("response.reasoning_text.delta", **self._place, delta=text)]
        content["logprobs"] += log_probs
        given = {"delta": text, "logprobs": log_probs}
        return [self._event("response.output_text.delta", **self._place, **given)]

    def _begin_item(self, is_reasoning: bool) -> list[Json]:
        number = len(self._items)
        item: Json = {"id": f"{self._answer.id}-{number}", "status": "in_progress", "content": []}
        if is_reasoning:
            item |= {"type": "reasoning", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        else:
            item |= {"type": "message", "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items.append({**item, "content": [part]})
        return [
            self._event("response.output_item.added", output_index=number, item=item),
            self._event("response.content_part.added", **self._place, part=deepcopy(part)),
        ]

    def _end_item(self, is_reasoning: bool) -> list[Json]:
        item = self._items[-1]
        if is_reasoning and _ENCRYPTED in (self._fields.include or ()):
            text = item["content"][0]["text"].encode()  # no secret: `content` has it, too
            item["encrypted_content"] = _MARK + b64encode(text).decode()
        item["status"] = self._status
        (part,) = item["content"]
        extra = {} if is_reasoning else {"logprobs": part["logprobs"]}
        said = {"text": part["text"], **extra}
        return [
            self._event(f"response.{part['type']}.done", **self._place, **said),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=len(self._items) - 1, item=item),
        ]

    def _call(self, call: ToolCall) -> list[Json]:
        number = len(self._items)
        namespace, tool = self._fields.origins.get(call.name, (None, None))
        own_name = call.name if tool is None else tool.name
        if isinstance(tool, CustomTool):
            arguments, name = _input_of(call.arguments), "input"
            kind, events = "custom_tool_call", "response.custom_tool_call_input"
            pieces, done = [arguments], {name: arguments}
        else:
            arguments, name = call.arguments, "arguments"
            kind, events = "function_call", "response.function_call_arguments"
            pieces, done = argument_pieces(call), {"name": own_name, name: arguments}
        item = {
            "id": f"{self._answer.id}-{number}",
            "type": kind,
            "call_id": call.id,
            "name": own_name,
            name: arguments,
            "status": "completed",
        }
        if namespace is not None:
            item["namespace"] = namespace
        self._items.append(item)
        place = {"output_index": number, "item_id": item["id"]}
        added = {**item, name: "", "status": "in_progress"}
        return [
            self._event("response.output_item.added", output_index=number, item=added),
            *(self._event(f"{events}.delta", **place, delta=piece) for piece in pieces),
            self._event(f"{events}.done", **place, **done),
            self._event("response.output_item.done", output_index=number, item=item),
        ]

    @property
    def _place(self) -> Json:
        number = len(self._items) - 1
        return {"output_index": number, "item_id": self._items[number]["id"], "content_index": 0}

    @property
    def _status(self) -> Literal["incomplete", "completed"]:
        return "incomplete" if self._reason in ("length", "cancelled") else "completed"

    def _event(self, kind: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _body(self, report: PrefixReport | None, num_generated: int) -> schemas.Responded:
        """Return the body. `report` is None if the answer has just begun."""
        fields, usage = self._fields, None
        status = "in_progress" if report is None else self._status
        if report is not None:
            usage = {
                "input_tokens": report.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": report.skipped_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": num_generated,
                "output_tokens_details": {"reasoning_tokens": self._answer.count(self._reasoning)},
                "total_tokens": report.prompt_tokens + num_generated,
                "prefix": prefix_block(report),
            }
        reason = None
        if status == "incomplete":
            reason = {"reason": "max_output_tokens" if self._reason == "length" else "aborted"}
        return {
            "id": self._answer.id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "model": self._answer.model,
            "output": list(self._items),
            "parallel_tool_calls": self._answer.fields.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": fields.temperature,
            "tool_choice": fields.tool_choice or "auto",
            "tools": [
                {"strict": False, "description": None, **tool.model_dump()}
                if isinstance(tool, FlatTool)
                else tool.model_dump()
                for tool in fields.tools or ()
            ],
            "top_p": fields.top_p,
            "usage": usage,
        }
