"""GLM 4.5 to 4.7: the name, then each parameter's name and value between tags.

Chat templates of zai-org/GLM-4.5, zai-org/GLM-4.6 and zai-org/GLM-4.7.
"""

import re

from megatron_hybrid.serving.parsers.tagged_parameters import TaggedParameters, named

GLM45 = TaggedParameters(
    "<tool_call>",
    "</tool_call>",
    openers=("",),
    function=("{}\n", ""),
    parameter=("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>"),
    gap="\n",
    head=re.compile(r"(?P<name>[^\s<{]+)(?=\s*(<arg_key>|\Z))"),
    opened=named(r"\s*<arg_key>", r"</arg_key>\s*<arg_value>"),
    closed=re.compile(r"\s*\Z"),
    parts=re.compile(r"(?P<open><arg_value>|(?<!/)arg_value>)|</?arg_value>|/arg_value>"),
)
