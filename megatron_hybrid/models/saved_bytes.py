"""What the backward pass of a model needs: counted on tensors without values, by its own code."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.mixers import rotary
from megatron_hybrid.models.sharding.one_rank_group import PlannedGroup
from megatron_hybrid.models.sharding.parallel_setup import ranks_needed, torch_distributed
from megatron_hybrid.ops.dispatch import Planning, planning
from megatron_hybrid.ops.ragged import RaggedLayout


@dataclass
class SavedBytes:
    """Bytes that autograd keeps from a forward pass to its backward pass, parameters left out."""

    total: int = 0
    layers: list[int] = field(default_factory=list)
    """Bytes that each layer of the stage is the first to keep. For layers that are recomputed
    together these are 0, as their input is in `total` alone."""
    served: list[set[tuple[str, str]]] = field(default_factory=list)
    """Ops of each layer, and the backends that serve them."""


def planned_model(config: HybridConfig, num_ranks: int, stage: int) -> HybridModel:
    """Build one rank's part of a model that takes no memory, for a job that does not exist. What is
    added to it is made under the `fake_mode` of its parameters.

    Args:
        config: with the sizes of the layout.
        num_ranks: of the job.
        stage: number of the pipeline stage, from 0.

    Raises:
        ValueError: the number of ranks does not fit the layout.
    """
    if num_ranks % (needed := ranks_needed(config)):
        raise ValueError(f"the model's layout needs a multiple of {needed} ranks, not {num_ranks}")
    tp, stages = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    expert_tp, parts = config.expert_tensor_parallel_size, config.expert_model_parallel_size
    ranks = num_ranks // stages
    sizes = {"tp": tp, "dp": ranks // tp, "ep": parts, "expt_tp": expert_tp}
    sizes |= {"tp_ep": parts * expert_tp, "expt_dp": ranks // (parts * expert_tp)}
    names = {one.name for one in fields(ProcessGroupCollection)} - {"hcp", "hybrid_cp"}
    groups = {name: PlannedGroup(0, sizes.get(name, 1)) for name in names}
    groups["pp"] = PlannedGroup(stage, stages)
    config = copy.copy(config)
    config.perform_initialization, config.use_cpu_initialization = False, True
    # On a fake device: on a real one torch would ask for its driver.
    with torch_distributed(), FakeTensorMode(allow_non_fake_inputs=True):
        collection = ProcessGroupCollection(**groups)
        return HybridModel(config, collection, stage == 0, stage == stages - 1).train()


def count_saved_bytes(model: HybridModel, rows: int, length: int, device_type: str) -> SavedBytes:
    """Count what one forward pass with labels keeps.

    Args:
        model: of `planned_model`.
        rows, length: of the batch.
        device_type: of the device that it would run on, whose backends serve.
    """
    found, storages = SavedBytes(), {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (key := StorageWeakRef(storage)) not in own and key not in storages:
            storages[key] = storage  # kept, so that no other one takes its place
            found.total += storage.nbytes()
        return tensor

    with torch_distributed(), _planned(model, device_type) as plan:
        own = {StorageWeakRef(one.untyped_storage()) for one in model.parameters()}
        twins: dict[Any, tuple[int, set]] = {}
        for symbol, layer in zip(model.decoder.layer_type_list, model.decoder.layers):
            # A layer whose keys another one reads has to run.
            kind = layer if model._shared_kv_layers else (symbol, id(layer.config))
            layer.forward = _noted(layer, kind, twins, found, plan)
        ids = torch.zeros(rows, length, dtype=torch.long)
        if not model.pre_process:
            tensor = model.stage_input(rows * length)
            model.set_input_tensor(tensor.view(-1, rows, tensor.shape[-1]).requires_grad_())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(ids, labels=ids)
    return found


def _noted(layer: nn.Module, kind: Any, twins: dict, found: SavedBytes, plan: Planning) -> Any:
    """Return the forward pass of a layer, noting what it keeps. Where another layer of its kind ran
    before, it keeps as much."""
    run = layer.forward

    def forward(hidden_Th: Tensor, *inputs: Any) -> Tensor:
        if kind in twins:
            found.total += twins[kind][0]
            hidden_Th = hidden_Th.clone()
        else:
            before, served = found.total, plan.served
            plan.served = set()
            hidden_Th = run(hidden_Th, *inputs)
            twins[kind] = found.total - before, plan.served
            plan.served = served
        found.layers.append(twins[kind][0])
        found.served.append(twins[kind][1])
        return hidden_Th

    return forward


@contextmanager
def _planned(model: HybridModel, device_type: str) -> Iterator[Planning]:
    """Return a context in which ops serve a model of `planned_model` as on another device."""
    plan = Planning(device_type)
    token = planning.set(plan)
    # The loss over a split vocabulary asks for its group by name.
    own_group = mock.patch.object(
        parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", model.pg_collection.tp
    )
    try:
        with own_group, next(model.parameters()).fake_mode:
            yield plan
    finally:
        planning.reset(token)
        for known_to_all in (RaggedLayout.uniform, rotary.tables):
            known_to_all.cache_clear()
