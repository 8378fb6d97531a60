"""Names of GPTModel's parameters and those of the HybridModel that serves it."""

from __future__ import annotations

import re

_LAYER = re.compile(r"^(?P<layers>decoder\.layers\.)(?P<number>\d+)\.(?P<rest>(?P<part>\w+)\..*)$")
_MLP_PARTS = ("pre_mlp_layernorm", "mlp")


def gpt_to_hybrid_name(name: str) -> str:
    """The name in a HybridModel of a parameter of a GPTModel.

    Layer i of a GPTModel, attention and MLP in one, is the layers 2i and 2i + 1.
    """
    if name.startswith("decoder.final_layernorm."):
        return name.replace("final_layernorm", "final_norm", 1)
    match = _LAYER.match(name)
    if match is None:
        return name
    number = 2 * int(match["number"]) + (match["part"] in _MLP_PARTS)
    return f"{match['layers']}{number}.{match['rest']}"


def hybrid_to_gpt_name(name: str) -> str:
    """Inverse of `gpt_to_hybrid_name`."""
    if name.startswith("decoder.final_norm."):
        return name.replace("final_norm", "final_layernorm", 1)
    match = _LAYER.match(name)
    if match is None:
        return name
    return f"{match['layers']}{int(match['number']) // 2}.{match['rest']}"
