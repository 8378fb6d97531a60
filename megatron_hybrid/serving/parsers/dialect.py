"""Dialect: how a family of models writes calls of functions; and the parts of an answer."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_hybrid.serving.parsers import json_text
from megatron_hybrid.serving.parsers.brackets import JSON_QUOTES
from megatron_hybrid.serving.parsers.schemas import Schema

_SPACE = re.compile(r"\s*")
_FENCE = re.compile(r"\s*(?:```(?:json)?\s*)?")
_NOTHING = re.compile(r'(?:""|null)?')
FENCE = "```"
JSON_OPENERS = ("{", "[", FENCE)
Json = dict[str, Any]
Tools = Mapping[str, Json]
"""Functions that may be called, as in OpenAI's requests, by name."""


@dataclass(frozen=True)
class Reasoning:
    """More of an answer's reasoning."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of the text to the user."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A whole call."""

    name: str
    arguments: str
    """JSON of an object, as the model wrote it if it wrote JSON."""
    id: str = field(default="", compare=False)
    """Id of the call as the model gave it, or empty. In an answer each call has one of its own."""
    index: int = 0
    """Place among the calls of an answer."""

    def to_json(self) -> Json:
        """Return the call as OpenAI's messages have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


AnswerPart = Reasoning | Content | ToolCall
Pieces = list[ToolCall | str]
"""Calls, and what else was written among them."""


@dataclass(frozen=True)
class ReasoningFormat:
    """Marks around reasoning."""

    open: str
    close: str
    always: bool = False
    """Whether every answer begins inside of reasoning, even if the prompt does not open it."""


@dataclass(frozen=True)
class Dialect:
    """The marks and the form in which a family of models writes calls; `Block` reads them.

    These rules decide in all dialects what is a call and what is content:

    - Calls begin at a mark that the dialect's form follows. Where a dialect may leave out the mark,
      calls begin the answer, or begin at a text that only a call begins with, such as <function=.
      Where it has no end mark, other calls may follow.
    - A text is a call if it is whole, names a given function and has readable arguments. Any other
      is content, as the model wrote it, and drops no call. Without any call, marks are content too.
    - An end mark may be missing or cut where the answer ends, and missing where the next call
      begins. Arguments that were cut, or whose end is ambiguous, make no call.
    - A call without arguments may have nothing, an empty text or null in their place.
    - JSON is read in place of any form: an object, several with or without a comma between them,
      or a list, also in a fence, and an object as the value of "function". A list's closing bracket
      may be missing; a comma may stand before a bracket; texts may hold raw newlines and tabs.
    - Space and quotes around a name in a tag are not part of it.
    - If two calls have the same id, the second gets another.
    - Calls inside of reasoning count if the answer says nothing after the reasoning.
    - After a million characters that were read for calls and are none, all is content.
    """

    begin: str = ""
    """Mark that begins calls."""
    end: str = ""
    """Mark that ends calls. If it is empty, their form says where they end."""
    bare: str = ""
    """First character of calls without a mark, which may begin the answer."""
    separator: str = ""
    """Character between such calls, in forms."""
    inner: tuple[str, ...] = ()
    """Further marks, which may be special tokens."""
    also: tuple[str, ...] = ()
    """Texts that begin a call where the mark is missing."""
    openers: tuple[str, ...] = ()
    """Texts that a first call begins with, if it is not JSON."""
    num_id_chars: int = 0
    """Length of the ids of calls that its templates require; 0 accepts any."""
    content_begin: str = ""
    """Mark before the text to the user."""
    unsaid: tuple[str, ...] = ()
    """Marks around the text to the user, which are not part of it."""
    quotes: tuple[str, ...] = JSON_QUOTES
    """Quotes around texts in calls. Without quotes, marks may stand in the texts."""

    @property
    def marks(self) -> tuple[str, str]:
        """Marks around a call in forms."""
        return ("", "") if self.bare else (self.begin, self.end)

    @property
    def begins(self) -> tuple[str, ...]:
        """Marks, or first texts, that calls begin with anywhere."""
        return tuple(filter(None, (self.begin, *self.also)))

    def first(self, text: str, at: int, is_last: bool) -> int | None:
        """Return where the first call's form begins in an answer: -1 if there is no call, None if
        the text so far does not decide it."""
        at = _SPACE.match(text, at).end()
        if at == len(text):
            return -1 if is_last else None
        begins = begins_with((*self.openers, *JSON_OPENERS), text, at, is_last)
        return begins and at if begins is not False else -1

    def inside(self, text: str, tools: Tools) -> Pieces | None:
        """Return the calls between the marks, or None if the text does not have the form."""
        return None

    def mended(self, text: str, tools: Tools, has_end: bool) -> Pieces | None:
        """Return the calls of a text that is a near miss of the form, or was cut, as `inside` does.
        With `has_end` the end mark follows."""
        return json_calls(text, tools, may_be_cut=True)

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        """Return the format of a structural tag for one or several calls of some functions.

        functions: each has a name and `parameters`, a schema.
        """
        raise NotImplementedError


def begins_with(openers: tuple[str, ...], text: str, at: int, is_last: bool) -> bool | None:
    """Return whether one of some texts stands at a place, or None if more text has to decide."""
    rest = text[at : at + max(map(len, openers))]
    if rest.startswith(openers):
        return True
    is_cut = at + len(rest) == len(text) and any(each.startswith(rest) for each in openers)
    return None if is_cut and not is_last else False


def json_calls(text: str, tools: Tools, may_be_cut: bool = False) -> Pieces | None:
    """Return the calls in JSON objects, or None. With `may_be_cut` the last one may be open."""
    try:
        return [_json_call(one, tools) for one in json_text.objects(text, may_be_cut)]
    except ValueError:
        return None


def checked(name: str, arguments: str, tools: Tools, id: str = "") -> ToolCall:
    """Return a call whose arguments are JSON.

    Raises:
        ValueError: they are no JSON object, or there is no such function.
    """
    if name not in tools:
        raise ValueError(f"there is no function {name}")
    arguments = "{}" if arguments.strip() in ("", '""', "null") else arguments
    return ToolCall(name, json_text.object_text(arguments), id)


def call_or_text(
    name: str, arguments: str, tools: Tools, text: str, id: str = ""
) -> ToolCall | str:
    """Return a call, or its text if `checked` refuses it."""
    try:
        return checked(name, arguments, tools, id)
    except ValueError:
        return text


def _json_call(text: str, tools: Tools) -> ToolCall | str:
    try:
        members = json_text.members(text)
        if not members.keys() - {"id", "type", "function"}:
            members = json_text.members(members.get("function", ""))
        given = [members.pop(key) for key in ("arguments", "parameters") if key in members]
        name = json_text.decoded(members.pop("name", None) or members.pop("tool_name", "null"))
        others = members.keys() - {"id", "type", "tool_call_id"}
        if not isinstance(name, str) or len(given) > 1 or others:
            return text
        (arguments,) = given or ["{}"]
        if arguments.startswith('"'):  # JSON in a text
            arguments = json_text.decoded(arguments)
        return checked(name, arguments, tools)
    except ValueError:
        return text


@dataclass(frozen=True)
class TaggedJson(Dialect):
    """JSON between marks: an object, or a list of them."""

    before: str = '"name": {}, "arguments": '
    """Members before the arguments in forms, with {} for the name in JSON."""
    is_list: bool = False
    """Whether several calls are a list between one pair of marks, not each between its own."""
    gap: str = ""
    """Text around the JSON, in forms."""

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        begin, end = self.marks[0] + self.gap, self.gap + self.marks[1] if self.end else ""

        def parts(each: Json) -> tuple[str, Json, str]:
            before = "{" + self.before.format(json.dumps(each["name"], ensure_ascii=False))
            if self.is_list:
                return before, json_schema(each), "}"
            return begin + before, json_schema(each), "}" + end

        if self.is_list:
            return sequence(begin + "[", repeated(functions, parts, several, ", "), "]" + end)
        between = f"{self.separator} " if self.separator else "" if self.bare else "\n"
        return repeated(functions, parts, several, between)


@dataclass(frozen=True)
class HeadedJson(Dialect):
    """The arguments as JSON, after a header with the name. The first and the last of the inner
    marks stand around a call."""

    head: Any = None
    """Pattern of a header, with the group `name`, and `id` if the header has one."""
    write: Callable[[str], tuple[str, str]] | None = None
    """Returns the texts around the arguments of a call in forms, by the function's name."""
    numbered: str = ""
    """Text before the arguments in forms, after a number; "" writes no number."""
    gap: str = ""
    """Text between calls, in forms."""

    def inside(self, text: str, tools: Tools) -> Pieces | None:
        pieces: Pieces = []
        begin, end = re.escape(self.inner[0]), re.escape(self.inner[-1])
        over = rf"(?:{end}|(?={begin})|\Z)"
        at, tail = 0, re.compile(rf"\s*(?:```\s*)?{over}")
        while (at := _SPACE.match(text, at).end()) < len(text):
            if (head := self.head.match(text, at)) is None:
                return [*pieces, text[at:]] if pieces else None
            start = _FENCE.match(text, head.end()).end()
            is_object = text.startswith("{", start)
            stop = (
                json_text.value_end(text, start) if is_object else _NOTHING.match(text, start).end()
            )
            after = None if stop is None else tail.match(text, stop)
            arguments = text[start:stop]
            if after is None:
                after, arguments = re.compile(over).search(text, start), "{"
            written, id = text[at : after.end()], head.groupdict().get("id", "")
            pieces.append(call_or_text(head["name"], arguments, tools, written, id))
            at = after.end()
        return pieces

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        def parts(each: Json) -> tuple[str, Json, str]:
            before, after = self.write(each["name"])
            if not self.numbered:
                return before, json_schema(each), after
            number = {"type": "regex", "pattern": "[0-9]{1,3}"}
            return before, sequence(number, self.numbered, json_schema(each)), after

        return sequence(self.begin, repeated(functions, parts, several, self.gap), self.end)


# Formats of structural tags -----------------------------------------------------------------------


def json_schema(function: Json) -> Json:
    """Return the JSON schema of a function's arguments.

    Raises:
        ValueError: `parameters` has another type than object.
    """
    schema = {k: v for k, v in (function.get("parameters") or {}).items() if k != "$id"}
    kind = schema.get("type", "object")
    if kind != "object" and (not isinstance(kind, list) or "object" not in kind):
        raise ValueError(
            f"the parameters of the function {function['name']} have the type {kind!r}; a call "
            "has an object: use 'object'"
        )
    return {"type": "json_schema", "json_schema": {**schema, "type": "object"}}


def sequence(*parts: str | Json) -> Json:
    """Return the format of some parts in a row; a text stands for itself."""
    formats = [
        {"type": "const_string", "value": each} if isinstance(each, str) else each
        for each in [part for part in parts if part] or [""]
    ]
    return {"type": "sequence", "elements": formats}


def optional(form: Json) -> Json:
    """Return the format of this form or nothing."""
    return {"type": "optional", "content": form}


def joined(schema: Schema, sign: str, separator: str, value: Callable[[str], Json]) -> Json:
    """Return the format of a function's parameters with a text between them: all that are required,
    in the order of the schema, then any of the others.

    sign: stands after a name. value: returns the format of a value, by its name.
    """

    def of(name: str) -> Json:
        return sequence(f"{name}{sign}", value(name))

    names = sorted(schema.properties, key=lambda name: name not in schema.required)
    rest = {name: optional(sequence(separator, of(name))) for name in names}
    first = [name for name in names if name in schema.required]
    if first:
        more = [sequence(separator, of(name)) for name in first[1:]]
        return sequence(of(first[0]), *more, *(rest[name] for name in names[len(first) :]))
    begun = [
        sequence(of(name), *(rest[other] for other in names[index + 1 :]))
        for index, name in enumerate(names)
    ]
    return optional({"type": "or", "elements": begun}) if begun else sequence()


def repeated(
    functions: Sequence[Json],
    parts: Callable[[Json], tuple[str, Json, str]],
    several: bool,
    separator: str,
) -> Json:
    """Return the format of one or several calls of some functions.

    parts: returns what begins, holds and ends a call of a function.
    """
    names = ("begin", "content", "end")
    tags = [dict(zip(names, parts(each))) for each in functions]
    return {
        "type": "tags_with_separator",
        "tags": [{"type": "tag", **tag} for tag in tags],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }


def headed(functions: Sequence[Json], head: str, several: bool) -> Json:
    """Return the format of one or several calls: a header, with {} for the name, and JSON."""
    return repeated(
        functions, lambda each: (head.format(each["name"]), json_schema(each), ""), several, ""
    )
