"""New weights from a trainer in another process: where a part of them is, and its tensors.

A part is plain data, so that a leading rank can tell it to the others; each rank reads it for
itself. Its names, shapes and dtypes are known before its tensors.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import pickle
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megatron_hybrid.checkpoints.checkpoint import CONFIG_FILE, is_packed
from megatron_hybrid.checkpoints.tensor_files import CheckpointError, TensorFiles
from megatron_hybrid.validation import is_int

JOIN_SECONDS = 300.0
"""For a trainer and its workers to meet, and for each broadcast."""
GROUP_NAME = "weights"


class TrainerError(RuntimeError):
    """The trainer has not come, or has left its group."""


class Part(Protocol):
    """Tensors of one call of `DynamicInferenceEngine.receive_weights`."""

    heads: Sequence[tuple[str, Tensor]]
    """Their names, and tensors without bytes of their shapes and dtypes."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All of them, in the same order."""

    def drop(self) -> None:
        """Nobody takes them: let a trainer that sends them go on."""


class WeightGroup:
    """The process group of a trainer, its rank 0, and of all ranks of all workers.

    Trainers that make theirs as the RL stacks do, by `init_process_group` with a `group_name`
    beside their own, meet it there.

    Args:
        address, port: where the trainer's store listens; the trainer's own process listens on
            this address alone.
        rank: of this process, from 0.
        world_size: processes, the trainer included.
        backend: "gloo" or "nccl"; None: what is made for the device.
        name: of the group, the same in all processes.
        device: of the tensors that NCCL sends.

    Raises:
        ValueError: the numbers make no group, or this process is in a group of the same name.
        TrainerError: the others have not come in `JOIN_SECONDS`.
    """

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        *,
        backend: str | None = None,
        name: str = GROUP_NAME,
        device: torch.device | str = "cpu",
    ):
        device = torch.device(device)
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend is {backend!r}; use 'gloo' or 'nccl'")
        if backend == "nccl" and device.type != "cuda":
            raise ValueError(f"backend is 'nccl', and the model is on {device}: use 'gloo'")
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank {rank} is outside of a group of {world_size} processes: world_size counts "
                "the trainer and every rank of every worker, and rank_offset those before a worker"
            )
        self.device = device if backend == "nccl" else torch.device("cpu")
        seconds = timedelta(seconds=JOIN_SECONDS)
        listening: dict[str, int] = {}
        if rank == 0:  # torch itself would listen on all addresses of the machine
            listening["master_listen_fd"] = socket.create_server((address, port)).detach()
        try:
            self._store = dist.TCPStore(
                address,
                port,
                world_size,
                is_master=rank == 0,
                timeout=seconds,
                **listening,
            )
            # Of torch, for a group that is no part of the job of either side.
            self.group, _ = distributed_c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                backend,
                dist.PrefixStore(name, self._store),
                name,
                timeout=seconds,
            )
        except RuntimeError as error:
            raise TrainerError(
                f"the group {name!r} at {address}:{port} has not met: {error}"
            ) from error
        distributed_c10d._world.pg_group_ranks[self.group] = {i: i for i in range(world_size)}

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The trainer's tensor, also written into those of the others, which have its shape and
        dtype.

        Raises:
            TrainerError: another process has left the group.
        """
        try:
            with torch.no_grad():
                dist.broadcast(tensor, 0, group=self.group)
        except RuntimeError as error:
            raise TrainerError(f"the trainer's group has failed: {error}") from error
        return tensor

    def close(self) -> None:
        """Leave the group. The others cannot use it any more."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.group = self._store = None


@dataclass(frozen=True)
class GroupInfo:
    """How to meet a trainer: what `init_weight_transfer_engine` is given.

    Args:
        master_address, master_port: of the trainer.
        rank_offset: processes of the group before the first rank of this worker: the trainer, and
            the ranks of other workers.
        world_size: processes, the trainer included.
        group_name, backend: as of `WeightGroup`.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = GROUP_NAME
    backend: str | None = None

    @classmethod
    def parse(cls, given: object) -> GroupInfo:
        """Raises ValueError for what is no such info."""
        fields = _fields(given, "init_info", cls.__dataclass_fields__, 4)
        for name in ("master_port", "rank_offset", "world_size"):
            if str(fields[name]).isdecimal():  # some stacks send a text
                fields[name] = int(fields[name])
            if not is_int(fields[name]) or fields[name] < 1:
                raise ValueError(
                    f"init_info.{name} is {fields[name]!r}; it is a whole number from 1 on"
                )
        for name in ("master_address", "group_name"):
            if not isinstance(fields.get(name, ""), str):
                raise ValueError(f"init_info.{name} is {fields[name]!r}; it is a text")
        return cls(**fields)

    def join(self, rank: int, device: torch.device) -> WeightGroup:
        """Meet the trainer. rank: of the model."""
        return WeightGroup(
            self.master_address,
            self.master_port,
            self.rank_offset + rank,
            self.world_size,
            backend=self.backend,
            name=self.group_name,
            device=device,
        )


def part_of(info: object, group: WeightGroup | None, device: torch.device) -> Part:
    """What an `update_info` stands for: {"path"}, a folder; {"names", "dtype_names", "shapes"},
    what the trainer sends to the group; the same with {"ipc_handles_pickled"}: memory of another
    process on this GPU.

    Raises:
        ValueError: it is none of these, or cannot be received here.
    """
    if isinstance(info, Mapping) and "path" in info:
        return FolderPart(**_fields(info, "update_info", ("path",), 1))
    listed = ("names", "dtype_names", "shapes")
    fields = _fields(info, "update_info", (*listed, "ipc_handles_pickled", "packed"), 3)
    if fields.pop("packed", False):
        raise ValueError(
            "update_info.packed is true: tensors are sent one by one here, leave packed out"
        )
    heads = _heads(*(fields[name] for name in listed))
    if "ipc_handles_pickled" in fields:
        return _SharedMemory(heads, fields["ipc_handles_pickled"], device)
    if group is None:
        raise ValueError(
            "no trainer's group was joined: call init_weight_transfer_engine first, or give a path"
        )
    return _Broadcasts(heads, group)


def _fields(given: object, what: str, known: Iterable[str], num_needed: int) -> dict[str, Any]:
    """An object's fields. known: those it may have; it must have the first ones."""
    known = list(known)
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} is an object with {', '.join(known[:num_needed])}")
    if missing := [name for name in known[:num_needed] if name not in given]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{what} has {unknown[0]!r}, which is not known: use {', '.join(known)}")
    return dict(given)


def _heads(names: object, dtypes: object, shapes: object) -> list[tuple[str, Tensor]]:
    lists = {"names": names, "dtype_names": dtypes, "shapes": shapes}
    for name, value in lists.items():
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"update_info.{name} is a list")
    if len({len(value) for value in lists.values()}) > 1:
        sizes = ", ".join(f"{len(value)} {name}" for name, value in lists.items())
        raise ValueError(f"update_info has {sizes}: give as many of each")
    heads = []
    for name, dtype_name, shape in zip(names, dtypes, shapes):
        dtype = getattr(torch, str(dtype_name).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{dtype_name!r}, of {name}, is no dtype of torch")
        if not (isinstance(shape, Sequence) and all(is_int(n) and n >= 0 for n in shape)):
            raise ValueError(f"{shape!r} is no shape, of {name}: give a list of whole numbers")
        heads.append((str(name), torch.empty(tuple(shape), dtype=dtype, device="meta")))
    return heads


@dataclass
class _Broadcasts:
    """Tensors that the trainer broadcasts, one by one."""

    heads: Sequence[tuple[str, Tensor]]
    group: WeightGroup

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, head in self.heads:
            yield name, self.group.broadcast(torch.empty_like(head, device=self.group.device))

    def drop(self) -> None:
        for _ in self.tensors():
            pass


class FolderPart:
    """The weights of a checkpoint, which every rank can read. path: absolute."""

    def __init__(self, path: object):
        if not isinstance(path, str) or not os.path.isabs(path) or not os.path.isdir(path):
            raise ValueError(
                f"update_info.path is {path!r}; it is the absolute path of a folder that each rank "
                "of the server can read"
            )
        self.path = Path(path)
        self.is_packed = (self.path / CONFIG_FILE).is_file() and is_packed(self.path)
        with TensorFiles.open(self.path) as files:
            self.heads = [
                (name, torch.empty(files.shape(name), dtype=files.dtype(name), device="meta"))
                for name in files.names()
            ]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        with TensorFiles.open(self.path) as files:
            for name, _ in self.heads:
                yield name, files.read(name)

    def drop(self) -> None:
        pass


class _SharedMemory:
    """Tensors of another process on the same GPU, by CUDA IPC.

    Args:
        pickled: base64 of a pickled list with, for each tensor, {UUID of a GPU: what torch's
            `reduce_tensor` returns there}, as vLLM's trainers send it. Nothing but these is
            unpickled.
    """

    def __init__(self, heads: Sequence[tuple[str, Tensor]], pickled: object, device: torch.device):
        self.heads, self._device = heads, device
        self._handles = _unpickled(pickled)
        if len(self._handles) != len(heads):
            raise ValueError(
                f"update_info has {len(heads)} names and {len(self._handles)} handles: give as "
                "many of each"
            )
        if device.type != "cuda":
            raise ValueError(
                f"the model is on {device}, and memory is shared by CUDA IPC handles on a GPU "
                "alone: send the weights to a group, or give a path"
            )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        index = self._device.index or 0
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        for (name, head), handles in zip(self.heads, self._handles):
            if uuid not in handles:
                raise CheckpointError(
                    f"{name} has no handle for the GPU {uuid}, only for {', '.join(handles)}: the "
                    "trainer and this rank must share a GPU"
                )
            arguments = list(handles[uuid])
            arguments[_DEVICE_PLACE] = index  # its number may be another one there
            tensor = rebuild_cuda_tensor(*arguments)
            if tensor.shape != head.shape or tensor.dtype != head.dtype:
                raise CheckpointError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} in shared memory, and was "
                    f"announced as {head.dtype} {list(head.shape)}"
                )
            yield name, tensor

    def drop(self) -> None:
        pass


_DEVICE_PLACE = 6
"""Of the device's number among the arguments of `rebuild_cuda_tensor`."""
_HARMLESS = {
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): rebuild_cuda_tensor,
    ("torch", "Size"): torch.Size,
    ("torch", "Tensor"): torch.Tensor,
    ("torch._tensor", "Tensor"): torch.Tensor,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
}


class _Unpickler(pickle.Unpickler):
    """Makes what `reduce_tensor` returns, and nothing that could run other code."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _HARMLESS:
            return _HARMLESS[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise ValueError(f"ipc_handles_pickled has {module}.{name}, which is no part of a handle")


def _unpickled(text: object) -> list[dict[str, tuple]]:
    try:
        handles = _Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
    except (TypeError, binascii.Error, pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise ValueError(f"ipc_handles_pickled is no pickled list in base64: {error}") from error
    ends = "of {GPU: (rebuild_cuda_tensor, arguments)}"
    if not isinstance(handles, list) or not all(isinstance(each, dict) for each in handles):
        raise ValueError(f"ipc_handles_pickled is no list {ends}")
    for made in (made for each in handles for made in each.values()):
        if not (
            isinstance(made, tuple) and len(made) == 2 and made[0] is rebuild_cuda_tensor
        ) or not isinstance(made[1], tuple):
            raise ValueError(f"ipc_handles_pickled is no list {ends}")
    return [{gpu: arguments for gpu, (_, arguments) in each.items()} for each in handles]
