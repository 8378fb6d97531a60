"""Nemotron-H and Nemotron Nano up to 2: a list of JSON between marks. Nemotron 3 writes as
Qwen3-Coder does.

Chat templates of nvidia/NVIDIA-Nemotron-Nano-9B-v2 and nvidia/Nemotron-H-8B-Reasoning-128K.
"""

from megatron_hybrid.serving.parsers.dialect import TaggedJson

NEMOTRON_JSON = TaggedJson("<TOOLCALL>", "</TOOLCALL>", is_list=True)
