"""Dialect: how a family of models writes calls of functions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_hybrid.serving.parsers import json_text
from megatron_hybrid.serving.parsers.brackets import JSON_QUOTES
from megatron_hybrid.serving.parsers.schemas import Schema

_SPACE = re.compile(r"\s*")
Json = dict[str, Any]
Tools = Mapping[str, Json]
"""Functions that may be called, as in OpenAI's requests, by name."""


class Call(NamedTuple):
    """A call of a function."""

    name: str
    arguments: str
    """The JSON of an object."""
    id: str = ""
    """Id that the model gave it; "": none."""


Pieces = list[Call | str]
"""Calls, and what else was written among them."""


@dataclass(frozen=True)
class Dialect:
    """Says by which marks and in which form calls are written; `Block` reads them.

    What is a call, and what content, in all dialects:

    - Calls begin at a mark that one of the form follows; without a mark, at the answer's start.
    - Each that is whole, names a given function and has arguments that read is a call. One that
      is not is content, as the model wrote it, and drops no other: if there is none, so are marks.
    - An end mark may be missing where the answer ends, or the next call begins. Arguments
      that were cut, or whose end cannot be told, are none.
    - Inside of reasoning calls count if the answer says nothing after it.
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
    also: tuple[str, ...] = ()
    """Texts that begin a call where the mark is missing."""
    openers: tuple[str, ...] = ("{", "[")
    """Texts that a first call begins with."""
    num_id_chars: int = 0
    """Length of the ids of calls that its templates require; 0 accepts any."""
    content_begin: str = ""
    """Mark before what is said to the user."""

    @property
    def written_begin(self) -> str:
        """Mark that begins a call in forms; "" for calls without a mark."""
        return "" if self.bare else self.begin

    @property
    def written_end(self) -> str:
        """Mark that ends a call in forms; "" for calls without a mark."""
        return "" if self.bare else self.end

    @property
    def begins(self) -> tuple[str, ...]:
        """Marks, or first texts, that calls begin with anywhere."""
        return tuple(filter(None, (self.begin, *self.also)))

    @property
    def quotes(self) -> tuple[str, ...]:
        """Around texts in calls; none: they are bare, so that marks may stand in them."""
        return JSON_QUOTES

    def first(self, text: str, at: int, is_last: bool) -> int | None:
        """Return where the first call's form begins in an answer; -1: there is none; None: more has
        to come."""
        at = _SPACE.match(text, at).end()
        if at == len(text):
            return -1 if is_last else None
        rest = text[at : at + max(map(len, self.openers), default=0)]
        if any(map(rest.startswith, self.openers)):
            return at
        is_cut = at + len(rest) == len(text) and any(o.startswith(rest) for o in self.openers)
        return None if is_cut and not is_last else -1

    def inside(self, text: str, tools: Tools) -> Pieces | None:
        """The calls between the marks; None: it has not the form."""
        raise NotImplementedError

    def mended(self, text: str, tools: Tools, has_end: bool) -> Pieces | None:
        """The same of a text that is a near miss of the form. has_end: the end mark follows."""
        return None

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        """A format of a structural tag: one call, or several, of some functions.

        functions: with a name and `parameters`, a schema.
        """
        raise NotImplementedError


def json_calls(text: str, tools: Tools) -> Pieces | None:
    """The calls in objects of JSON with a name and arguments."""
    try:
        return [_json_call(one, tools) for one in json_text.objects(text)]
    except ValueError:
        return None


def checked(name: str, arguments: str, tools: Tools, id: str = "") -> Call:
    """A call whose arguments are JSON.

    Raises:
        ValueError: they are none, or there is no such function.
    """
    if name not in tools:
        raise ValueError(f"there is no function {name}")
    return Call(name, json_text.object_text(arguments), id)


def call_or_text(name: str, arguments: str, tools: Tools, text: str, id: str = "") -> Call | str:
    """A call if it is right, else its text."""
    try:
        return checked(name, arguments, tools, id)
    except ValueError:
        return text


def _json_call(text: str, tools: Tools) -> Call | str:
    try:
        members = json_text.members(text)
        given = [members.pop(key) for key in ("arguments", "parameters") if key in members]
        name = json_text.decoded(members.pop("name", "null"))
        if not isinstance(name, str) or len(given) > 1 or members.keys() - {"id", "type"}:
            return text
        (arguments,) = given or ["{}"]
        if arguments.startswith('"'):  # JSON in a text
            arguments = json_text.decoded(arguments) or "{}"
        return checked(name, arguments, tools)
    except ValueError:
        return text


@dataclass(frozen=True)
class TaggedJson(Dialect):
    """JSON between marks: an object, or a list of them."""

    arguments: str = "arguments"
    """Name of that member in forms."""
    is_list: bool = False
    """Several calls are a list between the marks, not each between marks of its own."""
    gap: str = ""
    """Around the JSON, in forms."""

    def inside(self, text: str, tools: Tools) -> Pieces | None:
        return json_calls(text, tools)

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
    """The arguments as JSON, after a header with the name."""

    head: Any = None
    """Pattern of a header, with the group `name`, and `id` if it is one."""
    write: Callable[[str], tuple[str, str]] | None = None
    """What stands around the arguments of a call in forms, by its name."""
    numbered: str = ""
    """Text before the arguments in forms, after a number; "" for none."""
    gap: str = ""
    """Text between calls, in forms."""

    def inside(self, text: str, tools: Tools) -> Pieces | None:
        pieces: Pieces = []
        at, end = 0, self.write("")[1].strip()
        while (at := _SPACE.match(text, at).end()) < len(text):
            if (head := self.head.match(text, at)) is None:
                return [*pieces, text[at:]] if pieces else None
            stop = json_text.value_end(text, head.end())
            after = stop and _SPACE.match(text, stop).end()
            if stop is None or not (text.startswith(end, after) or after == len(text)):
                cut = text.find(end, head.end())
                after = len(text) if cut < 0 else cut
                stop = head.end()
            after = min(len(text), after + len(end))
            id, arguments = head.groupdict().get("id", ""), text[head.end() : stop]
            written = text[at:after]
            pieces.append(call_or_text(head["name"], arguments, tools, written, id))
            at = after
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
    """Return the JSON schema of a function's arguments."""
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
