"""Names of GPTModel's parameters and those of the HybridModel that serves it."""

import re

_LAYER = re.compile(r"^(?P<layers>decoder\.layers\.)(?P<number>\d+)\.(?P<rest>(?P<part>\w+)\..*)$")
_PREDICTION = re.compile(
    r"^(?P<head>mtp\.layers\.\d+\.)(?:transformer_layer|mtp_model_layer)\."
    r"(?P<rest>(?P<part>(?!layers\b)\w+)\..*)$"
)
_OF_PREDICTION = re.compile(r"^(mtp\.layers\.\d+\.)mtp_model_layer\.layers\.\d+\.(.*)$")
_MLP_PARTS = ("pre_mlp_layernorm", "mlp")


def gpt_to_hybrid_name(name: str) -> str:
    """Return the name in a HybridModel of a parameter of a GPTModel.

    Layer i of a GPTModel, attention and MLP in one, is the layers 2i and 2i + 1; the layer of an
    MTP head, `transformer_layer` in all checkpoints, is its layers 0 and 1.
    """
    if name.startswith("decoder.final_layernorm."):
        return name.replace("final_layernorm", "final_norm", 1)
    if (match := _PREDICTION.match(name)) is not None:
        number = int(match["part"] in _MLP_PARTS)
        return f"{match['head']}mtp_model_layer.layers.{number}.{match['rest']}"
    if (match := _LAYER.match(name)) is None:
        return name
    number = 2 * int(match["number"]) + (match["part"] in _MLP_PARTS)
    return f"{match['layers']}{number}.{match['rest']}"


def hybrid_to_gpt_name(name: str) -> str:
    """Invert `gpt_to_hybrid_name`, in the spelling of checkpoints."""
    if name.startswith("decoder.final_norm."):
        return name.replace("final_norm", "final_layernorm", 1)
    if (match := _OF_PREDICTION.match(name)) is not None:
        return f"{match[1]}transformer_layer.{match[2]}"
    if (match := _LAYER.match(name)) is None:
        return name
    return f"{match['layers']}{int(match['number']) // 2}.{match['rest']}"
