"""AnswerParser: takes reasoning and tool calls out of a growing answer.

Reasoning stands in `<think>`. A tool call is JSON, or XML, in `<tool_call>`, as Hermes, Qwen and
their likes write it; or the answer is one JSON object, as Llama writes it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Reasoning:
    """More of it."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of what is said to the user."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A whole call."""

    index: int
    name: str
    arguments: str
    """JSON."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)

    def to_json(self) -> dict[str, Any]:
        """As in OpenAI's messages."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


Part = Reasoning | Content | ToolCall


class AnswerParser:
    """The parts of one answer. However the answer is cut into texts, its reasoning, content and
    calls are the same.

    Args:
        tools: functions that may be called, as in OpenAI's requests; none: calls are content.
        has_thoughts: `<think>` begins reasoning; else it is content.
        is_thinking: the prompt ends inside of reasoning.
        max_calls: those behind are left out; None: any number.
        must_call: all of the answer is a call; one that was cut is no content.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        has_thoughts: bool = False,
        is_thinking: bool = False,
        max_calls: int | None = None,
        must_call: bool = False,
    ):
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._marks = [*([THINK] if has_thoughts else []), *([CALL] if self._tools else [])]
        self._part: type[Reasoning] | type[Content] = Reasoning if is_thinking else Content
        self._skips_space = is_thinking
        self._has_content = self._in_call = False
        self._held = ""  # begins a part, and is not given yet
        self._max_calls, self._must_call = max_calls, must_call
        self.num_calls = 0
        """So far."""

    def finish_reason(self, reason: str) -> str:
        """As OpenAI has it, of an answer that ended with the engine's reason."""
        return "tool_calls" if self.num_calls and reason == "stop" else reason

    def add(self, text: str) -> list[Part]:
        """The parts that a text completes."""
        self._held += text
        return list(self._parts(is_last=False))

    def end(self) -> list[Part]:
        """The parts that are complete as the answer ends."""
        return list(self._parts(is_last=True))

    def _parts(self, is_last: bool) -> Iterator[Part]:
        while self._held:
            if self._in_call:
                inside, found, rest = self._held.partition(END_CALL)
                if not found and not is_last:
                    return
                self._held, self._in_call = rest, False
                yield from self._called(inside, CALL + inside + found)
                continue
            if self._may_be_json or self._must_call:
                if is_last:
                    whole, self._held = self._held, ""
                    yield from self._called(whole, whole)
                return
            marks = [END_THINK] if self._part is Reasoning else self._marks
            found = [(self._held.find(mark), mark) for mark in marks if mark in self._held]
            start, mark = min(found, default=(-1, ""))
            if not mark:
                end = len(self._held) if is_last else _end_without(self._held, marks)
                said, self._held = self._held[:end], self._held[end:]
                yield from self._said(said)
                return
            said, self._held = self._held[:start], self._held[start + len(mark) :]
            yield from self._said(said.rstrip())
            self._in_call, self._skips_space = mark == CALL, True
            if mark != CALL:
                self._part = Reasoning if mark == THINK else Content

    @property
    def _may_be_json(self) -> bool:
        """Whether the answer may be a call without marks."""
        if not self._tools or self._part is Reasoning or self._has_content:
            return False
        return self._held.lstrip().startswith("{")

    def _said(self, text: str) -> list[Part]:
        if self._skips_space:
            text = text.lstrip()
        if not text:
            return []
        self._skips_space = False
        self._has_content |= self._part is Content
        return [self._part(text)]

    def _called(self, text: str, written: str) -> list[Part]:
        """The call that a text is; if it is no call of a function that there is, what the model has
        written."""
        name, arguments = self._function(text)
        if not isinstance(name, str) or name not in self._tools or not isinstance(arguments, dict):
            return [] if self._must_call else self._said(written)
        try:  # half a character, or a number that JSON lacks
            encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            encoded.encode()
        except ValueError:
            return self._said(written)
        if self.num_calls == self._max_calls:
            return []
        call = ToolCall(self.num_calls, name, encoded)
        self.num_calls += 1
        return [call]

    def _function(self, text: str) -> tuple[Any, Any]:
        if found := _FUNCTION.fullmatch(text):
            name, body = found.groups()
            schema = self._tools.get(name, {}).get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            properties = properties if isinstance(properties, dict) else {}
            return name, {
                key: _value(value.strip("\n"), properties.get(key))
                for key, value in _PARAMETER.findall(body)
            }
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return None, None
        if not isinstance(call, dict):
            return None, None
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None, None
        return call.get("name"), arguments


def _value(text: str, schema: Any) -> Any:
    """A parameter of XML: text where the schema says so, else JSON if it is that."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _end_without(text: str, marks: Sequence[str]) -> int:
    """Where the part of a text ends that belongs to no mark, whatever follows: before the beginning
    of one, and before white space, which a mark may follow."""
    if not marks:
        return len(text)
    end = len(text)
    for mark in marks:
        for size in range(1, len(mark)):
            if text.endswith(mark[:size]):
                end = min(end, len(text) - size)
    return len(text[:end].rstrip())
