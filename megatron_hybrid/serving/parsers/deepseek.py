"""DeepSeek V3, R1 and V3.1: a name and JSON between marks, several in a section.

Chat templates of deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-R1 and deepseek-ai/DeepSeek-V3.1.
"""

import re

from megatron_hybrid.serving.parsers.dialect import HeadedJson

_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
_CALL, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001

DEEPSEEK_V3 = HeadedJson(
    *_SECTION,
    openers=(_CALL,),
    inner=(_CALL, _SEP, _END),
    head=re.compile(rf"{_CALL}function{_SEP}(?P<name>[^\s<]+)\n```json\n"),
    write=lambda name: (f"{_CALL}function{_SEP}{name}\n```json\n", f"\n```{_END}"),
    gap="\n",
)
DEEPSEEK_V31 = HeadedJson(
    *_SECTION,
    openers=(_CALL,),
    inner=(_CALL, _SEP, _END),
    head=re.compile(rf"{_CALL}(?P<name>[^\s<]+){_SEP}"),
    write=lambda name: (f"{_CALL}{name}{_SEP}", _END),
)
