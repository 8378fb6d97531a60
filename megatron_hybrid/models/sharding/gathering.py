"""Whole tensors of a model and this rank's pieces of them, over all groups that split tensors."""

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_hybrid.models.parameter_names import separate_expert
from megatron_hybrid.models.sharding.collectives import gather_pieces
from megatron_hybrid.models.sharding.parallel_setup import ExpertGroups
from megatron_hybrid.models.sharding.tensor_sharding import cut_of, full_shape, shard, unshard


def mark_experts(parameter: Tensor, num_experts: int) -> None:
    """Mark `parameter` as part of a layer with `num_experts` experts on all ranks together, which
    are split over ranks of their own: those of this rank stacked, or one of them."""
    parameter.num_experts = num_experts


def num_experts_of(tensor: Tensor) -> int | None:
    """Return the number of experts of a tensor's layer on all ranks; None if it is no expert's."""
    return getattr(tensor, "num_experts", None)


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor that `tensor` (no separate expert) is a piece of."""
    num_experts, shape = num_experts_of(tensor), full_shape(tensor)
    return shape if num_experts is None else (num_experts, *shape[1:])


def own_piece(whole: Tensor, tensor: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """Cut the piece that lies in `tensor` out of `whole`."""
    if (num_experts := num_experts_of(tensor)) is None:
        return shard(whole, tensor, groups.tp.rank())
    experts = ExpertGroups.of(groups)
    own = experts.own(num_experts)
    return shard(whole[own.start : own.stop], tensor, experts.tp.rank())


def gather_whole(name: str, tensor: Tensor, groups: ProcessGroupCollection) -> dict[str, Tensor]:
    """Gather the whole tensor that `tensor` is a piece of, on every rank, by its name. Where the
    name is that of a separate expert of this rank, there is one for each expert-parallel rank. Call
    it on all ranks of a pipeline stage."""
    piece = tensor.detach().contiguous()
    if (num_experts := num_experts_of(tensor)) is None:
        return {name: unshard(_gather(piece, groups.tp, tensor), tensor)}
    experts = ExpertGroups.of(groups)
    whole = unshard(_gather(piece, experts.tp, tensor), tensor).contiguous()
    parts = [whole] if experts.ep is None else gather_pieces(whole, experts.ep)
    if (expert := separate_expert(name)) is None:
        return {name: torch.cat(parts)}
    stacked, number = expert
    return {
        f"{stacked}{number + part * num_experts // len(parts)}": whole
        for part, whole in enumerate(parts)
    }


def _gather(piece: Tensor, group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    return [piece] if cut_of(tensor) is None else gather_pieces(piece, group)
