"""Dialects that write a list of calls, as in Python. See also `llama`.

LFM2: https://docs.liquid.ai/lfm/key-concepts/tool-use; Olmo 3: a call a line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hybrid.serving.parsers.dialect import (
    Call,
    Dialect,
    Json,
    Read,
    Tools,
    checked,
    joined,
    repeated,
    sequence,
)
from megatron_hybrid.serving.parsers.literals import Literals
from megatron_hybrid.serving.parsers.schemas import Schema

_BEGINS = re.compile(r"\s*(?P<list>\[?)\s*(?P<name>[^\W\d][\w.-]*)\s*\(")


@dataclass(frozen=True)
class Pythonic(Dialect):
    """Calls with named arguments, which are literals; a list of them, or one a line."""

    is_list: bool = True
    """In forms."""

    @property
    def closers(self) -> tuple[str, ...]:
        return (")", "]")

    @property
    def quotes(self) -> str:
        return "'\""

    def read(self, text: str, tools: Tools, is_last: bool, looked: int = 0) -> Read | None:
        start = len(self.begin) if self.begin and text.startswith(self.begin) else 0
        if start and self.end:
            return super().read(text, tools, is_last, looked)
        begins = _BEGINS.match(text, start)
        if begins is None or not begins["list"] or begins["name"] not in tools:
            return (start or 1, [])
        literals = Literals(text, start)
        try:
            calls = _calls(literals, tools)
            return literals.at, calls
        except ValueError:
            return (len(text), []) if is_last else None

    def inside(self, text: str, tools: Tools) -> list[Call] | None:
        begins = _BEGINS.match(text)
        if begins is None or begins["name"] not in tools:
            return []
        literals = Literals(text)
        try:
            calls = _calls(literals, tools)
        except ValueError:
            return None  # the end mark may be in a text
        return [] if text[literals.at :].strip() else calls

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        def parts(each: Json) -> tuple[str, Json, str]:
            schema = Schema(each)

            def of(name: str) -> Json:
                value = {"type": "json_schema", "json_schema": schema.alone(name)}
                return sequence(f"{name}=", value)

            return f"{each['name']}(", joined(schema, of, ", "), ")"

        calls = repeated(functions, parts, several, ", " if self.is_list else "\n")
        around = ("[", "]") if self.is_list else ("", "")
        return sequence(self.written_begin + around[0], calls, around[1] + self.written_end)


def _calls(literals: Literals, tools: Tools) -> list[Call]:
    """Calls, up to the end of their list or of the text."""
    calls, in_list = [], literals.has("[")
    while True:
        name = literals.name()
        literals.take("(")
        calls.append(checked(name, literals.members("=", ")", literals.name), tools))
        if in_list and not literals.has(","):
            literals.take("]")
            return calls
        if not in_list and literals.is_over:
            return calls


LFM2 = Pythonic("<|tool_call_start|>", "<|tool_call_end|>")
OLMO3 = Pythonic("<function_calls>", "</function_calls>", is_list=False)
