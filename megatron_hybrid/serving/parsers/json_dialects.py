"""Dialects that write JSON between marks, or alone.

https://github.com/NousResearch/Hermes-Function-Calling (also Qwen up to 3, Granite 4, Ernie 4.5),
https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/, .../llama4/; chat templates of
ai21labs/AI21-Jamba-1.5-Mini (also Hunyuan), MiniMaxAI/MiniMax-M1-40k,
ibm-granite/granite-3.1-8b-instruct, microsoft/Phi-4-mini-instruct, Salesforce/Llama-xLAM-2-8b-fc-r,
nvidia/NVIDIA-Nemotron-Nano-9B-v2 (Nemotron 3 writes as Qwen3-Coder does), Cohere's Command A.

Or after a name, several in a section. DeepSeek V3, R1 and V3.1: chat templates of
deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-R1 and deepseek-ai/DeepSeek-V3.1. Kimi K2: the guide
to its calls in moonshotai/Kimi-K2-Instruct. Mistral: a list of JSON, or (from its tokenizer 11 on)
names and JSON, https://docs.mistral.ai/capabilities/function_calling, the package mistral-common.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_hybrid.serving.parsers.dialect import (
    HeadedJson,
    Json,
    Pieces,
    TaggedJson,
    Tools,
    call_or_text,
    headed,
)

_CALL, _PARAMETERS = '{"name": "', '"name": {}, "parameters": '
COHERE = TaggedJson(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    content_begin="<|START_TEXT|>",
    unsaid=("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    before='"tool_call_id": "0", "tool_name": {}, "parameters": ',
    is_list=True,
)
GRANITE = TaggedJson("<|tool_call|>", is_list=True)
HERMES = TaggedJson("<tool_call>", "</tool_call>", gap="\n")
JAMBA = TaggedJson("<tool_calls>", "</tool_calls>", is_list=True)
LLAMA3_JSON = TaggedJson(
    "<|python_tag|>", bare="{", also=(_CALL,), separator=";", before=_PARAMETERS
)
LLAMA4_JSON = TaggedJson(
    "<|python_start|>", "<|python_end|>", bare="{", also=(_CALL,), before=_PARAMETERS
)
MINIMAX_M1 = TaggedJson("<tool_calls>", "</tool_calls>", gap="\n")
NEMOTRON_JSON = TaggedJson("<TOOLCALL>", "</TOOLCALL>", is_list=True)
PHI4_MINI = TaggedJson("functools", is_list=True)
XLAM = TaggedJson(bare="[", is_list=True)

_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
_OPEN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001

DEEPSEEK_V31 = HeadedJson(
    *_SECTION,
    openers=(_OPEN,),
    inner=(_OPEN, _SEP, _END),
    head=re.compile(rf"{_OPEN}(?P<name>[^\s<]+){_SEP}"),
    write=lambda name: (f"{_OPEN}{name}{_SEP}", _END),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V31,
    head=re.compile(rf"{_OPEN}function{_SEP}(?P<name>[^\s<]+)(?=[\s<])"),
    write=lambda name: (f"{_OPEN}function{_SEP}{name}\n```json\n", f"\n```{_END}"),
    gap="\n",
)
_KIMI = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_K2 = HeadedJson(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    also=_KIMI[:1],
    openers=_KIMI[:1],
    inner=_KIMI,
    head=re.compile(
        rf"{re.escape(_KIMI[0])}\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?)\s*"
        rf"{re.escape(_KIMI[1])}\s*"
    ),
    write=lambda name: (f"{_KIMI[0]}functions.{name}:", _KIMI[2]),
    numbered=_KIMI[1],
)
_HEAD = re.compile(
    r"\s*(?P<name>[^\s\[\]{}`]{1,256})(?:\[CALL_ID\](?P<id>\w{1,64}))?(?:\[ARGS\]|\s*(?=\{))"
)
_CUT = re.compile(r"\s*[^\s\[\]{}]{0,256}(?:\[(?:C[A-Z_]*|A[A-Z]*)?\]?\w{0,64})*\s*")
"""An unfinished header."""


@dataclass(frozen=True)
class Mistral(TaggedJson):
    """Mistral's two forms, a list of JSON, or names and JSON. Both are read."""

    writes_names: bool = False
    """Whether calls are written in the newer form, with names."""

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
        return headed(functions, f"{self.begin}{{}}[ARGS]", several)


_INNER = ("[ARGS]", "[CALL_ID]")
MISTRAL = Mistral("[TOOL_CALLS]", inner=_INNER, num_id_chars=9, is_list=True, gap=" ")
MISTRAL_NAMES = Mistral("[TOOL_CALLS]", inner=_INNER, num_id_chars=9, writes_names=True)
