"""Qwen3-Coder, Qwen3.5, Nemotron 3 and Seed-OSS: each parameter between tags.

Chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16;
ByteDance-Seed/Seed-OSS-36B-Instruct.
"""

import re
from dataclasses import replace

from megatron_hybrid.serving.parsers.tagged_parameters import TaggedParameters, named

QWEN3_CODER = TaggedParameters(
    "<tool_call>",
    "</tool_call>",
    also=("<function=",),
    openers=("<function=",),
    function=("\n<function={}>\n", "</function>\n"),
    parameter=("<parameter={}>", "</parameter>"),
    gap="\n",
    newline="\n",
    head=named("<function=", ">"),
    opened=named(r"\s*<parameter=", ">"),
    closed=re.compile(r"\s*</function>"),
    parts=re.compile(r"(?P<open><?parameter=|<parameter)|</?parameter>|/parameter>"),
)
SEED_OSS = replace(QWEN3_CODER, begin="<seed:tool_call>", end="</seed:tool_call>")
