"""Dialects that write a name, then JSON, between marks, several in a section.

DeepSeek V3, R1 and V3.1: chat templates of deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-R1 and
deepseek-ai/DeepSeek-V3.1. Kimi K2: the guide to its calls in moonshotai/Kimi-K2-Instruct.
"""

import re
from dataclasses import replace

from megatron_hybrid.serving.parsers.dialect import HeadedJson

_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
_CALL, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001

DEEPSEEK_V31 = HeadedJson(
    *_SECTION,
    openers=(_CALL,),
    inner=(_CALL, _SEP, _END),
    head=re.compile(rf"{_CALL}(?P<name>[^\s<]+){_SEP}"),
    write=lambda name: (f"{_CALL}{name}{_SEP}", _END),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V31,
    head=re.compile(rf"{_CALL}function{_SEP}(?P<name>[^\s<]+)(?=[\s<])"),
    write=lambda name: (f"{_CALL}function{_SEP}{name}\n```json\n", f"\n```{_END}"),
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
