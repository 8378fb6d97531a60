"""Mistral: behind a mark a list of JSON, or (from its tokenizer 11 on) a name and JSON.

https://docs.mistral.ai/capabilities/function_calling, the package mistral-common.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hybrid.serving.parsers import json_text
from megatron_hybrid.serving.parsers.dialect import (
    Json,
    Read,
    TaggedJson,
    Tools,
    checked,
    json_schema,
    repeated,
)

_HEAD = re.compile(r"\s*(?P<name>[^\s\[{]+)(\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)")


@dataclass(frozen=True)
class Mistral(TaggedJson):
    """Both forms are read."""

    writes_names: bool = False
    """Forms have the newer one."""

    def read(self, text: str, tools: Tools, is_last: bool, looked: int = 0) -> Read | None:
        head = _HEAD.match(text, len(self.begin))
        if head is None:
            inside = text[len(self.begin) :].lstrip()
            if inside and inside[0] not in "[{":  # a name, whose arguments follow
                return (len(self.begin), []) if is_last or "{" in inside else None
            return super().read(text, tools, is_last, looked)
        if (stop := json_text.value_end(text, head.end())) is None:
            return (len(text), []) if is_last else None
        try:
            return stop, [checked(head["name"], text[head.end() : stop], tools)]
        except ValueError:
            return stop, []

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        if not self.writes_names:
            return super().form(functions, several)
        return repeated(
            functions,
            lambda each: (f"{self.begin}{each['name']}[ARGS]", json_schema(each), ""),
            several,
            "",
        )


_INNER = ("[ARGS]", "[CALL_ID]")
MISTRAL = Mistral("[TOOL_CALLS]", inner=_INNER, num_id_chars=9, is_list=True, gap=" ")
MISTRAL_NAMES = Mistral("[TOOL_CALLS]", inner=_INNER, num_id_chars=9, writes_names=True)
