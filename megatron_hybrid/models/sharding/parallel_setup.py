"""Process groups of a model: the caller's, or new ones, which need no launcher."""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.config.unsupported import CONTEXT_PARALLEL


def process_groups(
    config: HybridConfig, given: ProcessGroupCollection | None = None
) -> ProcessGroupCollection:
    """The groups to build a model with.

    Without `given`, megatron-core's own; if these do not exist, they are made here: from the
    launcher's environment under torchrun, else for this one process.
    """
    if given is None:
        _initialize_distributed()
        if not parallel_state.model_parallel_is_initialized():
            _initialize_model_parallel(config)
        given = ProcessGroupCollection.use_mpu_process_groups()
    return given


def check_process_groups(config: HybridConfig, groups: ProcessGroupCollection) -> None:
    """Check that a model can be split over these groups; missing or None ones are not used.

    Raises:
        ValueError: a size differs from the config, or a group splits what HybridModel cannot split.
    """
    for field, group in (
        ("tensor_model_parallel_size", groups.tp),
        ("pipeline_model_parallel_size", groups.pp),
    ):
        if group.size() != getattr(config, field):
            raise ValueError(
                f"{field} is {getattr(config, field)}, but the process group that is set up has "
                f"{group.size()} ranks. Make them agree, or call "
                "megatron.core.parallel_state.destroy_model_parallel() first."
            )
    for name, (field, accepted) in {
        "cp": ("context_parallel_size", 1),
        "ep": ("expert_model_parallel_size", 1),
        "expt_tp": ("expert_tensor_parallel_size", config.tensor_model_parallel_size),
        "gtp_remat": ("gtp_weight_remat_size", 1),
        "expt_gtp_remat": ("expert_gtp_weight_remat_size", 1),
    }.items():
        group = getattr(groups, name, None)
        if group is not None and group.size() != accepted:
            remedy = (
                CONTEXT_PARALLEL
                if name == "cp"
                else "shard by tensor_model_parallel_size and pipeline_model_parallel_size"
            )
            raise ValueError(
                f"the process group {name} has {group.size()} ranks, but HybridModel supports "
                f"{field}={accepted} alone: set up the groups with that, and {remedy}."
            )


def _initialize_distributed() -> None:
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_destroy_distributed)


def _destroy_distributed() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _initialize_model_parallel(config: HybridConfig) -> None:
    needed = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
    if dist.get_world_size() % needed:
        raise ValueError(
            f"tensor_model_parallel_size={config.tensor_model_parallel_size} times "
            f"pipeline_model_parallel_size={config.pipeline_model_parallel_size} needs a multiple "
            f"of {needed} processes, but there are {dist.get_world_size()}. "
            f"Start with `torchrun --nproc-per-node {needed}`."
        )
    parallel_state.initialize_model_parallel(
        config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    )
