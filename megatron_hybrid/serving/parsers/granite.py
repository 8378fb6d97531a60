"""Granite 3: a list of JSON behind a mark. Granite 4 writes as Hermes does.

Chat templates of ibm-granite/granite-3.1-8b-instruct and ibm-granite/granite-4.0-h-small.
"""

from megatron_hybrid.serving.parsers.dialect import TaggedJson

GRANITE = TaggedJson("<|tool_call|>", is_list=True)
