"""Rooflines: the least time that a model's bytes and FLOPs take on a device.

Only unavoidable work counts: each weight that a forward pass uses is read once, states are read
and written, keys and values that are seen are read, and matrices are multiplied. Activations,
launches and the host are left out. So times are lower bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.models.flops import attention_flops, layers_with_configs, token_flops
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.mixers.base import KVShape


@dataclass(frozen=True)
class Work:
    """The least work that something is for a device."""

    num_bytes: float = 0.0
    """Bytes that are read from its memory and written to it."""
    flops: float = 0.0
    """Multiplications and additions of matrix products."""

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Device:
    """A device's limits."""

    name: str
    flops: float
    """FLOP/s of dense products in bf16."""
    bandwidth: float
    """Bandwidth of its memory, bytes per second."""
    memory_bytes: int
    source: str
    """Source of these numbers."""

    def seconds(self, work: Work) -> float:
        """Return the least time of some work, if the device moves and computes at once."""
        return max(work.num_bytes / self.bandwidth, work.flops / self.flops)


DEVICES = {
    "a100": Device("A100 SXM", 312e12, 2.039e12, 80 * 10**9, "NVIDIA's data sheet"),
    "h100": Device("H100 SXM", 989e12, 3.35e12, 80 * 10**9, "NVIDIA's data sheet"),
    "h200": Device("H200 SXM", 989e12, 4.8e12, 141 * 10**9, "NVIDIA's data sheet"),
    "b200": Device("B200 of an HGX", 2250e12, 8e12, 180 * 10**9, "NVIDIA's data sheet"),
}
"""Peaks of one GPU. On one H100 a copy moved 3.0 TB/s and a product of large bf16 matrices reached
798 TFLOP/s."""


def device_of(
    name: str | None,
    memory_bytes: int | None = None,
    tflops: float | None = None,
    terabytes: float | None = None,
) -> Device | None:
    """Return a device of the table, with the given numbers in place of its own, or one of these
    numbers alone; None without a name and numbers.

    Args:
        tflops: speed in 10^12 FLOP/s.
        terabytes: bandwidth in 10^12 bytes/s.

    Raises:
        ValueError: the name is unknown, or without a name some of the numbers are missing.
    """
    given = {"flops": tflops, "bandwidth": terabytes}
    given = {field: number for field, number in given.items() if number is not None}
    if name is None:
        if not given:
            return None
        if len(given) < 2 or memory_bytes is None:
            raise ValueError("without --device give --flops, --bandwidth and --memory, all three")
        device = Device("this device", 0.0, 0.0, memory_bytes, "")
    elif (device := DEVICES.get(name)) is None:
        raise ValueError(
            f"--device is {name!r}; use one of {sorted(DEVICES)}, or give --flops, --bandwidth and "
            "--memory"
        )
    changes: dict[str, Any] = {field: number * 1e12 for field, number in given.items()}
    if changes:
        changes["source"] = "as given"
    return replace(device, **changes, memory_bytes=memory_bytes or device.memory_bytes)


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer."""

    count: int
    topk: int
    """Number of experts of a token."""
    num_bytes: int
    """Bytes of the weights of all experts."""

    def bytes_read(self, num_tokens: int) -> float:
        """Return the expected bytes of the experts that any token is sent to, if all experts are
        equally likely: a token misses an expert with the probability 1 - topk / count."""
        return self.num_bytes * (1 - (1 - self.topk / self.count) ** num_tokens)


@dataclass(frozen=True)
class Attention:
    """Layers that attend alike."""

    window: int | None
    chunk: int | None
    bytes_per_token: int
    """Bytes of K and V of a token in all of these layers."""
    flops_per_pair: float
    """Operations of a token and one that it sees, in all of these layers."""

    def pairs(self, start: int, end: int) -> int:
        """Count pairs of a token at a position in [start, end) and one it sees, itself included."""
        return self._pairs_before(end) - self._pairs_before(start)

    def _pairs_before(self, end: int) -> int:
        if self.chunk is not None:
            whole, rest = divmod(end, self.chunk)
            return whole * _triangle(self.chunk) + _triangle(rest)
        reach = min(end, self.window or end)
        return _triangle(reach) + (end - reach) * reach

    def seen(self, position: int) -> int:
        """Count the positions before `position` that the token there sees."""
        return self.pairs(position, position + 1) - 1


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


@dataclass(frozen=True)
class ModelWork:
    """Costs of a model's forward passes, from its parameters and what its layers keep."""

    layer_bytes: int
    """Bytes of the weights of the layers and the final norm, without routed experts."""
    output_bytes: int
    """Bytes of the weights of the output layer."""
    experts: tuple[Experts, ...]
    """Experts of each layer that has them."""
    attention: tuple[Attention, ...]
    layer_flops: float
    """Operations of a token, without what it attends to."""
    output_flops: float
    """Operations of the logits of a token."""
    state_bytes: int
    """Bytes of the recurrent states and convolution tails of a sequence."""
    restored_bytes: int
    """Bytes that are moved to resume: states and the last hidden state, both as a checkpoint has
    them and as a live slot has them. Blocks of windows are not copied; 0 if nothing is."""

    @classmethod
    def of(cls, model: HybridModel, spec: CacheSpec) -> ModelWork:
        """Compute the work of a whole model, which may be on the meta device.

        Args:
            spec: its cache spec, with KV in the dtype in which it is kept.
        """
        layers = layers_with_configs(model)
        dense, experts = num_bytes(model.decoder.final_norm.parameters()), []
        for layer, config in layers:
            routed = [p for name, p in layer.named_parameters() if ".experts." in name]
            dense += num_bytes(layer.parameters()) - num_bytes(routed)
            if routed:
                count, topk = config.num_moe_experts, config.moe_router_topk
                experts.append(Experts(count, topk, num_bytes(routed)))
        output = model.shared_embedding_or_output_weight()
        restored = spec.checkpoint_bytes + spec.state_bytes + spec.hidden_bytes
        return cls(
            layer_bytes=dense,
            output_bytes=num_bytes([output]),
            experts=tuple(experts),
            attention=tuple(_attention(attention_flops(model), spec)),
            layer_flops=2 * token_flops(model)[0],
            output_flops=2 * output.numel(),
            state_bytes=spec.state_bytes,
            restored_bytes=restored if spec.needs_state else 0,
        )

    def forward(self, sequences: Sequence[tuple[int, int]], num_logits: int | None = None) -> Work:
        """Compute the work of one forward pass.

        Args:
            sequences: position of each one's first token, and how many tokens it has.
            num_logits: rows of logits; None means one for each sequence.
        """
        tokens = sum(length for _, length in sequences)
        rows = len(sequences) if num_logits is None else num_logits
        moved = self.layer_bytes + sum(experts.bytes_read(tokens) for experts in self.experts)
        moved += self.output_bytes * (rows > 0)
        moved += self.state_bytes * sum(1 + (start > 0) for start, _ in sequences)
        flops = tokens * self.layer_flops + rows * self.output_flops
        for attention in self.attention:
            for start, length in sequences:
                moved += attention.bytes_per_token * (attention.seen(start) + length)
                flops += attention.flops_per_pair * attention.pairs(start, start + length)
        return Work(moved, flops)

    def prefill(self, start: int, end: int, max_tokens: int) -> Iterator[Work]:
        """Yield the work of each forward pass over a prompt's positions [start, end), of at most
        max_tokens; the last one has logits."""
        for first in range(start, end, max_tokens):
            length = min(max_tokens, end - first)
            yield self.forward([(first, length)], num_logits=int(first + length == end))

    def restore(self) -> Work:
        """Return the work of copying a checkpoint to a live slot: read once, written once."""
        return Work(self.restored_bytes)

    def first_token(self, length: int, restored: int, max_tokens: int) -> Iterator[Work]:
        """Yield the work until the first token of a prompt whose `restored` leading tokens are not
        computed. If all are restored, the last hidden state is, too."""
        if restored:
            yield self.restore()
        if restored == length:
            yield Work(self.output_bytes, self.output_flops)
        yield from self.prefill(restored, length, max_tokens)


def num_bytes(tensors: Iterable) -> int:
    """Sum the bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def _attention(layers: list[tuple[KVShape, float]], spec: CacheSpec) -> Iterator[Attention]:
    """Yield the layers of each KV shape together. The groups of the spec are in the same order,
    full attention before local."""
    shapes = sorted(dict.fromkeys(shape for shape, _ in layers), key=lambda kv: kv.is_local)
    for shape, group in zip(shapes, spec.groups, strict=True):
        flops = 2.0 * sum(size for other, size in layers if other == shape)
        kept = group.num_layers * group.bytes_per_token
        yield Attention(group.window, group.chunk, kept, flops)
