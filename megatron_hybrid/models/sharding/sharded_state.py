"""The sharded state dict of a model for megatron-core's distributed checkpoints.

Keys are those of core's own hybrid models, so that `torch_dist` checkpoints load in both
directions: concatenated blocks are separate (`in_proj.weight.z`), and each layer's norm has the
name of the transformer_engine spec, as in core's local specs.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensorFactory
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_object_for_checkpoint,
)
from megatron.core.utils import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from torch import Tensor

from megatron_hybrid.models.parameter_names import canonical_name, is_parameter, separate_expert


def sharded_state_dict(model: Any, prefix: str, metadata: dict | None) -> ShardedStateDict:
    """Sharded tensors (and extra states) of a pipeline stage, by this rank's state-dict names.

    Args:
        model: a HybridModel; its parameters carry their sharding (`tensor_sharding`).
        prefix: of names and keys.
        metadata: core's; `dp_cp_group` and `singleton_local_shards` are used.
    """
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    groups = {"tp_group": model.pg_collection.tp, "dp_cp_group": metadata["dp_cp_group"]}
    replica_id = (0, groups["tp_group"].rank(), groups["dp_cp_group"].rank())
    singletons = metadata.get("singleton_local_shards", False)
    state: ShardedStateDict = {}
    values = model.state_dict(keep_vars=True)
    for name, key in distributed_keys(model).items():
        value, key = values[name], prefix + key
        if EXPERTS in key:
            state[prefix + name] = _stacked_experts(key, value, groups, singletons)
        elif is_parameter(name):
            state[prefix + name] = _sharded_tensor(key, value, groups, singletons)
        else:
            state[prefix + name] = make_sharded_object_for_checkpoint(
                value, key, replica_id=replica_id
            )
    return state


EXPERTS = ".mlp.experts.experts."
"""What core puts into the keys of experts, whose names have one `experts` less."""


def distributed_keys(model: Any) -> dict[str, str]:
    """State-dict name -> key in core's distributed checkpoints, of this pipeline stage.

    Raises:
        ValueError: the model has a parameter for each expert.
    """
    fused_norms, keys = _fused_norms(model), {}
    for name in model.state_dict(keep_vars=True):
        key = canonical_name(name, model.layer_offset)
        owner, _, which = key.rpartition(".")
        if owner in fused_norms:
            key = f"{fused_norms[owner]}.layer_norm_{which}"
        if separate_expert(key) is not None:
            raise ValueError(
                f"{key} is of a model that megatron-core built, with a parameter for each expert. "
                "Use that model's sharded_state_dict."
            )
        keys[name] = key.replace(".mlp.experts.", EXPERTS)
    return keys


def _fused_norms(model: Any) -> dict[str, str]:
    """Each layer's norm -> the projection behind it, both as full canonical names."""
    modules = {}
    for i, layer in enumerate(model.decoder.layers, model.layer_offset):
        path = f"decoder.layers.{i}."
        mixer = getattr(layer, layer.mixer_name)
        if mixer.input_projection is not None:
            modules[path + layer.norm_name] = f"{path}{layer.mixer_name}.{mixer.input_projection}"
    return modules


def _sharded_tensor(
    key: str, value: Tensor, groups: dict[str, Any], singletons: bool
) -> ShardedTensor | ShardedTensorFactory:
    if not getattr(value, "tensor_model_parallel", False):
        return make_sharded_tensor_for_checkpoint(value, key, **groups)
    sharded = make_tp_sharded_tensor_for_checkpoint(
        value,
        key,
        value.partition_dim,
        # A vocabulary is padded by as much as the tensor-parallel size asks for.
        allow_shape_mismatch=hasattr(value, "unpadded_size"),
        **groups,
    )
    names = getattr(value, "section_names", None)
    if names is not None:
        return _split_sections(sharded, value, names, groups["tp_group"])
    if len(getattr(value, "partition_sections", ())) == 2:  # gate and value of a gated MLP
        return apply_swiglu_sharded_factory(sharded, (), singletons)
    return sharded


def _split_sections(
    sharded: ShardedTensor,
    parameter: Tensor,
    names: tuple[str, ...],
    group: torch.distributed.ProcessGroup,
) -> ShardedTensorFactory:
    """One tensor per concatenated block, `key.name`, each cut over the ranks separately."""
    dim = parameter.partition_dim
    sizes = [size // group.size() for size in parameter.partition_sections]
    place = (dim, group.rank(), group.size())

    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None) -> list:
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{name}", block, place, replica_id=replica_id)
            for name, block in zip(names, tensor.split(sizes, dim))
        ]

    def merge(blocks: list[Tensor]) -> Tensor:
        return torch.cat(blocks, dim)

    return ShardedTensorFactory(sharded.key, sharded.data, build, merge, sharded.replica_id)


def _stacked_experts(
    key: str, parameter: Tensor, groups: dict[str, Any], singletons: bool
) -> ShardedTensorFactory:
    """One piece per expert and block of its rows, each cut over the ranks separately: the places of
    core's experts, in all of its forms."""
    group = groups["tp_group"]
    cut = getattr(parameter, "tensor_model_parallel", False)
    # The dimension within an expert's tensor, which has no leading one.
    dim = parameter.partition_dim - 1 if cut else 0
    num_blocks = len(getattr(parameter, "partition_sections", (0,)))
    rank, size = (group.rank(), group.size()) if cut else (0, 1)
    replica_id = (0, 0 if cut else group.rank(), groups["dp_cp_group"].rank())

    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None) -> list:
        pieces = []
        for i, expert in enumerate(tensor.unbind(0)):
            for j, block in enumerate(expert.chunk(num_blocks, dim)):
                if singletons:
                    name = key.replace(EXPERTS, f"{EXPERTS}{i}.")
                    name += ("_w", "_v")[j] if num_blocks == 2 else ""
                    places = [(dim, rank, size)]
                else:
                    name = key
                    places = [(0, i, len(tensor)), (1 + dim, j * size + rank, num_blocks * size)]
                pieces.append(
                    ShardedTensor.from_rank_offsets(
                        name,
                        block,
                        *places,
                        replica_id=replica_id,
                        prepend_axis_num=0 if singletons else 1,
                    )
                )
        return pieces

    def merge(pieces: list[Tensor]) -> Tensor:
        starts = range(0, len(pieces), num_blocks)
        return torch.stack([torch.cat(pieces[i : i + num_blocks], dim) for i in starts])

    return ShardedTensorFactory(key, parameter, build, merge, replica_id)
