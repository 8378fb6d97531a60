"""Dialects that write a list of calls, as in Python.

LFM2: https://docs.liquid.ai/lfm/key-concepts/tool-use; Olmo 3: a call a line; Llama 3.2 and 4:
https://www.llama.com/docs/model-cards-and-prompt-formats/.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hybrid.serving.parsers import python_calls
from megatron_hybrid.serving.parsers.brackets import PYTHON_QUOTES
from megatron_hybrid.serving.parsers.dialect import (
    Dialect,
    Json,
    Pieces,
    ToolCall,
    Tools,
    checked,
    joined,
    repeated,
    sequence,
)
from megatron_hybrid.serving.parsers.schemas import Schema


@dataclass(frozen=True)
class Pythonic(Dialect):
    """Calls with named arguments, which are literals, in a list or one a line."""

    is_list: bool = True
    """Whether calls in forms stand in a list."""

    openers: tuple[str, ...] = ("",)
    quotes: tuple[str, ...] = PYTHON_QUOTES

    def inside(self, text: str, tools: Tools) -> Pieces | None:
        found = python_calls.calls(text)
        return None if found is None else [_call(*each, tools) for each in found]

    def mended(self, text: str, tools: Tools, has_end: bool) -> Pieces | None:
        try:
            pieces = self.inside(python_calls.with_quotes_escaped(text), tools)
        except ValueError:
            pieces = None
        if pieces and all(isinstance(each, ToolCall) for each in pieces):
            return pieces
        found = python_calls.calls(text, may_be_cut=True)
        if found is None:
            return super().mended(text, tools, has_end)
        return [_call(*each, tools) for each in found]

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        def parts(each: Json) -> tuple[str, Json, str]:
            schema = Schema(each)
            return f"{each['name']}(", joined(schema, "=", ", ", schema.form), ")"

        calls = repeated(functions, parts, several, ", " if self.is_list else "\n")
        around = ("[", "]") if self.is_list else ("", "")
        return sequence(self.marks[0] + around[0], calls, around[1] + self.marks[1])


def _call(name: str, arguments: str, written: str, tools: Tools) -> ToolCall | str:
    try:
        return checked(name, python_calls.arguments_json(arguments), tools)
    except ValueError:
        return written


LFM2 = Pythonic("<|tool_call_start|>", "<|tool_call_end|>")
OLMO3 = Pythonic("<function_calls>", "</function_calls>", is_list=False)
LLAMA4_PYTHONIC = Pythonic("<|python_start|>", "<|python_end|>", bare="[")
PYTHONIC = Pythonic("<|python_tag|>", bare="[")
