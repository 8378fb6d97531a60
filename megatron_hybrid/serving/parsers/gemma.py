"""Gemma 4 and FunctionGemma: a call between marks, its texts between marks of their own.

Chat template of google/gemma-4-31B-it; https://ai.google.dev/gemma/docs/functiongemma.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron_hybrid.serving.parsers.dialect import (
    Dialect,
    Json,
    Pieces,
    Tools,
    call_or_text,
    joined,
    repeated,
    sequence,
)
from megatron_hybrid.serving.parsers.json_text import value_end
from megatron_hybrid.serving.parsers.schemas import Schema

_HEAD = re.compile(r"\s*:?call:(?P<name>[\w.-]{1,256})\s*(?=\{)")
_TEXT = r'"(?:\\.|[^"\\])*"'
_WORD = r"([^\W\d][\w.-]*)(?=\s*:)"


@dataclass(frozen=True)
class Gemma(Dialect):
    """Calls, each between marks."""

    openers: tuple[str, ...] = ("call:", ":call:")

    def inside(self, text: str, tools: Tools) -> Pieces | None:
        head = _HEAD.match(text)
        if head is None or value_end(text, head.end(), self.quotes) != len(text.rstrip()):
            return None
        quote = re.escape(self.quotes[0])
        words = re.compile(rf"{quote}(.*?){quote}|{_TEXT}|{_WORD}", re.DOTALL)
        arguments = words.sub(_as_json, text[head.end() :])
        return [call_or_text(head["name"], arguments, tools, text)]

    def mended(self, text: str, tools: Tools, has_end: bool) -> Pieces | None:
        pieces = self.inside(text.rstrip() + "{}", tools) if has_end else None
        return super().mended(text, tools, has_end) if pieces is None else pieces

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        def parts(each: Json) -> tuple[str, Json, str]:
            schema = Schema(each)
            content = joined(schema, ":", ",", partial(self._value, schema))
            return f"{self.begin}call:{each['name']}{{", content, "}" + self.end

        return repeated(functions, parts, several, "")

    def _value(self, schema: Schema, name: str) -> Json:
        """Return the format of a value: a text between marks, or JSON for any other type."""
        if "string" not in schema.types(name):
            return schema.form(name)
        quote = self.quotes[0]
        return sequence(quote, schema.text_form(name, quote), quote)


def _as_json(found: re.Match) -> str:
    """Return the JSON of a text between marks or of a member's name; a JSON text as it is."""
    if found[1] is None and found[2] is None:
        return found[0]
    return json.dumps(found[2] if found[1] is None else found[1], ensure_ascii=False)


GEMMA4 = Gemma("<|tool_call>", "<tool_call|>", inner=('<|"|>',), quotes=('<|"|>', '"'))
FUNCTIONGEMMA = Gemma(
    "<start_function_call>", "<end_function_call>", inner=("<escape>",), quotes=("<escape>", '"')
)
