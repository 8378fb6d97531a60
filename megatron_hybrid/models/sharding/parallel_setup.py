"""Process groups of a model: the caller's, those of the launcher's job, or of this one process."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_hybrid.distributed.ranks import RankError, is_one_machine
from megatron_hybrid.distributed.rendezvous import (
    announce,
    ends_with,
    exchange,
    first_difference,
    join,
)
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.config.unsupported import CONTEXT_PARALLEL
from megatron_hybrid.models.sharding.one_rank_group import (
    ONE_RANK_BACKEND,
    OneRankGroup,
    register_one_rank_backend,
)

PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Fields of HybridConfig that lay a model out over ranks."""


def process_groups(
    config: HybridConfig, given: ProcessGroupCollection | None = None
) -> ProcessGroupCollection:
    """Return the groups to build a model with.

    Without `given`, they are megatron-core's own if the caller set them up. Else those of a job of
    several ranks are set up from the launcher's environment; in one process, the model gets groups
    that neither torch nor megatron-core knows, and both stay as they are.
    """
    if given is not None:
        return given
    initialize_distributed()
    announce()
    if not parallel_state.model_parallel_is_initialized():
        if not dist.is_initialized() or dist.get_world_size() == 1:
            _check_ranks(config, 1)
            names = {field.name for field in fields(ProcessGroupCollection)} - {"hcp", "hybrid_cp"}
            return ProcessGroupCollection(**{name: OneRankGroup() for name in names})
        _initialize_model_parallel(config)
    return ProcessGroupCollection.use_mpu_process_groups()


def core_process_groups(config: HybridConfig) -> ProcessGroupCollection:
    """Return megatron-core's own groups, set up if they are not; torch.distributed has to be."""
    if not parallel_state.model_parallel_is_initialized():
        _initialize_model_parallel(config)
    return ProcessGroupCollection.use_mpu_process_groups()


def ranks_needed(config: HybridConfig) -> int:
    """Count the ranks that hold one model. megatron-core carves the ranks of the experts out of
    those of each pipeline stage."""
    tp, expert_tp = config.tensor_model_parallel_size, config.expert_tensor_parallel_size
    of_experts = config.expert_model_parallel_size * expert_tp
    return config.pipeline_model_parallel_size * math.lcm(tp, of_experts)


def check_process_groups(config: HybridConfig, groups: ProcessGroupCollection) -> None:
    """Check that a model can be split over these groups; missing or None ones are not used.

    Raises:
        ValueError: a size differs from the config, or a group splits what HybridModel cannot split.
    """
    experts = ExpertGroups.of(groups)
    for field, size in (
        ("tensor_model_parallel_size", groups.tp.size()),
        ("pipeline_model_parallel_size", groups.pp.size()),
        ("expert_model_parallel_size", experts.num_parts),
        ("expert_tensor_parallel_size", experts.tp.size()),
    ):
        if size != getattr(config, field):
            raise ValueError(
                f"{field} is {getattr(config, field)}, but the process group that is set up has "
                f"{size} ranks. Make them agree, or call "
                "megatron.core.parallel_state.destroy_model_parallel() first."
            )
    for name, field in {
        "cp": "context_parallel_size",
        "gtp_remat": "gtp_weight_remat_size",
        "expt_gtp_remat": "expert_gtp_weight_remat_size",
    }.items():
        group = getattr(groups, name, None)
        if group is not None and group.size() != 1:
            remedy = (
                CONTEXT_PARALLEL
                if name == "cp"
                else "shard by tensor_model_parallel_size, pipeline_model_parallel_size and "
                "expert_model_parallel_size"
            )
            raise ValueError(
                f"the process group {name} has {group.size()} ranks, but HybridModel supports "
                f"{field}=1 alone: set up the groups with that, and {remedy}."
            )


@dataclass(frozen=True)
class ExpertGroups:
    """The ranks among which the experts of a layer are split."""

    ep: dist.ProcessGroup | None
    """Ranks with other experts each; None means one rank."""
    tp: dist.ProcessGroup
    """Ranks with pieces of the same experts."""
    tp_ep: dist.ProcessGroup
    """Ranks with all experts among them: both groups together."""
    replica: int
    """Which of the ranks with the same pieces of the same experts this one is, from 0."""

    @classmethod
    def of(cls, groups: ProcessGroupCollection) -> ExpertGroups:
        """Find the groups of a collection. One without groups of experts splits them as all."""
        tp = getattr(groups, "expt_tp", None) or groups.tp
        replicas = getattr(groups, "expt_dp", None) or getattr(groups, "dp", None)
        return cls(
            getattr(groups, "ep", None),
            tp,
            getattr(groups, "tp_ep", None) or tp,
            0 if replicas is None else replicas.rank(),
        )

    @property
    def num_parts(self) -> int:
        """Parts of the experts."""
        return 1 if self.ep is None else self.ep.size()

    @property
    def part(self) -> int:
        """This rank's part."""
        return 0 if self.ep is None else self.ep.rank()

    def own(self, num_experts: int) -> range:
        """Return the numbers of the experts of this rank, of `num_experts` of a layer."""
        size = num_experts // self.num_parts
        return range(self.part * size, (self.part + 1) * size)


def initialize_distributed() -> None:
    """Initialise torch.distributed from the launcher's environment, if that names several ranks and
    the caller has not. One process needs none."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    if is_one_machine():
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    store, rank, size = job_store()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with ends_with(join(store, rank, size), "connecting the ranks of the job"):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    announce()
    atexit.register(destroy_distributed)


@contextmanager
def torch_distributed() -> Iterator[None]:
    """Give code that cannot do without one a default process group. In one process, all groups that
    are made in the context end with it; a caller's, and those of a job, stay."""
    initialize_distributed()
    is_own, had_groups = not dist.is_initialized(), parallel_state.model_parallel_is_initialized()
    hook = sys.excepthook  # which torch replaces
    if is_own:
        register_one_rank_backend()
        dist.init_process_group(ONE_RANK_BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized() and dist.get_world_size() == 1:
            if not had_groups:
                parallel_state.destroy_model_parallel()
            if is_own:
                dist.destroy_process_group()
                sys.excepthook = hook


def job_store() -> tuple[dist.Store, int, int]:
    """Return the store of the ranks that the environment names, this rank, and how many there are.
    Unlike torch's, rank 0 does not wait for the others before it returns. Raises RankError if rank
    0 is not there in the five minutes that torch waits for it."""
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    given = [os.environ.get(name) for name in names]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or None in given:
        return next(dist.rendezvous("env://"))  # the launcher's, or torch's error
    address, (port, rank, size) = given[0], map(int, given[1:])
    try:
        store = dist.TCPStore(address, port, size, is_master=rank == 0, wait_for_workers=False)
    except dist.DistError as error:
        what = "cannot listen" if rank == 0 else "found no rank 0"
        raise RankError(f"rank {rank} {what} at {address}:{port}: {error}") from error
    return store, rank, size


def destroy_distributed() -> None:
    """Join the threads of torch.distributed, if it was set up. One of gloo that frees a tensor
    while the interpreter ends would abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _layout(config: HybridConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in PARALLEL_SIZES}


def _check_ranks(config: HybridConfig, world_size: int) -> None:
    needed = ranks_needed(config)
    if world_size % needed:
        said = ", ".join(f"{name}={size}" for name, size in _layout(config).items())
        raise ValueError(
            f"the layout {said} needs a multiple of {needed} processes, but there are "
            f"{world_size}. Start with `torchrun --nproc-per-node {needed}`."
        )


def _initialize_model_parallel(config: HybridConfig) -> None:
    sizes = _layout(config)
    # Groups of other sizes on another rank would wait for each other in core.
    met = exchange("setting up the process groups of a model", sizes, range(dist.get_world_size()))
    if (difference := first_difference(met)) is not None:
        raise ValueError(difference)
    _check_ranks(config, dist.get_world_size())
    members = [member for member, _ in met]
    with ends_with(members, "making the process groups"), _all_groups_without_sockets():
        parallel_state.initialize_model_parallel(**sizes)


@contextmanager
def _all_groups_without_sockets() -> Iterator[None]:
    """Let core's groups of gloo need no sockets where its other groups need none."""
    before = dist.new_group
    if dist.get_backend() == ONE_RANK_BACKEND:
        dist.new_group = lambda *args, **named: before(*args, **named | {"backend": None})
    try:
        yield
    finally:
        dist.new_group = before
