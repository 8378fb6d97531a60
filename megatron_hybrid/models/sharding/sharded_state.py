"""The sharded state dict of a model for megatron-core's distributed checkpoints.

Keys are those of core's own hybrid models, so that `torch_dist` checkpoints load in both
directions: concatenated blocks are separate (`in_proj.weight.z`), and each layer's norm has the
name of the transformer_engine spec, as in core's local specs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_object_for_checkpoint,
)
from torch import Tensor

from megatron_hybrid.models.packed_weight import PackedWeight
from megatron_hybrid.models.parameter_names import canonical_name, is_parameter, separate_expert
from megatron_hybrid.models.sharding.gathering import num_experts_of
from megatron_hybrid.models.sharding.parallel_setup import ExpertGroups
from megatron_hybrid.models.sharding.tensor_sharding import Cut, cut_of


def sharded_state_dict(model: Any, prefix: str, metadata: dict | None) -> ShardedStateDict:
    """Return a pipeline stage's sharded tensors (and extra states), by its state-dict names.

    Args:
        model: a HybridModel; its parameters carry their sharding (`tensor_sharding`).
        prefix: of names and keys.
        metadata: core's; `dp_cp_group` and `singleton_local_shards` are used.
    """
    metadata = dict(metadata or {})
    if (own := getattr(model.pg_collection, "dp_cp", None)) is not None:
        metadata.setdefault("dp_cp_group", own)
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    tp, data_parallel = model.pg_collection.tp, metadata["dp_cp_group"]
    singletons = metadata.get("singleton_local_shards", False)
    state: ShardedStateDict = {}
    values = model.state_dict(keep_vars=True)
    for name, key in distributed_keys(model).items():
        value, key = values[name], prefix + key
        # Of copies, core writes the first in all three ways.
        stage_copy = model.stage_copies.number(canonical_name(name, model.layer_offset))
        replica_id = (stage_copy, tp.rank(), data_parallel.rank())
        if EXPERTS in key:
            state[prefix + name] = _stacked_experts(key, value, model.pg_collection, singletons)
        elif is_parameter(name):
            state[prefix + name] = _sharded_tensor(key, value, tp, replica_id, singletons)
        else:
            state[prefix + name] = make_sharded_object_for_checkpoint(
                value, key, replica_id=replica_id
            )
    return state


EXPERTS = ".mlp.experts.experts."
"""What core puts into the keys of experts, whose names have one `experts` less."""


def distributed_keys(model: Any) -> dict[str, str]:
    """Map state-dict names of this pipeline stage to keys in core's distributed checkpoints.

    Raises:
        ValueError: the model has a parameter for each expert.
    """
    fused_norms, keys = _fused_norms(model), {}
    packed = {name for name, each in model.named_modules() if isinstance(each, PackedWeight)}
    for name in model.state_dict(keep_vars=True):
        if name.rpartition(".")[0] in packed:
            name = name.rpartition(".")[0]
        key = model.canonical_name(name)
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
    """Map each layer's norm to the projection after it, both as full canonical names."""
    layers = {
        f"decoder.layers.{i}.": layer
        for i, layer in enumerate(model.decoder.layers, model.layer_offset)
    }
    for part, predicting in enumerate(model.mtp.layers if hasattr(model, "mtp") else ()):
        path = f"mtp.layers.{part}.mtp_model_layer.layers."
        layers |= {
            f"{path}{i}.": layer for i, layer in enumerate(predicting.mtp_model_layer.layers)
        }
    modules = {}
    for path, layer in layers.items():
        mixer = getattr(layer, layer.mixer_name)
        if mixer.input_projection is not None:
            modules[path + layer.norm_name] = f"{path}{layer.mixer_name}.{mixer.input_projection}"
    return modules


def _sharded_tensor(
    key: str,
    parameter: Tensor,
    tp: dist.ProcessGroup,
    replica_id: tuple[int, int, int],
    singletons: bool,
) -> ShardedTensor | ShardedTensorFactory:
    """Return the pieces of a parameter on this rank, at the places of core's own models."""
    cut = cut_of(parameter)
    if cut is None:
        return ShardedTensor.from_rank_offsets(key, parameter, replica_id=replica_id)
    replica_id = (replica_id[0], 0, replica_id[2])

    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None) -> list:
        return _pieces(key, tensor, cut, tp.rank(), replica_id, singletons)

    if len(pieces := build(key, parameter, replica_id, None)) == 1:
        return replace(pieces[0], data=parameter)  # by which core finds an optimizer's states
    merge = partial(torch.cat, dim=cut.dim)
    return ShardedTensorFactory(key, parameter, build, merge, replica_id)


def _stacked_experts(
    key: str, parameter: Tensor, groups: ProcessGroupCollection, singletons: bool
) -> ShardedTensorFactory:
    """Return the pieces of this rank's stacked experts: a tensor per expert, or one tensor with a
    leading dimension of all experts."""
    ranks = ExpertGroups.of(groups)
    tp, num_experts = ranks.tp, num_experts_of(parameter)
    cut = cut_of(parameter)
    if cut is None:
        cut = Cut(0, parameter.shape[1:2], tp.size(), copies=(tp.size(),))
    else:
        cut = replace(cut, dim=cut.dim - 1)

    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None) -> list:
        pieces = []
        for number, expert in zip(ranks.own(num_experts), tensor.unbind(0), strict=True):
            name, lead = key, ((0, number, num_experts),)
            if singletons:
                name, lead = key.replace(EXPERTS, f"{EXPERTS}{number}."), ()
            pieces += _pieces(name, expert, cut, tp.rank(), replica_id, singletons, lead)
        return pieces

    def merge(pieces: list[Tensor]) -> Tensor:
        per_expert = len(pieces) // len(parameter)
        starts = range(0, len(pieces), per_expert)
        return torch.stack([torch.cat(pieces[i : i + per_expert], cut.dim) for i in starts])

    return ShardedTensorFactory(key, parameter, build, merge, (0, 0, ranks.replica))


def _pieces(
    key: str,
    tensor: Tensor,
    cut: Cut,
    rank: int,
    replica_id: tuple[int, int, int],
    singletons: bool,
    lead: tuple[tuple[int, int, int], ...] = (),
) -> list[ShardedTensor]:
    """Return the pieces of one tensor.

    Args:
        lead: the place in a leading dimension of the key's tensor, if it has one.
    """
    names = None if cut.names is None else [f".{name}" for name in cut.names]
    if names is None and singletons and len(cut.sections) == 2 and cut.copies is None:
        names = ["_w", "_v"]  # a gated MLP
    local_blocks = tensor.split(cut.local_sections, cut.dim)
    if names is not None:  # one tensor per block
        return [
            piece
            for name, block, own in zip(names, local_blocks, cut.blocks())
            for piece in _pieces(key + name, block, own, rank, replica_id, False, lead)
        ]
    # Pieces of equal size, as core's grids are regular.
    unit = gcd(*(at for other in range(cut.num_ranks) for pair in cut.ranges(other) for at in pair))
    return [
        ShardedTensor.from_rank_offsets(
            key,
            piece,
            *lead,
            (len(lead) + cut.dim, start // unit + i, cut.size // unit),
            replica_id=(replica_id[0], copy, replica_id[2]),
            prepend_axis_num=len(lead),
            # A vocabulary is padded by as much as the tensor-parallel size asks for.
            allow_shape_mismatch=cut.unpadded_size is not None,
        )
        for block, (start, _), copy in zip(local_blocks, cut.ranges(rank), cut.copy_numbers(rank))
        for i, piece in enumerate(block.split(unit, cut.dim))
    ]
