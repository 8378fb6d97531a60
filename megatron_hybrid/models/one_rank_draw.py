"""Initial weights of a model on several ranks: those that one rank would draw."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.hybrid_stack import layer_watcher
from megatron_hybrid.models.parameter_names import canonical_name
from megatron_hybrid.models.sharding.gathering import own_piece


@torch.no_grad()
def draw_as_one_rank(model: HybridModel, config: HybridConfig) -> None:
    """Give a model the weights that the same model on one rank has. It is drawn on each rank, layer
    by layer: of the whole model a rank keeps embedding, output layer, and one layer at a time.

    Args:
        model: on any number of ranks.
        config: of the same model on one.
    """
    groups = copy.copy(model.pg_collection)
    for name, group in vars(groups).items():
        if isinstance(group, dist.ProcessGroup):
            setattr(groups, name, groups.cp)  # of this rank alone
    own: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        own.setdefault(model.canonical_name(name), []).append(parameter)

    def take(prefix: str, part: nn.Module) -> None:
        for name, whole in part.named_parameters():
            for parameter in own.get(canonical_name(prefix + name), []) if whole.numel() else []:
                parameter.copy_(own_piece(whole, parameter, model.pg_collection))
            whole.data = whole.new_empty(0)

    token = layer_watcher.set(take)
    try:
        whole = HybridModel(config, groups)
    finally:
        layer_watcher.reset(token)
    take("", whole)
