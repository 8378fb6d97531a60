"""New weights from a trainer in another process: where a part of them is, and its tensors.

A part is plain data, so that a leading rank can send it to the others, and each rank reads it for
itself. Its names, shapes and dtypes are announced before its tensors come.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megatron_hybrid.checkpoints.folder import CONFIG_FILE, CheckpointFolder
from megatron_hybrid.checkpoints.tensor_files import CheckpointError, TensorFiles
from megatron_hybrid.inference.weights.fingerprint import sample_hash
from megatron_hybrid.utils.child_lifetime import never_free
from megatron_hybrid.utils.interrupts import defer_sigint, poll_until
from megatron_hybrid.utils.validation import Range, check_fields, is_int

Processes = Annotated[int, Range(ge=1, le=2**31 - 1)]
JOIN_SECONDS = 300.0
"""Seconds for a trainer and its workers to meet, and for each broadcast."""
LOOK_SECONDS = 0.2
"""Seconds between two checks whether a wait for a trainer is still wanted."""
GROUP_NAME = "weights"
_SENDS_HEADS = "megatron_hybrid/sends_heads"
"""Key of the store by which a trainer says that a head comes before each tensor."""
_HEAD_BYTES = 256
_MAX_DIMENSIONS = 8
_SPARE_BYTES = 64 << 10
"""Room after a tensor without a head, in addition to its size again, for a longer one."""
_MARK_BYTES = 64


class TrainerError(RuntimeError):
    """The trainer has not come, or has left its group."""


Received = Tensor | CheckpointError
"""A tensor, or the error about it. Either way the next tensors can be received."""


@dataclass(frozen=True)
class Part:
    """Tensors of one call."""

    kind: str
    """Place of the weights, for messages."""
    heads: Sequence[tuple[str, Tensor]] | None
    """All names, in order, and tensors of their shapes and dtypes, which may be without bytes. It
    is None if they are unknown until they come."""
    tensors: Iterator[tuple[str, Received]]
    """All of them, in the same order."""
    is_awaited: bool = False
    """Whether the process that makes or sends them waits until all are taken."""
    is_whole_call: bool = False
    """Whether no other part belongs to its update."""
    is_in_memory: bool = False
    """Whether every rank has all tensors: what was agreed on before stays true."""
    packed_folder: Path | None = None
    """The checkpoint that they are in, if its weights are packed."""

    def drop(self) -> None:
        """Let waiting processes go on after an error, which this must not hide by another one."""
        with suppress(BaseException):
            for _ in self.tensors if self.is_awaited else ():
                pass


class WeightGroup:
    """The process group of a trainer, its rank 0, and of all ranks of all workers.

    Trainers that make theirs as the RL stacks do, by `init_process_group` with a `group_name`
    besides their own, meet it there.

    Args:
        address, port: where the trainer's store listens; the trainer's own process listens on
            this address alone.
        rank: of this process, from 0.
        world_size: processes, the trainer included.
        backend: "gloo" or "nccl"; by default "nccl" for a GPU and "gloo" for a CPU.
        name: of the group, the same in all processes.
        device: of the tensors that NCCL sends.
        is_over: whether nobody wants to wait for the others any more. Any thread may call it.

    Raises:
        ValueError: the numbers make no group, or this process is in a group of the same name.
        TrainerError: the others have not come in `JOIN_SECONDS`, or nobody waits for them.
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
        is_over: Callable[[], bool] = lambda: False,
    ):
        device = torch.device(device)
        backend = _checked_backend(backend, device, rank, world_size)
        self.device = device if backend == "nccl" else torch.device("cpu")
        self._backend, self._is_trainer = backend, rank == 0
        self._lock = threading.Lock()  # of a trainer's threads: a head and its tensor go together
        self.has_failed = False
        """Whether a broadcast has failed, after which there can be no other."""
        self._is_over, self._waits = is_over, False
        seconds = timedelta(seconds=JOIN_SECONDS)
        connecting = seconds if rank == 0 else seconds / 2  # torch tries it twice
        listening: dict[str, int] = {}
        if rank == 0:  # torch itself would listen on all addresses of the machine
            listening["master_listen_fd"] = socket.create_server((address, port)).detach()
        try:
            if rank != 0:
                _await_listener(address, port, is_over)
            self._store = dist.TCPStore(
                address,
                port,
                world_size,
                is_master=rank == 0,
                timeout=connecting,
                **listening,
            )
            self._store.set_timeout(seconds)
            if self._is_trainer:
                self._store.set(_SENDS_HEADS, "1")
            # This function of torch makes a group that belongs to the job of neither side.
            self.group, _ = distributed_c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                backend,
                dist.PrefixStore(name, self._store),
                name,
                timeout=seconds,
            )
            # A process that has met the trainer in its group sees the keys that it has set before.
            self.has_heads = self._store.check([_SENDS_HEADS])
            """Whether the trainer sends a head before each tensor, as it does with this class."""
        except (RuntimeError, OSError) as error:
            raise TrainerError(
                f"the group {name!r} at {address}:{port} has not met: {error}"
            ) from error
        distributed_c10d._world.pg_group_ranks[self.group] = {i: i for i in range(world_size)}

    def broadcast(self, tensor: Tensor, name: str = "") -> None:
        """Send a tensor from the trainer, and before it hashes of its name and values, its dtype
        and its shape. name: as announced; "" is not compared. Threads send one after the other.

        Raises:
            ValueError: this process is not the trainer, or the tensor has too many dimensions.
            TrainerError: another process has left the group.
        """
        if not self._is_trainer or tensor.dim() > _MAX_DIMENSIONS:
            raise ValueError(
                f"{name or 'a tensor'} of {tensor.dim()} dimensions cannot be sent: rank 0 of the "
                f"group, the trainer, sends tensors of at most {_MAX_DIMENSIONS}"
            )
        tensor = tensor.detach().to(self.device).contiguous()
        said = str(tensor.dtype), list(tensor.shape), crc32(name.encode()), sample_hash(tensor)
        head = json.dumps(said).encode().ljust(_HEAD_BYTES)
        head = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(self.device)
        with self._lock:
            self._broadcast(head)
            self._broadcast(_bytes_of(tensor))

    def receive(self, name: str, like: Tensor) -> Received:
        """Receive the next tensor of the trainer. If it sends heads, the tensor has the shape and
        dtype that were sent, else those of `like`, which were announced.

        A receiver of a plain broadcast does not learn how much was sent. With gloo, a shorter
        message leaves the end of the memory as it was, and a longer one needs room. So the last
        element is set to NaN before, and after it there is room with a mark.

        Raises:
            TrainerError: the trainer has left the group.
        """
        if self.has_heads:
            return self._receive_with_head(name)
        room = like.nbytes + _SPARE_BYTES if self._backend == "gloo" else 0
        memory = torch.empty(like.nbytes + room, dtype=torch.uint8, device=self.device)
        tensor = memory[: like.nbytes].view(like.dtype).view(like.shape)
        last, after = tensor.view(-1)[-1:], memory[like.nbytes :][:_MARK_BYTES]
        mark = torch.frombuffer(bytearray(blake2b(name.encode()).digest()), dtype=torch.uint8)
        after.copy_(mark[: len(after)])  # the same on all ranks: they pass it on
        if like.dtype.is_floating_point:
            last.copy_(torch.full_like(last, math.nan, dtype=torch.float32))
        self._broadcast(memory if room else tensor)
        announced = f"the {like.nbytes} announced, as {like.dtype} {list(like.shape)}"
        if room and not torch.equal(after, mark):
            return CheckpointError(f"{name} was sent with more bytes than {announced}")
        if last.float().isnan().any():
            return CheckpointError(
                f"{name} was sent with fewer bytes than {announced}, or its last value is NaN"
            )
        return tensor

    def _receive_with_head(self, name: str) -> Received:
        head = self._broadcast(torch.empty(_HEAD_BYTES, dtype=torch.uint8, device=self.device))
        try:
            dtype, shape, name_sum, values_sum = json.loads(bytes(head.tolist()))
            tensor = torch.empty(shape, dtype=_dtype_of(dtype, name), device=self.device)
        except (ValueError, TypeError, RuntimeError) as error:
            self.has_failed = True
            raise TrainerError(
                "the trainer has sent a tensor without its head: send all of them by "
                "WeightGroup.broadcast"
            ) from error
        self._broadcast(_bytes_of(tensor))
        if name and name_sum not in (crc32(b""), crc32(name.encode())):
            return CheckpointError(
                f"{name} was announced, and another tensor was sent: send them in the order of "
                "update_info.names"
            )
        if sample_hash(tensor) != values_sum:
            return CheckpointError(f"{name} has other values here than where it was sent")
        return tensor

    def skip(self, number: int) -> None:
        """Receive the next tensors of a trainer that sends heads, and drop them."""
        for _ in range(number):
            self._receive_with_head("")

    def _broadcast(self, tensor: Tensor) -> Tensor:
        try:
            self._await(dist.broadcast(tensor, 0, group=self.group, async_op=True))
        except RuntimeError as error:
            self.has_failed = True
            raise TrainerError(f"the trainer's group has failed: {error}") from error
        return tensor

    def _await(self, work: dist.Work) -> None:
        while not work.is_completed():
            if self._is_over():
                self._waits = True
                raise RuntimeError("nobody here waits for it any more")
            if self._backend == "gloo":
                with suppress(RuntimeError):  # not yet; a failure raises below
                    work.wait(timedelta(seconds=LOOK_SECONDS))
            else:  # with NCCL a limit of a wait ends the group
                time.sleep(0.001)
        work.wait()

    def close(self) -> None:
        """Leave the group. The others cannot use it any more."""
        if self.group is not None:
            if self._waits:
                # A thread of torch waits in the group until its time limit. Freeing the group, as
                # Python's exit does, waits for that thread.
                never_free(self.group)
            dist.destroy_process_group(self.group)
        self.group = self._store = None


def _checked_backend(backend: str | None, device: torch.device, rank: int, world_size: int) -> str:
    """Return the backend of a group. Raise ValueError if there can be no such group."""
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
    return backend


def _await_listener(address: str, port: int, is_over: Callable[[], bool]) -> None:
    """Wait until somebody listens. Unlike torch's own wait, this one can end early.

    Raises:
        OSError: there is no such address, nobody comes in time, or nobody waits any more.
    """
    end = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            socket.create_connection((address, port), LOOK_SECONDS).close()
            return
        except socket.gaierror:
            raise
        except OSError:
            if is_over() or time.monotonic() >= end:
                raise
        time.sleep(LOOK_SECONDS)


def _bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, as gloo does not know all dtypes."""
    return tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True)
class GroupInfo:
    """How to meet a trainer: the argument of `init_weight_transfer_engine`.

    Args:
        master_address, master_port: of the trainer.
        rank_offset: processes of the group before the first rank of this worker: the trainer, and
            the ranks of other workers.
        world_size: processes, the trainer included.
        group_name, backend: as for `WeightGroup`.
    """

    master_address: str
    master_port: Annotated[int, Range(ge=1, le=65535)]
    rank_offset: Processes
    world_size: Processes
    group_name: str = GROUP_NAME
    backend: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "init_info.")

    @classmethod
    def parse(cls, given: object) -> GroupInfo:
        """Read an `init_info`. Raise ValueError if it is not valid."""
        fields = _fields(given, "init_info", cls.__dataclass_fields__, 4)
        for name in ("master_port", "rank_offset", "world_size"):
            if str(fields[name]).isdecimal():  # some stacks send a text
                fields[name] = int(fields[name])
        return cls(**fields)

    def check(self, num_ranks: int, device: torch.device) -> None:
        """Raise ValueError if all ranks of a model cannot join."""
        _checked_backend(self.backend, device, self.rank_offset + num_ranks - 1, self.world_size)


class Joining:
    """This rank's joining of a trainer's group, in a thread of its own, while steps go on.

    Args:
        number: of this joining; equal on all ranks.
        info: how to meet.
        rank, device: of the model.
        is_ending: whether nobody wants to wait for a trainer any more.
    """

    def __init__(
        self,
        number: int,
        info: GroupInfo,
        rank: int,
        device: torch.device,
        is_ending: Callable[[], bool],
    ):
        self.number, self._is_ending = number, is_ending
        self.ended: Future[WeightGroup | str] = Future()
        """The group, or why this rank is not in it."""
        self._is_left = False
        arguments = info, rank, device
        threading.Thread(target=self._run, args=arguments, name="trainer", daemon=True).start()

    def _run(self, info: GroupInfo, rank: int, device: torch.device) -> None:
        try:
            found = WeightGroup(
                info.master_address,
                info.master_port,
                info.rank_offset + rank,
                info.world_size,
                backend=info.backend,
                name=info.group_name,
                device=device,
                is_over=lambda: self._is_left or self._is_ending(),
            )
        except BaseException as error:  # `state` reports it
            found = str(error) or type(error).__name__
        self.ended.set_result(found)

    @property
    def state(self) -> str | None:
        """Empty once this rank is in the group, an error if it will not be, and None before."""
        if self.ended.done():
            found = self.ended.result()
            return found if isinstance(found, str) else ""
        return "the engine ends, and waits for no trainer" if self._is_ending() else None

    def wait(self) -> None:
        """Wait until the joining has ended, at most for a moment."""
        end = time.monotonic() + LOOK_SECONDS
        with defer_sigint() as let_in:
            poll_until(lambda: self.ended.done() or time.monotonic() >= end, let_in)

    def leave(self) -> None:
        """Close the group now, or as soon as it exists."""
        self._is_left = True
        self.ended.add_done_callback(_close_group)


def _close_group(ended: Future[WeightGroup | str]) -> None:
    if not isinstance(found := ended.result(), str):
        found.close()


def part_of(info: object, group: WeightGroup | None, device: torch.device) -> Part:
    """Return the tensors of an `update_info`: {"path"}, those of a folder; {"names", "dtype_names",
    "shapes"}, those that the trainer sends to the group; the same with {"ipc_handles_pickled"},
    those in the memory of another process on this GPU.

    Raises:
        ValueError: it is none of these, or cannot be received here.
    """
    if isinstance(info, Mapping) and "path" in info:
        return _in_folder(**_fields(info, "update_info", ("path",), 1))
    listed = ("names", "dtype_names", "shapes")
    fields = _fields(info, "update_info", (*listed, "ipc_handles_pickled", "packed"), 3)
    if fields.pop("packed", False):
        raise ValueError(
            "update_info.packed is true: tensors are sent one by one here, leave packed out"
        )
    heads = _heads(*(fields[name] for name in listed))
    if "ipc_handles_pickled" in fields:
        return _in_shared_memory(heads, fields["ipc_handles_pickled"], device)
    if group is None:
        raise ValueError(
            "no trainer's group was joined: call init_weight_transfer_engine first, or give a path"
        )
    sent = ((name, group.receive(name, head)) for name, head in heads)
    return Part("tensors that a trainer sends", heads, sent, is_awaited=True)


def _fields(given: object, what: str, known: Iterable[str], num_needed: int) -> dict[str, Any]:
    """Return the fields of an object. known: those that it may have; the first ones are needed."""
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
        if not isinstance(name, str):
            raise ValueError(f"update_info.names has {name!r}, which is no text")
        dtype = _dtype_of(dtype_name, name)
        if not (isinstance(shape, Sequence) and all(is_int(n) and n >= 0 for n in shape)):
            raise ValueError(f"{shape!r} is no shape, of {name}: give a list of whole numbers")
        if math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**63:
            raise ValueError(f"{list(shape)}, of {name}, has more elements than memory can hold")
        heads.append((name, torch.empty(tuple(shape), dtype=dtype, device="meta")))
    return heads


def _dtype_of(name: object, of: str) -> torch.dtype:
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r}, of {of}, is no dtype of torch")
    return dtype


def drop_unread(info: object, group: WeightGroup) -> bool:
    """Receive and drop what a trainer sends to its group for an `update_info` with a mistake.
    Return whether that was possible: without heads nothing is known about the tensors."""
    names = info.get("names") if isinstance(info, Mapping) else None
    if isinstance(info, Mapping) and ("path" in info or "ipc_handles_pickled" in info):
        return True  # it comes by another way
    if not isinstance(names, Sequence) or not group.has_heads:
        return False
    group.skip(len(names))
    return True


def _in_folder(path: object) -> Part:
    """Open the weights of a checkpoint, which every rank can read. path: absolute."""
    if not isinstance(path, str) or not os.path.isabs(path) or not os.path.isdir(path):
        raise ValueError(
            f"update_info.path is {path!r}; it is the absolute path of a folder that each rank "
            "of the server can read"
        )
    is_packed = False
    if (Path(path) / CONFIG_FILE).is_file():
        is_packed = CheckpointFolder(path).is_packed
    files = TensorFiles(path)
    heads = [
        (name, torch.empty(files.shape(name), dtype=files.dtype(name), device="meta"))
        for name in files.names()
    ]
    tensors = ((name, files.read(name)) for name in files.names())
    packed = Path(path) if is_packed else None
    return Part("the tensors of a folder", heads, tensors, packed_folder=packed)


def _in_shared_memory(
    heads: Sequence[tuple[str, Tensor]], pickled: object, device: torch.device
) -> Part:
    """Open the tensors of another process on the same GPU, by CUDA IPC.

    Args:
        pickled: base64 of a pickled list with, for each tensor, {UUID of a GPU: what torch's
            `reduce_tensor` returns there}, as vLLM's trainers send it. Nothing but these is
            unpickled.

    Raises:
        ValueError: a handle is missing, or belongs to another tensor than was announced.
    """
    handles = _unpickled(pickled)
    if len(handles) != len(heads):
        raise ValueError(
            f"update_info has {len(heads)} names and {len(handles)} handles: give as many of each"
        )
    if device.type != "cuda":
        raise ValueError(
            f"the model is on {device}, and memory is shared by CUDA IPC handles on a GPU alone: "
            "send the weights to a group, or give a path"
        )
    uuid = _uuid_of(device)
    for (name, head), of_gpus in zip(heads, handles):
        if uuid not in of_gpus:
            raise ValueError(
                f"{name} has no handle for the GPU {uuid}, only for {', '.join(of_gpus)}: the "
                "trainer and this rank must share a GPU"
            )
        _check_handle(name, head, of_gpus[uuid])

    def tensors() -> Iterator[tuple[str, Received]]:
        for (name, _), of_gpus in zip(heads, handles):
            arguments = list(of_gpus[uuid])
            arguments[_DEVICE_PLACE] = device.index or 0  # its number may be another one
            try:
                yield name, rebuild_cuda_tensor(*arguments)
            except (RuntimeError, TypeError) as error:
                yield name, CheckpointError(f"{name} cannot be read from shared memory: {error}")

    return Part("tensors in shared memory", heads, tensors())


def _uuid_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device.index or 0).uuid)


def _check_handle(name: str, head: Tensor, arguments: tuple) -> None:
    """Check the arguments of `rebuild_cuda_tensor` against what was announced."""
    if len(arguments) <= _STORAGE_SIZE_PLACE:
        raise ValueError(f"{name} has a handle of {len(arguments)} parts: it is no whole handle")
    _, size, stride, offset, _, dtype = arguments[:_DEVICE_PLACE]
    if (dtype, tuple(size)) != (head.dtype, tuple(head.shape)):
        raise CheckpointError(
            f"{name} is {dtype} {list(size)} in shared memory, and was announced as {head.dtype} "
            f"{list(head.shape)}"
        )
    held = arguments[_STORAGE_SIZE_PLACE] // head.dtype.itemsize
    needed = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride))
    if head.numel() and needed > held:
        raise CheckpointError(
            f"{name} needs {needed} elements of shared memory, and its handle has {held}"
        )


_DEVICE_PLACE = 6
"""Index of the device's number among the arguments of `rebuild_cuda_tensor`."""
_STORAGE_SIZE_PLACE = 8
"""Index of the size of its memory in bytes among them."""
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
    """Unpickles what `reduce_tensor` returns, and nothing that could run other code."""

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
