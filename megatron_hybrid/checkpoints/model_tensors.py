"""The tensors of a model by canonical name: this rank's, those of all stages, and whole ones."""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hybrid.checkpoints.tensor_files import check_numbers
from megatron_hybrid.distributed.rendezvous import exchange
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.low_rank import adapters_of
from megatron_hybrid.models.packed_weight import PackedWeight, require_unpacked
from megatron_hybrid.models.parameter_names import is_parameter, stack_experts
from megatron_hybrid.models.sharding.gathering import gather_whole
from megatron_hybrid.models.sharding.tensor_sharding import copy_marks


def own_tensors(model: HybridModel) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer by canonical name."""
    tensors = model.state_dict(keep_vars=True)
    return {
        model.canonical_name(name): tensor for name, tensor in tensors.items() if is_parameter(name)
    }


def own_weights(model: HybridModel) -> dict[str, Tensor | PackedWeight]:
    """List `own_tensors`, where a packed weight counts as one."""
    packed = {
        model.canonical_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, PackedWeight)
    }
    others = own_tensors(model).items()
    return packed | {n: tensor for n, tensor in others if n.rpartition(".")[0] not in packed}


def names_of_all_stages(model: HybridModel) -> Collection[str]:
    """Name `own_weights` of all pipeline stages. Call it on every rank of the model."""
    return of_all_stages(model, dict.fromkeys(own_weights(model))).keys()


def of_all_stages(model: HybridModel, own: dict[str, Any]) -> dict[str, Any]:
    """Gather what all pipeline stages say by name, in order. Call it on every rank of the model."""
    pp = model.pg_collection.pp
    if pp.size() == 1:
        return own
    stages = exchange("naming its tensors", own, dist.get_process_group_ranks(pp))
    return {name: value for _, of_stage in stages for name, value in of_stage.items()}


def writes(model: HybridModel) -> bool:
    """Return whether this rank, of those with the model's first part, writes it."""
    data_parallel = getattr(model.pg_collection, "dp", None)
    return data_parallel is None or data_parallel.rank() == 0


@torch.no_grad()
def merged_weight(name: str, projection: nn.Module) -> Tensor:
    """Return this rank's weight of an adapted projection with its adapter. Raises CheckpointError
    where a sum is infinite in its dtype. name: of the projection."""
    weight = projection.weight
    merged = weight.float() + projection.lora.product()
    check_numbers(f"{name}.weight with its adapter", merged, "the model", weight.dtype)
    merged = merged.to(weight.dtype)
    copy_marks(weight, merged)
    return merged


def full_state_dict(model: HybridModel, unpacked: bool = False) -> dict[str, Tensor] | None:
    """Gather the unsharded tensors by canonical names, on the CPU of the first tensor- and
    pipeline-parallel rank; None on the others. Call it on every rank.

    unpacked: dequantize packed weights; else their parts are tensors of their own.

    Adapters are added to their weights. Tensors that the model keeps in fp32 but that were loaded
    in its lower-precision dtype are converted back to this dtype, unless that would round a changed
    value."""
    tp, pp = model.pg_collection.tp, model.pg_collection.pp
    state: dict[str, Tensor] = {}
    tensors = own_weights(model) if unpacked else own_tensors(model)
    if adapted := adapters_of(model):
        require_unpacked(model, "adapters cannot be merged")
        tensors = {name: each for name, each in tensors.items() if ".lora." not in name}
    for own_name, tensor in tensors.items():
        projection = own_name.removesuffix(".weight")
        if projection in adapted:
            tensor = merged_weight(projection, adapted[projection])
        if isinstance(tensor, PackedWeight):
            tensor = tensor.as_parameter()
        parts = gather_whole(own_name, tensor, model.pg_collection)
        for name, part in parts.items() if tp.rank() == 0 else ():
            whole = part.cpu().contiguous()
            dtype = model.config.params_dtype
            if whole.dtype != dtype == getattr(tensor, "loaded_dtype", None):
                narrow = whole.to(dtype)
                whole = narrow if torch.equal(narrow.to(whole.dtype), whole) else whole
            state[name] = whole
    if tp.rank() != 0:
        return None
    state = stack_experts(state)
    if pp.size() == 1:
        return state
    stages = [None] * pp.size() if pp.rank() == 0 else None
    # As bytes: torch does not read pickled floats of 8 bits.
    kinds = {name: torch.uint8 if t.element_size() == 1 else t.dtype for name, t in state.items()}
    sent = {name: (t.dtype, t.view(kinds[name])) for name, t in state.items()}
    dist.gather_object(sent, stages, dst=dist.get_global_rank(pp, 0), group=pp)
    if pp.rank() != 0:
        return None
    return {name: t.view(dtype) for stage in stages for name, (dtype, t) in stage.items()}
