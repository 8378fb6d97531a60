"""Hermes, and Qwen up to 3: JSON between tags, once for each call.

https://github.com/NousResearch/Hermes-Function-Calling, chat templates of Qwen2.5 and Qwen3.
"""

from megatron_hybrid.serving.parsers.dialect import TaggedJson

HERMES = TaggedJson("<tool_call>", "</tool_call>", gap="\n")
