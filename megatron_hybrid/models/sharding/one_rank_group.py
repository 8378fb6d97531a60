"""A process group of one process, which needs no torch.distributed."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ONE_RANK_BACKEND = "one_rank"
"""The name under which torch makes such groups."""


class OneRankGroup(dist.ProcessGroup):
    """A group whose only rank is this process: it copies what the rank sends to itself.

    It opens no socket and starts no thread, as each group of gloo does. It works with any default
    group, and without one; it can be copied and pickled.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._name = ONE_RANK_BACKEND

    def __reduce__(self) -> tuple:
        return OneRankGroup, ()

    def getBackendName(self) -> str:
        """Name the backend, as torch asks for it."""
        return ONE_RANK_BACKEND

    @property
    def group_name(self) -> str:
        """The name under which torch knows the group, if it made it."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def shutdown(self) -> None:
        """Do nothing: there is nothing to end."""

    abort = shutdown

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return at once: nobody else comes."""
        return _done([])

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Leave the tensors as they are: those of one rank are their sum, and what it sends."""
        return _done(tensors)

    allreduce_coalesced = broadcast = reduce = allreduce

    def allgather(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        """Copy each tensor into the one output of its list."""
        return _copy([output for (output,) in outputs], inputs)

    gather = allgather

    def scatter(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        """Copy the one tensor of each list into its output."""
        return _copy(outputs, [one for (one,) in inputs])

    reduce_scatter = scatter

    def alltoall(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        """Copy each tensor into its output."""
        return _copy(outputs, inputs)

    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = alltoall
    all_gather_single_coalesced = reduce_scatter_single_coalesced = alltoall

    def alltoall_base(self, output: Tensor, given: Tensor, *sizes: Any) -> dist.Work:
        """Copy the tensor into the output."""
        return _copy([output], [given])

    all_to_all_single = _allgather_base = _reduce_scatter_base = alltoall_base
    all_gather_single = reduce_scatter_single = alltoall_base


class PlannedGroup(OneRankGroup):
    """The group of `rank` and others that are not there, for tensors without values: all calls
    return at once, and leave outputs as they are."""

    def __init__(self, rank: int, size: int) -> None:
        dist.ProcessGroup.__init__(self, rank, size)
        self._name = f"planned {rank} of {size}"

    def allreduce(self, *args: Any) -> dist.Work:
        """Return at once."""
        return _done([])

    allreduce_coalesced = broadcast = reduce = allgather = gather = allreduce
    scatter = reduce_scatter = alltoall = alltoall_base = allreduce
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = allreduce
    all_gather_single_coalesced = reduce_scatter_single_coalesced = allreduce
    all_to_all_single = _allgather_base = _reduce_scatter_base = allreduce
    all_gather_single = reduce_scatter_single = allreduce


def _copy(outputs: list[Tensor], inputs: list[Tensor]) -> dist.Work:
    with torch.no_grad():
        for output, given in zip(outputs, inputs, strict=True):
            output.copy_(given.view_as(output))
    return _done(outputs)


def _done(result: Sequence[Tensor]) -> dist.Work:
    devices = {tensor.device for tensor in result if tensor.is_cuda}
    future: torch.futures.Future = torch.futures.Future(devices=sorted(devices, key=str) or None)
    future.set_result(list(result))
    return torch._C._distributed_c10d._create_work_from_future(future)


@cache
def register_one_rank_backend() -> None:
    """Let `torch.distributed` make such groups, too: once in a process."""
    dist.Backend.register_backend(
        ONE_RANK_BACKEND, lambda *job: OneRankGroup(), devices=["cpu", "cuda"]
    )
