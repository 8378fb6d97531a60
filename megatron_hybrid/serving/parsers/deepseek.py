"""DeepSeek V3, R1 and V3.1: a name and JSON between marks, several in a section; V3.2, V4: tags.

Chat templates of deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-R1 and deepseek-ai/DeepSeek-V3.1;
encoding/README.md of deepseek-ai/DeepSeek-V3.2; V4 has another mark around calls.
"""

import re
from dataclasses import replace

from megatron_hybrid.serving.parsers.dialect import HeadedJson
from megatron_hybrid.serving.parsers.tagged_parameters import TaggedParameters, named

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
_DSML = "｜DSML｜"  # noqa: RUF001
DEEPSEEK_V32 = TaggedParameters(
    f"<{_DSML}function_calls>",
    f"</{_DSML}function_calls>",
    openers=(f"<{_DSML}invoke ",),
    function=(f'<{_DSML}invoke name="{{}}">\n', f"</{_DSML}invoke>\n"),
    is_section=True,
    parameter=(f'<{_DSML}parameter name="{{}}" string="{{}}">', f"</{_DSML}parameter>"),
    gap="\n",
    head=named(rf"<{_DSML}invoke name=", ">"),
    opened=named(rf"\s*<{_DSML}parameter name=", r'(?:string="\w+")?>'),
    closed=re.compile(rf"\s*</{_DSML}invoke>"),
    parts=re.compile(rf"(?P<open><?{_DSML}parameter name)|</?{_DSML}parameter>"),
)
DEEPSEEK_V4 = replace(DEEPSEEK_V32, begin=f"<{_DSML}tool_calls>", end=f"</{_DSML}tool_calls>")
