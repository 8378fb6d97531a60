"""Dialects that write each parameter between tags, as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hybrid.serving.parsers.dialect import (
    Call,
    Dialect,
    Json,
    Tools,
    optional,
    repeated,
    sequence,
    text_format,
)
from megatron_hybrid.serving.parsers.schemas import Schema

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class TaggedParameters(Dialect):
    """A value is all that stands between its tags, whatever it is: it ends where a tag that closes
    it is followed by what may follow a parameter. A value that seems to have swallowed a damaged
    tag is none, and with it the call."""

    function: tuple[str, str] = ("", "")
    """What stands around a call, with {} for its name."""
    parameter: tuple[str, str] = ("", "")
    """The same of a parameter."""
    is_section: bool = False
    """Several calls are between one pair of marks."""
    gap: str = ""
    """Behind a function's beginning and each parameter, in forms."""
    newline: str = ""
    """Is left out at both ends of a value."""
    head: Any = None
    """Pattern of a call's beginning, with the group `name`."""
    opened: Any = None
    """Pattern of a parameter's beginning, with the group `name`."""
    closed: Any = None
    """Pattern of a call's end."""
    parts: Any = None
    """Pattern of what begins (+) a parameter or ends (-) it, also when damaged: see `_is_whole`."""

    @property
    def closers(self) -> tuple[str, ...]:
        return (self.function[1].strip() or self.parameter[1],)

    def inside(self, text: str, tools: Tools) -> list[Call] | None:
        head = self.head.match(text)
        if head is None or head["name"] not in tools:
            return []
        # What is no parameter of the function is rather a part of a text, if both would do.
        return self._calls(text, head, tools, True) or self._calls(text, head, tools, False)

    def _calls(self, text: str, head: re.Match, tools: Tools, declared: bool) -> list[Call] | None:
        """declared: parameters are those of the schema, if it has any."""
        calls: list[Call] = []
        while head is not None and head["name"] in tools:
            schema = Schema(tools[head["name"]])
            names = schema.properties if declared and schema.properties else None
            if (found := self._parameters(text, head.end(), schema, names)) is None:
                return None
            arguments, at = found
            members = (f"{json.dumps(name, ensure_ascii=False)}: {v}" for name, v in arguments)
            calls.append(Call(head["name"], "{" + ", ".join(members) + "}"))
            at = _SPACE.match(text, at).end()
            if at == len(text):
                return calls
            head = self.head.match(text, at)
        return None

    def _parameters(
        self, text: str, at: int, schema: Schema, names: Container[str] | None
    ) -> tuple[list[tuple[str, str]], int] | None:
        """Names and values (JSON) of a call, and its end. names: of parameters; None: any."""
        found: dict[str, str] = {}
        while (opened := self.opened.match(text, at)) is not None:
            name, close = opened["name"], self.parameter[1]
            stop = text.find(close, opened.end())
            while stop >= 0 and not self._follows(text, stop + len(close), {*found, name}, names):
                stop = text.find(close, stop + 1)
            value = self._unwrapped(text[opened.end() : stop])
            if stop < 0 or name in found or not self._is_whole(value, schema.types(name)):
                return None
            try:
                value.encode()
            except UnicodeEncodeError:
                return None
            found[name] = schema.value(name, value)
            at = stop + len(close)
        closed = self.closed.match(text, at)
        return None if closed is None else ([*found.items()], closed.end())

    def _follows(self, text: str, at: int, known: set[str], names: Container[str] | None) -> bool:
        """Whether a call's end or another parameter follows."""
        if (opened := self.opened.match(text, at)) is not None:
            name = opened["name"]
            return name not in known and (names is None or name in names)
        if (closed := self.closed.match(text, at)) is None:
            return False
        at = _SPACE.match(text, closed.end()).end()
        return at == len(text) or self.head.match(text, at) is not None

    def _unwrapped(self, value: str) -> str:
        return value.removeprefix(self.newline).removesuffix(self.newline)

    def _is_whole(self, value: str, types: frozenset[str]) -> bool:
        """Whether no tag of the call is in a value. Tags of a text are pairs, or single ends that
        nothing like a tag follows."""
        depth = 0
        for part in self.parts.finditer(value):
            if "string" not in types:
                return False
            if part["open"]:
                depth += 1
            elif depth:
                depth -= 1
            else:
                line = value[part.end() :].lstrip().partition("\n")[0].rstrip()
                if line.startswith("<") or line.endswith(">"):
                    return False
        return depth == 0

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        def parts(each: Json) -> tuple[str, Json, str]:
            before, after = (text.format(each["name"]) for text in self.function)
            schema = Schema(each)
            given = [self._form_of(schema, name) for name in schema.properties]
            if self.is_section:
                return before, sequence(*given), after
            return self.begin + before, sequence(*given), after + self.end

        if not self.is_section:
            return repeated(functions, parts, several, "\n")
        return sequence(f"{self.begin}\n", repeated(functions, parts, several, ""), self.end)

    def _form_of(self, schema: Schema, name: str) -> Json:
        before, after = (text.format(name) for text in self.parameter)
        end, value = self.newline + after, schema.alone(name)
        content: Json = {"type": "json_schema", "json_schema": value}
        if "string" in schema.types(name):
            texts = schema.choices(name)
            content = {"type": "or", "elements": list(map(text_format, texts))}
            if not texts:
                content = {"type": "any_text", "excludes": [end]}
        form = sequence(before + self.newline, content, end + self.gap)
        return form if name in schema.required else optional(form)
