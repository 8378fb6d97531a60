"""Mistral: after a mark a list of JSON, or (from its tokenizer 11 on) a name and JSON.

https://docs.mistral.ai/capabilities/function_calling, the package mistral-common.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hybrid.serving.parsers.dialect import (
    Json,
    Pieces,
    TaggedJson,
    Tools,
    call_or_text,
    json_schema,
    repeated,
)

_HEAD = re.compile(
    r"\s*(?P<name>[^\s\[\]{}`]{1,256})(?:\[CALL_ID\](?P<id>\w{1,64}))?(?:\[ARGS\]|\s*(?=\{))"
)
_CUT = re.compile(r"\s*[^\s\[\]{}]{0,256}(?:\[(?:C[A-Z_]*|A[A-Z]*)?\]?\w{0,64})*\s*")
"""A header that may go on."""


@dataclass(frozen=True)
class Mistral(TaggedJson):
    """Both forms are read."""

    writes_names: bool = False
    """Forms have the newer one."""

    def first(self, text: str, at: int, is_last: bool) -> int | None:
        if (head := _HEAD.match(text, at)) is not None:
            return head.end()
        found = super().first(text, at, is_last)
        if found == -1 and not is_last and _CUT.fullmatch(text, at, at + 512):
            return None if len(text) < at + 512 else -1
        return found

    def inside(self, text: str, tools: Tools) -> Pieces | None:
        head = _HEAD.match(text)
        return head and [
            call_or_text(head["name"], text[head.end() :], tools, text, head["id"] or "")
        ]

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
