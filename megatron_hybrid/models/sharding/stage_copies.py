"""Parameters of which several pipeline stages hold a copy each: blocks that `Z` layers share, and a
word embedding that is the output layer too.

The copies start equal, are saved once, under the name that they have on one stage, and stay equal
where their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_pattern import split_stages

EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"


def shared_block_owners(config: HybridConfig) -> list[dict[int, int]]:
    """For each shared block {stage: layer that owns its parameters there}, of all stages that use
    it, in order: the first of the stage's layers that do. Layers count from 0, through the whole
    model."""
    owners: list[dict[int, int]] = [{} for _ in range(config.num_shared_blocks)]
    layer = uses = 0
    for stage, symbols in enumerate(
        split_stages(config.layer_pattern, config.pipeline_model_parallel_size)
    ):
        for symbol in symbols:
            if symbol == "Z":
                owners[uses % len(owners)].setdefault(stage, layer)
                uses += 1
            layer += 1
    return owners


class StageCopies:
    """This stage's copies of such parameters. Made on every stage at once.

    Args:
        model: a HybridModel whose layers are built.
    """

    def __init__(self, model: Any):
        config, pp = model.config, model.pg_collection.pp
        self._owners: dict[str, str] = {}  # names of copies start with the key, of their owner with
        self._numbers: dict[str, int] = {}
        self._shared: list[tuple[dist.ProcessGroup, list[nn.Parameter]]] = []
        if pp.size() == 1:
            return
        start_equal = config.perform_initialization
        ends = model.pre_process or model.post_process
        if config.share_embeddings_and_output_weights and ends:
            weight = model.shared_embedding_or_output_weight()
            if not model.pre_process:
                self._add(OUTPUT_LAYER, EMBEDDING, 1)
            self._share(model.pg_collection.embd, [weight], int(not model.pre_process), start_equal)
        for owners in shared_block_owners(config):
            stages = list(owners)
            if len(stages) < 2 or pp.rank() not in owners:
                continue
            own, number = owners[pp.rank()], stages.index(pp.rank())
            if number:
                name = "decoder.layers.{}.mixer.block."
                self._add(name.format(own), name.format(owners[stages[0]]), number)
            block = model.decoder.layers[own - model.layer_offset].mixer.block
            group = _group(pp, stages)
            self._share(group, list(block.parameters()), number, start_equal)
            self._shared.append((group, list(block.parameters())))

    def name(self, name: str) -> str:
        """The canonical name of a parameter of this stage, or of the one that it is a copy of."""
        for own, owner in self._owners.items():
            if name.startswith(own):
                return owner + name.removeprefix(own)
        return name

    def number(self, name: str) -> int:
        """Which of the copies of a parameter has this stage's canonical name of it, from 0."""
        return next((n for own, n in self._numbers.items() if name.startswith(own)), 0)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """See `HybridModel.sum_shared_gradients`."""
        for group, parameters in self._shared:
            learning = [one for one in parameters if one.requires_grad]
            gradients = [_gradient(parameter) for parameter in learning]
            if not gradients:
                continue
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=group)
            sums = flat.split([gradient.numel() for gradient in gradients])
            for gradient, total in zip(gradients, sums):
                gradient.copy_(total.view_as(gradient))

    def _add(self, own: str, owner: str, number: int) -> None:
        self._owners[own] = owner
        self._numbers[own] = number

    @staticmethod
    def _share(
        group: dist.ProcessGroup, parameters: Sequence[nn.Parameter], number: int, equal: bool
    ) -> None:
        """Mark the copies for core, and give all of them the values of the first one."""
        for parameter in parameters:
            # Core's distributed optimizer keeps it in a bucket of its own, so that each rank has
            # the same part of it on all stages, and counts one copy in norms of gradients.
            parameter.shared_embedding = True
            if number:
                parameter.shared = True
            if equal and not parameter.is_meta:
                values = parameter.data.to(_device_of(group))
                dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
                parameter.data.copy_(values)


def _group(pp: dist.ProcessGroup, stages: list[int]) -> dist.ProcessGroup:
    """The group of some ranks of a pipeline; only these call it."""
    if len(stages) == pp.size():
        return pp
    ranks = [dist.get_global_rank(pp, stage) for stage in stages]
    return dist.new_group(ranks, use_local_synchronization=True)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Where a parameter's gradient is summed up: in core's buffer, where there is one."""
    if hasattr(parameter, "main_grad"):
        return parameter.main_grad
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
