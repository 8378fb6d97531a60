"""Granite 3 and Phi-4-mini: a list of JSON after a mark; xLAM: without one. Granite 4 writes as
Hermes does.

Chat templates of microsoft/Phi-4-mini-instruct, Salesforce/Llama-xLAM-2-8b-fc-r,
ibm-granite/granite-3.1-8b-instruct and ibm-granite/granite-4.0-h-small.
"""

from megatron_hybrid.serving.parsers.dialect import TaggedJson

GRANITE = TaggedJson("<|tool_call|>", is_list=True)
PHI4_MINI = TaggedJson("functools", is_list=True)
XLAM = TaggedJson(bare="[", is_list=True)
