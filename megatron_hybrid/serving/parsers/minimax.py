"""MiniMax M2: calls in a section, each parameter between tags.

https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md
"""

import re

from megatron_hybrid.serving.parsers.tagged_parameters import TaggedParameters, named

MINIMAX_M2 = TaggedParameters(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    function=('<invoke name="{}">\n', "</invoke>\n"),
    is_section=True,
    openers=("<invoke ",),
    parameter=('<parameter name="{}">', "</parameter>"),
    gap="\n",
    head=named("<invoke name=", ">"),
    opened=named(r"\s*<parameter name=", ">"),
    closed=re.compile(r"\s*</invoke>"),
    parts=re.compile(r'(?P<open><?parameter name="|<parameter)|</?parameter>|/parameter>'),
)
