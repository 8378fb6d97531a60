"""AdapterBank: low-rank adapters that an engine holds over one model, for requests to choose from.

Rows of one step may have different adapters: each projection multiplies them by slots. A prefix is
shared within an adapter alone. The adapter's salt is a digest of its values, so that an adapter
which is loaded again finds its prefixes, and another one of the same name does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_hybrid.checkpoints.adapter_files import read_adapters
from megatron_hybrid.checkpoints.model_tensors import of_all_stages
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.distributed.ranks import Ranks
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.requests.options import LoadedAdapter
from megatron_hybrid.inference.weights.fingerprint import hash_of
from megatron_hybrid.inference.worker.context import DynamicInferenceContext
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.low_rank import cut_of_projection, exchange_ranks, projections_of
from megatron_hybrid.models.parameter_names import is_of_prediction
from megatron_hybrid.models.sharding.gathering import whole_shape
from megatron_hybrid.models.sharding.tensor_sharding import shard
from megatron_hybrid.ops import slot_linear

MOST_LETTERS = 256


@dataclass(frozen=True)
class ReadAdapter:
    """A whole adapter in host memory, on no rank in particular."""

    folder: str
    rank: int
    digest: str
    values: dict[str, tuple[Tensor, Tensor]]
    """A [rank, in] and B [out, rank] of projections, in the dtype of the model's parameters. B is
    multiplied by its factor."""


class AdapterBank:
    """The adapters of an engine: `config.max_adapters` slots in the memory of the device.

    Raises:
        ValueError: the model cannot have adapters, and the config asks for some.
    """

    def __init__(self, model: HybridModel, config: InferenceConfig, ranks: Ranks):
        self._model, self._ranks = model, ranks
        self._num_slots, self._max_rank = config.max_adapters, config.max_adapter_rank
        self.loaded: dict[str, LoadedAdapter] = {}
        """The adapters by name, in the order of their loading."""
        self._context: DynamicInferenceContext | None = None
        self._slots: dict[str, _AdapterSlots] = {}
        self._hooks: list[RemovableHandle] = []
        if not config.max_adapters:
            return
        if model.config.sequence_parallel:
            raise ValueError(
                f"max_adapters={config.max_adapters} needs sequence_parallel=False: ranks that "
                "split rows do not know the adapters of all"
            )
        for name, projection in projections_of(model).items():
            if not is_of_prediction(name):
                own = _AdapterSlots(projection, config.max_adapters, config.max_adapter_rank)
                self._slots[name] = own
                hook = partial(self._add_to_output, own)
                hook.is_recorded = True  # see `unrecorded_calls`
                self._hooks.append(projection.register_forward_hook(hook))

    def close(self) -> None:
        """Let the model compute as it did before."""
        for hook in self._hooks:
            hook.remove()
        self._slots, self.loaded = {}, {}

    def _add_to_output(
        self, own: _AdapterSlots, projection: nn.Module, inputs: tuple, output: Any
    ) -> Any:
        slots = None if self._context is None else self._context.adapter_slots
        if slots is None:
            return output
        if isinstance(output, tuple):
            return own.add(inputs[0], output[0], slots), *output[1:]
        return own.add(inputs[0], output, slots)

    @contextmanager
    def of_rows(self, context: DynamicInferenceContext) -> Iterator[None]:
        """Make a context in which each row that the model computes has its request's adapter."""
        self._context = context
        try:
            yield
        finally:
            self._context = None

    def require(self, name: str) -> LoadedAdapter:
        """Return an adapter. Raise ValueError if there is none of this name."""
        if name not in self.loaded:
            there = ", ".join(map(repr, self.loaded)) or "none"
            raise ValueError(f"adapter is {name!r}, and the engine has {there}: load it first")
        return self.loaded[name]

    def reader(
        self, name: str, folder: str | os.PathLike, used: set[int]
    ) -> Callable[[], ReadAdapter]:
        """Return a function that reads an adapter for `put`, in any thread. Call this on all ranks
        of the model.

        used: slots of requests, also of adapters that were dropped.

        Raises:
            ValueError: as `put`. The function raises CheckpointError if the folder cannot be read,
                is of another model, or its rank is too large.
        """
        self._free_slot(name, used)
        shapes = {each: whole_shape(own.projection.weight) for each, own in self._slots.items()}
        return partial(self._read, os.fspath(folder), of_all_stages(self._model, shapes))

    def _read(self, folder: str, shapes: Mapping[str, tuple[int, ...]]) -> ReadAdapter:
        config = self._model.config
        fields, adapters = read_adapters(folder, config, shapes)
        values, digest = {}, blake2b(digest_size=16)
        for ours, whole in sorted(adapters.items()):
            digest.update(f"{ours} {hash_of(whole.a)} {hash_of(whole.b)} ".encode())
            pair = whole.a, whole.b * fields.scale()
            values[ours] = tuple(tensor.to(config.params_dtype) for tensor in pair)
            if not all(bool(tensor.isfinite().all()) for tensor in values[ours]):
                raise CheckpointError(
                    f"{folder}: the adapter of {ours} has infinite numbers in "
                    f"{config.params_dtype}, with a factor of {fields.scale():g}"
                )
        rank = max(len(whole.a) for whole in adapters.values())
        if rank > self._max_rank:
            raise CheckpointError(
                f"{folder} has adapters of rank {rank}, and max_adapter_rank is {self._max_rank}: "
                "raise it (parts of one projection, as q_proj and v_proj, count together)"
            )
        digest.update(repr(fields.scale()).encode())
        return ReadAdapter(folder, rank, digest.hexdigest(), values)

    def put(self, name: str, read: ReadAdapter, used: set[int]) -> LoadedAdapter:
        """Copy an adapter into a free slot. Call it on all ranks of the model.

        Raises:
            ValueError: no slot is free, or the name is taken or illegal. Nothing has changed.
        """
        slot = self._free_slot(name, used)
        self._ranks.require_equal({f"the adapter {name!r}": read.digest})
        for ours, own in self._slots.items():
            own.fill(slot, read.values.get(ours))
        salt = f"\0{read.digest}\0"
        self.loaded[name] = LoadedAdapter(name, read.folder, read.rank, slot, salt)
        return self.loaded[name]

    def _free_slot(self, name: str, used: set[int]) -> int:
        if not self._num_slots:
            raise ValueError("the engine holds no adapters: make it with max_adapters=1 or more")
        if not (0 < len(name) <= MOST_LETTERS and name.isprintable()):
            raise ValueError(
                f"the adapter's name is {name[:40]!r}; use 1 to {MOST_LETTERS} printable letters"
            )
        if name in self.loaded:
            raise ValueError(f"there is an adapter {name!r}: unload it first, or use another name")
        held = {each.slot for each in self.loaded.values()}
        if not (free := set(range(self._num_slots)) - held - used):
            raise ValueError(
                f"the engine holds max_adapters={self._num_slots} adapters, {len(used - held)} of "
                "which were unloaded and still have requests: unload one of "
                f"{', '.join(map(repr, self.loaded)) or 'none'}, wait, or raise max_adapters"
            )
        return min(free)

    def unload(self, name: str) -> None:
        """Let no further request have an adapter. Its slot is free as soon as no request has it.

        Raises:
            ValueError: there is none of this name.
        """
        self.require(name)
        del self.loaded[name]


class _AdapterSlots:
    """The adapters of one projection."""

    def __init__(self, projection: nn.Module, num_slots: int, rank: int):
        self.projection = projection
        out, width = projection.weight.shape
        like = {"dtype": projection.weight.dtype, "device": projection.weight.device}
        self._a = torch.zeros(num_slots, rank, width, **like)
        self._b = torch.zeros(num_slots, out, rank, **like)
        self._cut = cut_of_projection(projection)

    def fill(self, slot: int, pair: tuple[Tensor, Tensor] | None) -> None:
        """Set A [rank, in] and B [out, rank] of a slot, or zeros if `pair` is None."""
        a, b = self._a[slot].zero_(), self._b[slot].zero_()
        if pair is None:
            return
        group, _, by_column = self._cut
        parts, weight = list(pair), self.projection.weight
        if group is not None:
            parts[not by_column] = shard(parts[not by_column], weight, group.rank())
        a[: len(parts[0])], b[:, : len(pair[0])] = parts

    def add(self, x: Tensor, output: Tensor, slots_T: Tensor) -> Tensor:
        """Add the adapters of its rows to the output [..., out] of the projection.

        Args:
            x: its input, [..., in].
            slots_T: slot of each row; below 0 for none.
        """
        low = slot_linear(x.reshape(-1, x.shape[-1]), self._a, slots_T)
        added = slot_linear(exchange_ranks(low, *self._cut), self._b, slots_T)
        return output + added.view(output.shape)
