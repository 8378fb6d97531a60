"""Canonical names of parameters, for any layer spec and megatron-core release.

The canonical spelling is that of the local spec in 0.16: norms apart from projections.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron_hybrid import compat

# Where the transformer_engine spec keeps a layer's norm -> where the local spec keeps it. The rest
# of such a name is `weight` or `bias` in both.
_FUSED_NORMS = {
    "mixer.in_proj.layer_norm_": "norm.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.in_proj.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}

# How megatron-core spells the tensors of single experts: SequentialMLP, and TEGroupedMLP.
_EXPERT = re.compile(
    r"^(?P<experts>.*\.experts\.)(?:local_experts\.(?P<number>\d+)\.)?"
    r"(?P<name>linear_fc[12]\.(?:weight|bias))(?P<last>\d*)$"
)
_EXPERT_EXTRA_STATE = re.compile(r"^.*\.experts\..*\._extra_state$")

_LAYER = re.compile(r"^(decoder\.layers\.|mtp\.layers\.\d+\.mtp_model_layer\.layers\.)(\d+)\.(.*)$")


def canonical_name(name: str, layer_offset: int = 0) -> str:
    """Return the canonical spelling of a parameter's name.

    Args:
        layer_offset: number of layers in the pipeline stages before that of `name`.
    """
    name = compat.canonical_parameter_name(name)
    match = _LAYER.match(name)
    if match is None:
        return name
    prefix, layer, rest = match.groups()
    for fused, local in _FUSED_NORMS.items():
        if rest.startswith(fused):
            rest = local + rest.removeprefix(fused)
    if prefix.startswith("mtp."):
        layer_offset = 0
    return f"{prefix}{int(layer) + layer_offset}.{rest}"


def is_parameter(name: str) -> bool:
    """Return whether a state-dict key names a tensor of the model, not private extra state."""
    return not name.endswith("._extra_state")


def is_of_prediction(name: str) -> bool:
    """Return whether a parameter's name is one of the MTP heads."""
    return name.startswith("mtp.")


def separate_expert(name: str) -> tuple[str, int] | None:
    """Split the name of a single expert's tensor into that of the stacked tensor and the expert's
    number; None for other names."""
    match = _EXPERT.match(name)
    number = (match["number"] or match["last"]) if match else ""
    return (match["experts"] + match["name"], int(number)) if number else None


def group_experts(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Group the tensors of a state dict that may have separate experts: the others by name, and
    those of the experts in order, by the name of the stacked tensor."""
    others: dict[str, Any] = {}
    apart: dict[str, dict[int, Any]] = {}
    for name, value in state.items():
        if (expert := separate_expert(name)) is not None:
            apart.setdefault(expert[0], {})[expert[1]] = value
        elif not _EXPERT_EXTRA_STATE.match(name):
            others[name] = value
    return others, {
        name: [tensors[number] for number in sorted(tensors)] for name, tensors in apart.items()
    }


def stack_experts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Stack the experts of a state dict that may have separate ones."""
    others, apart = group_experts(state)
    return others | {name: torch.stack(tensors) for name, tensors in apart.items()}


def respell(model: nn.Module, state_dict: dict[str, Any], *_: Any) -> None:
    """Let `load_state_dict` accept the names of both layer specs and of any megatron-core release.
    This is a hook."""
    own = {canonical_name(name): name for name in model.state_dict() if is_parameter(name)}
    stacked = stack_experts(state_dict)
    state_dict.clear()
    state_dict.update(stacked)
    for name in list(state_dict):
        if is_parameter(name):
            value = state_dict.pop(name)
            state_dict[own.get(canonical_name(name), name)] = value
