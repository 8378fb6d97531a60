"""Jamba: a list of JSON between tags.

Chat template of ai21labs/AI21-Jamba-1.5-Mini.
"""

from megatron_hybrid.serving.parsers.dialect import TaggedJson

JAMBA = TaggedJson("<tool_calls>", "</tool_calls>", is_list=True)
