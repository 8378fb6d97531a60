"""Parameters of which several pipeline stages hold a copy each: blocks that layers share, and a
word embedding that is the output layer too.

The copies start equal, are saved once, under the name that they have on one stage, and stay equal
where their gradients are summed.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_pattern import SHARED_BLOCKS

EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"


def shared_block_owners(config: HybridConfig) -> list[dict[int, int]]:
    """Map, for each shared block, the stages that use it to the layer that owns its parameters
    there: the first of the stage's layers that do. Layers count from 0, through the whole model."""
    owners: list[dict[int, int]] = [{} for _ in range(config.num_shared_blocks)]
    layer = uses = 0
    for stage, symbols in enumerate(config.pattern.stages(config.pipeline_model_parallel_size)):
        for symbol in symbols:
            if symbol in SHARED_BLOCKS:
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
        config, self._pp = model.config, model.pg_collection.pp
        self._owners: dict[str, str] = {}  # names of copies start with the key, of their owner with
        self._numbers: dict[str, int] = {}
        self._blocks: list[tuple[list[nn.Parameter], int]] = []
        """This stage's parameters of each block that several stages have, if it is one of them, and
        the number of their elements."""
        if self._pp.size() == 1:
            return
        if config.share_embeddings_and_output_weights and (model.pre_process or model.post_process):
            weight = model.shared_embedding_or_output_weight()
            number = 0 if model.pre_process else 1
            self._mark([weight], number, OUTPUT_LAYER, EMBEDDING)
            if config.perform_initialization and not weight.is_meta:
                _send_first(weight.data, model.pg_collection.embd, 0)
        for owners in shared_block_owners(config):
            if len(owners) > 1:
                self._add_block(model, owners)

    def name(self, name: str) -> str:
        """Return the canonical name of a parameter of this stage, or of the one that it copies."""
        for own, owner in self._owners.items():
            if name.startswith(own):
                return owner + name.removeprefix(own)
        return name

    def number(self, name: str) -> int:
        """Return which copy of a parameter this stage's canonical name of it stands for, from 0."""
        return next((n for own, n in self._numbers.items() if name.startswith(own)), 0)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """See `HybridModel.sum_shared_gradients`."""
        for parameters, numel in self._blocks:
            gradients = [_gradient(one) for one in parameters]
            # In fp32 on all stages, also those without the block, which only pass the sums on.
            total = _flat(gradients, numel, self._pp)
            dist.all_reduce(total, group=self._pp)
            _unflatten(total, gradients)

    def _add_block(self, model: Any, owners: dict[int, int]) -> None:
        """Mark the copies of a block, and give all of them the values of the first one."""
        stages, parameters = list(owners), []
        if self._pp.rank() in owners:
            own = owners[self._pp.rank()]
            block = model.decoder.layers[own - model.layer_offset].mixer.block
            parameters = list(block.parameters())
            name = "decoder.layers.{}.mixer.block."
            names = (name.format(own), name.format(owners[stages[0]]))
            self._mark(parameters, stages.index(self._pp.rank()), *names)
        numels: list[int] = [0] * self._pp.size()
        dist.all_gather_object(numels, sum(one.numel() for one in parameters), group=self._pp)
        self._blocks.append((parameters, max(numels)))
        if model.config.perform_initialization and not next(model.parameters()).is_meta:
            values = [one.data for one in parameters]
            first = _flat(values, max(numels), self._pp)
            _send_first(first, self._pp, stages[0])
            _unflatten(first, values)

    def _mark(self, parameters: Sequence[nn.Parameter], number: int, own: str, owner: str) -> None:
        for parameter in parameters:
            # Core's distributed optimizer keeps it in a bucket of its own, so that each rank has
            # the same part of it on all stages, and counts one copy in norms of gradients.
            parameter.shared_embedding = True
            if number:
                parameter.shared = True
        if number:
            self._owners[own] = owner
            self._numbers[own] = number


def _send_first(values: Tensor, group: dist.ProcessGroup, first: int) -> None:
    """Put the values of the group's rank `first` in place of those of the others."""
    on_device = values.to(_device_of(group))
    dist.broadcast(on_device, dist.get_global_rank(group, first), group=group)
    values.copy_(on_device)


def _flat(tensors: Sequence[Tensor], numel: int, group: dist.ProcessGroup) -> Tensor:
    """Join the elements of tensors, one after the other, in fp32; zeros without any tensor."""
    if not tensors:
        return torch.zeros(numel, device=_device_of(group))
    return torch.cat([tensor.float().flatten() for tensor in tensors])


def _unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Invert `_flat`, in place."""
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, values in zip(tensors, flat.split(sizes) if sizes else ()):
        tensor.copy_(values.view_as(tensor))


def _device_of(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Find where a parameter's gradient is summed up, in core's buffer or in `grad`; zeros to be
    thrown away, if it does not learn."""
    if hasattr(parameter, "main_grad"):
        return parameter.main_grad
    if not parameter.requires_grad:
        return torch.zeros_like(parameter)
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
