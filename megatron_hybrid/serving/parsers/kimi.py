"""Kimi K2: a name with a number and JSON between marks, several in a section.

https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md
"""

import re

from megatron_hybrid.serving.parsers.dialect import HeadedJson

_CALL, _ARGUMENTS, _END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)

KIMI_K2 = HeadedJson(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    also=(_CALL,),
    openers=(_CALL,),
    inner=(_CALL, _ARGUMENTS, _END),
    head=re.compile(
        rf"{re.escape(_CALL)}\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?)\s*"
        rf"{re.escape(_ARGUMENTS)}\s*"
    ),
    write=lambda name: (f"{_CALL}functions.{name}:", _END),
    numbered=_ARGUMENTS,
)
