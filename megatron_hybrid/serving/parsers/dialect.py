"""Dialect: how a family of models writes calls of functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_hybrid.serving.parsers import json_text
from megatron_hybrid.serving.parsers.schemas import Schema

Json = dict[str, Any]
Tools = Mapping[str, Json]
"""Functions that may be called, as in OpenAI's requests, by name."""


class Call(NamedTuple):
    """Of a function."""

    name: str
    arguments: str
    """The JSON of an object."""
    id: str = ""
    """That the model gave it; "": none."""


Read = tuple[int, list[Call]]
"""Where a text of calls ends, and the calls; none: what is there is no call."""


@dataclass(frozen=True)
class Dialect:
    """Reads calls, and says by which form they can be asked for.

    `read` tells the same of a text and of any longer one that begins with it, once it tells
    anything: so calls do not depend on how the answer is cut.
    """

    begin: str = ""
    """Mark that begins calls."""
    end: str = ""
    """Mark that ends them; none: they say themselves where they end."""
    bare: str = ""
    """The answer may also be calls without a mark, which begin with this character."""
    separator: str = ""
    """Character between such calls."""
    inner: tuple[str, ...] = ()
    """Further marks, which may be special tokens."""
    num_id_chars: int = 0
    """That its templates want in the id of a call; 0: any number."""
    content_begin: str = ""
    """Mark before what is said to the user."""

    @property
    def written_begin(self) -> str:
        """In forms: calls without a mark have none."""
        return "" if self.bare else self.begin

    @property
    def written_end(self) -> str:
        """Likewise."""
        return "" if self.bare else self.end

    @property
    def closers(self) -> tuple[str, ...]:
        """Texts that calls end with, before the end mark."""
        return ("}", "]")

    @property
    def quotes(self) -> str:
        """Characters around texts in calls."""
        return '"'

    def read(self, text: str, tools: Tools, is_last: bool, looked: int = 0) -> Read | None:
        """The calls that a text begins with; None: more of it has to come.

        Args:
            text: from the mark that begins them, or from the character `bare`.
            is_last: nothing follows.
            looked: so much of it was told of before, by None.
        """
        start = len(self.begin) if self.begin and text.startswith(self.begin) else 0
        at = max(start, looked - len(self.end) + 1)
        first = text.find(self.end, start)
        while (stop := text.find(self.end, at)) >= 0:
            # Most of many marks are parts of a text: that is seen by what is before them.
            before = text[max(start, stop - 64) : stop].rstrip()
            if stop == first or before.endswith(self.closers):
                calls = self.inside(text[start:stop], tools)
                if calls is not None:
                    return stop + len(self.end), calls
            at = stop + 1
        # The end mark may have been a stop.
        return (len(text), self.inside(text[start:], tools) or []) if is_last else None

    def inside(self, text: str, tools: Tools) -> list[Call] | None:
        """The calls between the marks; None: the text is open, so an end mark behind it is a part
        of it."""
        raise NotImplementedError

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        """A format of a structural tag: one call, or several, of some functions.

        functions: with a name and `parameters`, a schema.
        """
        raise NotImplementedError


def json_calls(text: str, tools: Tools) -> list[Call]:
    """The calls in a JSON text: an object with a name and arguments, or a list of them. All have to
    be right, or there is none."""
    try:
        text = text.strip()
        each = json_text.elements(text) if text.startswith("[") else [text]
        return [_json_call(one, tools) for one in each]
    except ValueError:
        return []


def checked(name: str, arguments: str, tools: Tools, id: str = "") -> Call:
    """A call whose arguments are JSON.

    Raises:
        ValueError: they are none, or there is no such function.
    """
    if name not in tools:
        raise ValueError(f"there is no function {name}")
    return Call(name, json_text.object_text(arguments), id)


def _json_call(text: str, tools: Tools) -> Call:
    members = json_text.members(text)
    given = [members.pop(key) for key in ("arguments", "parameters") if key in members]
    name = json_text.decoded(members.pop("name", "null"))
    if not isinstance(name, str) or len(given) > 1 or members.keys() - {"id", "type"}:
        raise ValueError("it has other members than a call")
    (arguments,) = given or ["{}"]
    if arguments.startswith('"'):  # JSON in a text
        arguments = json_text.decoded(arguments) or "{}"
    return checked(name, arguments, tools)


@dataclass(frozen=True)
class TaggedJson(Dialect):
    """JSON between marks: an object, or a list of them."""

    arguments: str = "arguments"
    """Name of that member in forms."""
    is_list: bool = False
    """Several calls are a list between the marks, not each between marks of its own."""
    gap: str = ""
    """Around the JSON, in forms."""

    def read(self, text: str, tools: Tools, is_last: bool, looked: int = 0) -> Read | None:
        if self.end and text.startswith(self.begin):
            return super().read(text, tools, is_last, looked)
        start = len(self.begin) if self.begin and text.startswith(self.begin) else 0
        first = text[start:].lstrip()[:1]
        if first not in ("{", "["):
            return (start, []) if first or is_last else None
        stop = json_text.value_end(text, start)
        if stop is None:
            return (len(text), []) if is_last else None
        return stop, json_calls(text[start:stop], tools)

    def inside(self, text: str, tools: Tools) -> list[Call] | None:
        return None if json_text.ends_in_string(text) else json_calls(text, tools)

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        begin, end = self.written_begin + self.gap, self.gap + self.written_end if self.end else ""

        def parts(each: Json) -> tuple[str, Json, str]:
            name = json.dumps(each["name"], ensure_ascii=False)
            before = f'{{"name": {name}, "{self.arguments}": '
            if self.is_list:
                return before, json_schema(each), "}"
            return begin + before, json_schema(each), "}" + end

        if self.is_list:
            return sequence(begin + "[", repeated(functions, parts, several, ", "), "]" + end)
        between = f"{self.separator} " if self.separator else "" if self.bare else "\n"
        return repeated(functions, parts, several, between)


@dataclass(frozen=True)
class HeadedJson(Dialect):
    """The arguments as JSON, behind a header with the name."""

    head: Any = None
    """Pattern of a header, with the group `name`, and `id` if it is one."""
    tail: Any = None
    """Pattern of what ends a call."""
    write: Callable[[str], tuple[str, str]] | None = None
    """What stands around the arguments of a call in forms, by its name."""
    numbered: str = ""
    """Before the arguments in forms, behind a number; "": there is none."""
    gap: str = ""
    """Between calls, in forms."""

    @property
    def closers(self) -> tuple[str, ...]:
        return (self.write("")[1].strip(),)

    def inside(self, text: str, tools: Tools) -> list[Call] | None:
        calls, at = [], 0
        try:
            while text[at:].strip():
                if (head := self.head.match(text, at)) is None:
                    return []
                stop = json_text.value_end(text, head.end())
                if stop is None:
                    return None
                id = head.groupdict().get("id", "")
                calls.append(checked(head["name"], text[head.end() : stop], tools, id))
                if (tail := self.tail.match(text, stop)) is None:
                    return []
                at = tail.end()
        except ValueError:
            return []
        return calls

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
    """Of a function's arguments."""
    schema = {k: v for k, v in (function.get("parameters") or {}).items() if k != "$id"}
    return {"type": "json_schema", "json_schema": {"type": "object", **schema}}


def text_format(text: str) -> Json:
    """A text as it is."""
    return {"type": "const_string", "value": text}


def sequence(*parts: str | Json) -> Json:
    """One after the other; texts as they are."""
    formats = [text_format(each) if isinstance(each, str) else each for each in parts if each]
    return {"type": "sequence", "elements": formats or [{"type": "const_string", "value": ""}]}


def optional(form: Json) -> Json:
    """It, or nothing."""
    return {"type": "optional", "content": form}


def joined(schema: Schema, of: Callable[[str], Json], separator: str) -> Json:
    """The parameters of a function with a text between them: all that are required, in the order of
    the schema, then any of the others.

    of: the format of one, by its name.
    """
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
    """A call of one of some functions, or several.

    parts: what begins, holds and ends a call of a function.
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
