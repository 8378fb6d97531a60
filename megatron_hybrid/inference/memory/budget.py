"""The memory of an engine: what there is, what its parts ask for, and the pool that is left."""

from __future__ import annotations

import math
import os
import resource
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.distributed.ranks import Ranks
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.models.flops import layer_widths
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.ops.ragged import ROW_ALIGNMENT

CPU_FRACTION = 0.25
"""Most of a CPU's memory that a pool takes by itself: other programs live there, too."""
LARGEST_STEP = "the largest step"
_FP32 = 4
_SCAN_CHUNK = 64
_COPIES = 3
"""Tensors of one kind that a layer holds at a time, about."""
_BLOCKS = 4 << 20
"""Bytes that the references on a CPU handle at a time, whatever the sizes."""
_SQUARES = 10
"""The same for the squares of a scan's chunks, most in the delta rules."""


def available_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate. All of inference asks here."""
    if device.type != "cuda":
        return available_on_host(Path("/"))
    free, _ = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    # torch gives its unused memory back before it lacks any, except parts of blocks.
    unused = stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]
    return free + unused - stats["inactive_split_bytes.all.current"]


def available_on_host(root: Path) -> int:
    """Return the least of what the machine has available, what is left in each control group, and
    what is left of the address space (ulimit -v). root: of the file system."""
    meminfo = dict(_numbers(root / "proc/meminfo"))
    left = [meminfo["MemAvailable:"] << 10, *_left_in_groups(root)]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int((root / "proc/self/statm").read_text().split()[0])
        left.append(limit - pages * resource.getpagesize())
    return max(0, min(left))


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield what is left below the limit of each control group (v1 and v2) that this process is
    in. Page cache that is not in use does not count as used."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = "sys/fs/cgroup/memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # In a container the path may be that outside of it, and its own group the mount itself.
        group = Path(path.lstrip("/"))
        for folder in dict.fromkeys([group, *group.parents, Path()]):
            files = [root / mount / folder / name for name in names[:2]]
            try:
                limit, used = (int(file.read_text()) for file in files)
                cached = dict(_numbers(files[0].parent / "memory.stat"))[names[2]]
            except (OSError, ValueError, KeyError):  # no such group; or its limit is "max"
                continue
            yield limit - used + cached


def _numbers(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the first word of each line of a file, and the number after it."""
    for line in file.read_text().splitlines():
        name, number, *_ = line.split()
        yield name, int(number)


def has_room(num_bytes: int, device: torch.device) -> bool:
    """Return whether optional copies take at most `CPU_FRACTION` of this process's share."""
    num_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return num_bytes <= available_bytes(device) // num_sharing * CPU_FRACTION


@dataclass(frozen=True)
class Part:
    """Memory that an engine asks for."""

    num_bytes: int
    what: str
    setting: str
    """The fields of InferenceConfig that make it smaller."""
    on_host: bool = False
    """Whether it is in host memory, whatever the device of the engine."""


@dataclass(frozen=True)
class _Memory:
    """A memory as a process sees it, and what it asks of it besides the pool."""

    name: str
    """Name in messages: "cpu", "cuda:0"."""
    identity: str
    """Processes with the same identity share it."""
    available: int
    """Bytes, for all processes that share it."""
    num_sharing: int
    """Processes of the job that share it, as far as this one knows."""
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, device: torch.device, parts: Sequence[Part]) -> _Memory:
        identity, num_sharing = socket.gethostname(), 1
        if device.type == "cpu":
            num_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # from torchrun
        else:
            identity += f" {torch.cuda.get_device_properties(device).uuid}"
        return cls(str(device), identity, available_bytes(device), num_sharing, tuple(parts))

    def share(self, memories: Counter[str]) -> int:
        """Return the bytes for this process. memories: numbers of ranks that see each identity."""
        return self.available // max(memories[self.identity], self.num_sharing)


def pool_pages(
    config: InferenceConfig,
    device: torch.device,
    page_bytes: int,
    step_bytes: int,
    parts: Sequence[Part],
    ranks: Ranks,
) -> int:
    """Return the number of pages of the pool, that of the rank with the fewest. Call it on all
    ranks, before anything is allocated; they exchange one message.

    Args:
        device: of the pool.
        page_bytes: the same on all ranks.
        step_bytes: of the largest step, which a pool that takes what there is leaves free.
        parts: what this rank asks for besides the pool.

    Raises:
        ValueError: `cache_bytes` is less than two pages.
        MemoryError: a rank asks for more than its share of what there is. All ranks raise it alike.
    """
    if config.cache_bytes is None:
        parts = [*parts, Part(step_bytes, LARGEST_STEP, "max_tokens")]
    on_cpu = device.type == "cpu"
    own = [_Memory.of(device, [part for part in parts if on_cpu or not part.on_host])]
    if not on_cpu:
        own.append(_Memory.of(torch.device("cpu"), [part for part in parts if part.on_host]))
    everyone = ranks.gather((config.cache_bytes, own))
    sharing = Counter(memory.identity for _, memories in everyone for memory in memories)
    fraction = min(config.memory_fraction, CPU_FRACTION) if on_cpu else config.memory_fraction

    def most_pages(cache_bytes: int | None, memory: _Memory) -> int:
        if cache_bytes is not None:
            return cache_bytes // page_bytes
        left = memory.share(sharing) - sum(part.num_bytes for part in memory.parts)
        return max(2, int(left * fraction) // page_bytes)

    num_pages = min(most_pages(cache_bytes, memories[0]) for cache_bytes, memories in everyone)
    if num_pages < 2:
        raise ValueError(
            f"cache_bytes={config.cache_bytes} holds {num_pages} pages of {page_bytes} bytes, of "
            f"blocks of {config.block_size_tokens} tokens; at least 2 are needed: raise "
            f"cache_bytes to {2 * page_bytes} or more"
        )
    pool = Part(num_pages * page_bytes, "the pool", "cache_bytes")
    for rank, (_, memories) in enumerate(everyone):
        for index, memory in enumerate(memories):
            asked = [pool, *memory.parts] if index == 0 else memory.parts
            whose = f" for {ranks.members[rank]}" if ranks.size > 1 else ""
            _refuse_too_much(asked, memory.share(sharing), memory.name, whose)
    return num_pages


def _refuse_too_much(parts: Sequence[Part], share: int, memory: str, whose: str) -> None:
    total = sum(part.num_bytes for part in parts)
    if total <= share:
        return
    parts = sorted(parts, key=lambda part: -part.num_bytes)
    listed = ", ".join(f"{part.num_bytes} for {part.what}" for part in parts if part.num_bytes)
    raise MemoryError(
        f"{memory} has {share} bytes ({share / 2**30:.2f} GiB) available{whose}, and the "
        f"engine asks for {total} ({total / 2**30:.2f} GiB): {listed}. Lower {parts[0].setting}"
    )


def step_bytes(
    model: HybridModel,
    spec: CacheSpec,
    num_captures: int,
    max_requests: int,
    max_tokens: int,
    max_sequence_length: int,
) -> int:
    """Estimate the bytes that the largest step takes besides pool, slots and inputs: `max_tokens`
    tokens of one prompt at the end of the longest sequence, all of them with log-probabilities.

    It is the widest layer's activations, or the logits, next to the residual stream and the
    captured states. The model may be on the meta device.
    """
    config, own = model.config, model.config.params_dtype.itemsize
    on_cpu = next(model.parameters()).device.type == "cpu"
    num_tokens = min(max_tokens, max_requests * max_sequence_length)
    rows = -(-num_tokens // ROW_ALIGNMENT) * ROW_ALIGNMENT
    chunks = -(-rows // _SCAN_CHUNK) + min(max_requests, rows)
    layers = [0.0]
    for width, cache in zip(layer_widths(model), model.cache_requirements(), strict=True):
        num_bytes = rows * width * (own + _FP32)
        for state in cache.states:
            num_bytes += _COPIES * chunks * math.prod(state.shape) * state.dtype.itemsize
            if len(state.shape) == 3:  # a chunked scan of heads has a square for each
                num_bytes += _SQUARES * rows * state.shape[0] * _SCAN_CHUNK * _FP32
        if (kv := cache.kv) is not None and on_cpu:  # kernels read the pages in place
            reach = (kv.window or kv.chunk) + rows if kv.is_local else max_sequence_length
            keys = min(reach, max_sequence_length)
            num_bytes += _COPIES * keys * kv.num_heads * (kv.head_dim + kv.value_dim) * _FP32
        layers.append(num_bytes)
    logits = rows * model.vocab_size * (own + 2 * _FP32) if model.post_process else 0
    residual = _COPIES * rows * config.hidden_size * (own + _FP32)
    blocks = _BLOCKS if on_cpu else 0
    return int(residual + max(*layers, logits) + blocks + num_captures * spec.slot_bytes)
