"""Qwen3-Coder, Qwen3.5 and Nemotron 3: each parameter between tags.

Chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.
"""

import re

from megatron_hybrid.serving.parsers.tagged_parameters import TaggedParameters

QWEN3_CODER = TaggedParameters(
    "<tool_call>",
    "</tool_call>",
    also=("<function=",),
    openers=("<function=",),
    function=("\n<function={}>\n", "</function>\n"),
    parameter=("<parameter={}>", "</parameter>"),
    gap="\n",
    newline="\n",
    head=re.compile(r"<function=(?P<name>[^>\s]+)>"),
    opened=re.compile(r"\s*<parameter=(?P<name>[^>\n]+)>"),
    closed=re.compile(r"\s*</function>"),
    parts=re.compile(r"(?P<open><?parameter=|<parameter)|</?parameter>|/parameter>"),
)
