"""Gemma 4 and FunctionGemma: a call between marks, its texts between marks of their own.

Chat template of google/gemma-4-31B-it; https://ai.google.dev/gemma/docs/functiongemma.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hybrid.serving.parsers.dialect import (
    Call,
    Dialect,
    Json,
    Tools,
    checked,
    joined,
    repeated,
    sequence,
    text_format,
)
from megatron_hybrid.serving.parsers.literals import Literals
from megatron_hybrid.serving.parsers.schemas import Schema


@dataclass(frozen=True)
class Gemma(Dialect):
    """Each call is between marks."""

    quote: str = ""
    """Around texts."""

    def inside(self, text: str, tools: Tools) -> list[Call] | None:
        literals = Literals(text, quote=self.quote)
        try:
            literals.take("call:")
            if (name := literals.name()) not in tools:
                return []
        except ValueError:
            return []
        try:
            literals.take("{")
            call = checked(name, literals.members(":", "}", literals.name), tools)
        except ValueError:
            return None
        return [call] if literals.is_over else []

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        def parts(each: Json) -> tuple[str, Json, str]:
            schema = Schema(each)
            content = joined(
                schema, lambda name: sequence(f"{name}:", self._value(schema, name)), ","
            )
            return f"{self.begin}call:{each['name']}{{", content, "}" + self.end

        return repeated(functions, parts, several, "")

    def _value(self, schema: Schema, name: str) -> Json:
        """A text between marks, or a value that JSON writes alike, if nothing in it is a text."""
        if "string" not in schema.types(name):
            return {"type": "json_schema", "json_schema": schema.alone(name)}
        texts: list[Any] = list(map(text_format, schema.choices(name)))
        one = {"type": "or", "elements": texts} if texts else None
        return sequence(
            self.quote, one or {"type": "any_text", "excludes": [self.quote]}, self.quote
        )


GEMMA4 = Gemma("<|tool_call>", "<tool_call|>", inner=('<|"|>',), quote='<|"|>')
FUNCTIONGEMMA = Gemma(
    "<start_function_call>", "<end_function_call>", inner=("<escape>",), quote="<escape>"
)
