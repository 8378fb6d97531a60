"""Unsharded state dicts of other models, loaded as a checkpoint is."""

from megatron_hybrid.checkpoints.folder import FLOATS
from megatron_hybrid.checkpoints.huggingface.base import TensorMap
from megatron_hybrid.checkpoints.model_tensors import names_of_all_stages
from megatron_hybrid.checkpoints.tensor_source import TensorSource, load_tensors
from megatron_hybrid.models.parameter_names import canonical_name, is_parameter, stack_experts


def load_state(model, state, cast=False):
    """Load a state dict, such as that of megatron-core's own hybrid model: tensors by their names
    in any layer spec and megatron-core release. Extra states of Transformer Engine are ignored."""
    state = stack_experts(state)
    source = TensorSource(
        "state dict",
        {canonical_name(name): name for name in state if is_parameter(name)},
        lambda name: tuple(state[name].shape),
        lambda name: state[name].dtype,
        state.__getitem__,
        FLOATS if cast else (),
    )
    maps = [TensorMap((name,), (name,)) for name in names_of_all_stages(model)]
    load_tensors(model, maps, source)
