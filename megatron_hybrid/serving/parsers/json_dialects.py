"""Dialects that write JSON between marks, or alone.

https://github.com/NousResearch/Hermes-Function-Calling (also Qwen up to 3, Granite 4, Ernie 4.5),
https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/, .../llama4/; chat templates of
ai21labs/AI21-Jamba-1.5-Mini (also Hunyuan), MiniMaxAI/MiniMax-M1-40k,
ibm-granite/granite-3.1-8b-instruct, microsoft/Phi-4-mini-instruct, Salesforce/Llama-xLAM-2-8b-fc-r,
nvidia/NVIDIA-Nemotron-Nano-9B-v2 (Nemotron 3 writes as Qwen3-Coder does), Cohere's Command A.
"""

from megatron_hybrid.serving.parsers.dialect import TaggedJson

_CALL, _PARAMETERS = '{"name": "', '"name": {}, "parameters": '
COHERE = TaggedJson(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    content_begin="<|START_TEXT|>",
    unsaid=("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    before='"tool_call_id": "0", "tool_name": {}, "parameters": ',
    is_list=True,
)
GRANITE = TaggedJson("<|tool_call|>", is_list=True)
HERMES = TaggedJson("<tool_call>", "</tool_call>", gap="\n")
JAMBA = TaggedJson("<tool_calls>", "</tool_calls>", is_list=True)
LLAMA3_JSON = TaggedJson(
    "<|python_tag|>", bare="{", also=(_CALL,), separator=";", before=_PARAMETERS
)
LLAMA4_JSON = TaggedJson(
    "<|python_start|>", "<|python_end|>", bare="{", also=(_CALL,), before=_PARAMETERS
)
MINIMAX_M1 = TaggedJson("<tool_calls>", "</tool_calls>", gap="\n")
NEMOTRON_JSON = TaggedJson("<TOOLCALL>", "</TOOLCALL>", is_list=True)
PHI4_MINI = TaggedJson("functools", is_list=True)
XLAM = TaggedJson(bare="[", is_list=True)
