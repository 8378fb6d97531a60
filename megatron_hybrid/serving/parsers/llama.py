"""Llama 3: JSON objects without a mark or behind one, with `;` between them, Llama 4 with nothing.
Llama 3.2 and 4 also write a list of calls as in Python.

https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/, .../llama4/
"""

from megatron_hybrid.serving.parsers.dialect import TaggedJson
from megatron_hybrid.serving.parsers.pythonic import Pythonic

LLAMA3_JSON = TaggedJson("<|python_tag|>", bare="{", separator=";", arguments="parameters")
LLAMA4_JSON = TaggedJson("<|python_start|>", "<|python_end|>", bare="{", arguments="parameters")
LLAMA4_PYTHONIC = Pythonic("<|python_start|>", "<|python_end|>", bare="[")
PYTHONIC = Pythonic("<|python_tag|>", bare="[")
