"""Jamba and Hunyuan: a list of JSON between tags; MiniMax M1: an object a line.

Chat templates of ai21labs/AI21-Jamba-1.5-Mini, tencent/Hunyuan-A13B-Instruct and
MiniMaxAI/MiniMax-M1-40k.
"""

from megatron_hybrid.serving.parsers.dialect import TaggedJson

JAMBA = TaggedJson("<tool_calls>", "</tool_calls>", is_list=True)
MINIMAX_M1 = TaggedJson("<tool_calls>", "</tool_calls>", gap="\n")
