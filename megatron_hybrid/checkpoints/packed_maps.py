"""Packed weights in a model: which parts of theirs go where, in both directions.

The maps of an adapter say how rows of our weights and of theirs correspond. Codes and scales, with
a row for each row of the weight, follow the same maps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_hybrid.checkpoints.huggingface.base import TensorMap
from megatron_hybrid.checkpoints.huggingface.layouts import Layout, Tensors, joined
from megatron_hybrid.checkpoints.packed_files import PARTS, PackedTensor, StoredWeight
from megatron_hybrid.checkpoints.quantize import quantized
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.mixers.experts import StackedLinear
from megatron_hybrid.models.mixers.projections import (
    LocalColumnLinear,
    LocalRowLinear,
    ReplicatedLinear,
)
from megatron_hybrid.models.packed_weight import PackedWeight, Packing, common_group, replace_weight
from megatron_hybrid.ops import unpack

logger = logging.getLogger(__name__)

PACKABLE = (LocalColumnLinear, LocalRowLinear, ReplicatedLinear, StackedLinear)
"""Layers whose weights may be packed."""


@dataclass
class PackedSource:
    """The packed weights of a model: what the way back to their folder needs."""

    stored: dict[str, StoredWeight]
    """Stored weights by name."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of all weights, unpacked, by name."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that are written as they were read, by their names in the files."""
    groups: dict[str, int] = field(default_factory=dict)
    """Columns with one scale in this rank's part of the model, by their names of weights."""
    weight_maps: dict[str, TensorMap] = field(default_factory=dict)
    """Maps of packed weights, by our names of them."""
    is_ours: bool = False
    """Whether the folder is a checkpoint of ours."""
    dtype_unpacked: torch.dtype | None = None
    unpacked: dict[str, StoredWeight] = field(default_factory=dict)
    """Weights that are packed in the folder and not in the model, where they have this dtype. Their
    parts are among `kept`."""

    def unpack_mixed(self, maps: Iterable[TensorMap], read: Callable[[str], Tensor]) -> None:
        """Have weights unpacked that are one tensor of the model with rows before them that are not
        packed, or with others in another format. read: a tensor of the folder."""
        for tensor_map in maps:
            packed = [name for name in tensor_map.theirs if name in self.stored]
            formats = {tuple(self.stored[name].dtypes.items()) for name in packed}
            if not packed or (len(formats) == 1 and _Rows.of(tensor_map, self).packed_first):
                continue
            name = tensor_map.ours[0]
            logger.warning("%s is not packed: other rows of it are packed otherwise or not", name)
            for name in packed:
                stored = self.unpacked[name] = self.stored.pop(name)
                names = [part.name for part in stored.parts.values()]
                self.kept |= {each: read(each).clone() for each in names}

    def read(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Read a part `weight:part` with a row for each row of the weight, or one of `unpacked`."""
        if (stored := self.unpacked.get(name)) is not None:
            group = math.gcd(stored.group, stored.shape[-1])
            parts = {
                part: stored.by_row(part, read(each.name), group)
                for part, each in stored.parts.items()
            }
            return unpack(**parts, dtype=self.dtype_unpacked)
        weight, part = name.rsplit(":", 1)
        stored = self.stored[weight]
        return stored.by_row(part, read(stored.parts[part].name), self.groups[weight])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of what `read` returns."""
        if name in self.unpacked:
            return self.unpacked[name].shape
        weight, part = name.rsplit(":", 1)
        stored = self.stored[weight]
        return stored.shape_by_row(part, self.groups[weight])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of what `read` returns."""
        if name in self.unpacked:
            return self.dtype_unpacked
        weight, part = name.rsplit(":", 1)
        return self.stored[weight].dtypes[part]

    def part_names(self) -> set[str]:
        """Return the names in the files of all parts."""
        return {part.name for stored in self.stored.values() for part in stored.parts.values()}

    def parts(self) -> list[str]:
        """Return the names that `read` takes."""
        parts = [f"{name}:{part}" for name, stored in self.stored.items() for part in stored.parts]
        return [*parts, *self.unpacked]

    def to_file_tensors(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """Invert `read`: the tensors in their folder by their names; none of those among `kept`.
        Other tensors are returned as they are."""
        if (stored := self.unpacked.get(name)) is not None:
            group = math.gcd(stored.group, stored.shape[-1])
            values = quantized(value, stored.dtypes, stored.block).items()
            found = {
                stored.parts[part].name: stored.as_stored(part, stored.over_rows(part, v, group))
                for part, v in values
            }
            return {each: tensor for each, tensor in found.items() if each not in self.kept}
        weight, _, part = name.rpartition(":")
        if weight not in self.stored:
            return {name: value}
        stored = self.stored[weight]
        if stored.parts[part].name in self.kept:
            return {}
        return {stored.parts[part].name: stored.as_stored(part, value)}

    def requantize(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Quantize new values of one of our weights, whole, into its parts, by their names in the
        model."""
        tensor_map, values = self.weight_maps[name], {}
        theirs = tensor_map.layout.to_theirs([weight])
        for their_name, value in zip(tensor_map.theirs, theirs, strict=True):
            if (stored := self.stored.get(their_name)) is None:
                values[their_name] = value
                continue
            for part, tensor in quantized(value, stored.dtypes, stored.block).items():
                group = self.groups[their_name]
                values[f"{their_name}:{part}"] = stored.over_rows(part, tensor, group)
        for part_map in self._parts(tensor_map):
            (part,) = part_map.layout.to_ours([values[each] for each in part_map.theirs])
            yield part_map.ours[0], part

    def note_change(self, name: str) -> None:
        """Forget what was read with one of our weights, of this rank or another, which is about to
        change: it no longer belongs to the weight."""
        if (tensor_map := self.weight_maps.get(name)) is not None:
            for their_name in tensor_map.theirs:
                stored = self.stored.get(their_name) or self.unpacked.get(their_name)
                if stored is not None:
                    for part in stored.parts.values():
                        self.kept.pop(part.name, None)

    def expand_maps(self, maps: Iterable[TensorMap]) -> Iterator[TensorMap]:
        """Turn maps of weights into those of the model's parts. Theirs are called `weight:part`."""
        for tensor_map in maps:
            if any(name in self.stored for name in tensor_map.theirs):
                yield from self._parts(tensor_map)
            else:
                yield tensor_map

    def _parts(self, tensor_map: TensorMap) -> Iterator[TensorMap]:
        rows = _Rows.of(tensor_map, self)
        packed = [name for name in tensor_map.theirs if name in self.stored]
        for part in self.stored[packed[0]].parts:
            names = tuple(f"{name}:{part}" for name in packed)
            yield TensorMap((f"{tensor_map.ours[0]}.{part}",), names, rows.layout(True))
        if rows.num_rest:
            plain = tuple(name for name in tensor_map.theirs if name not in self.stored)
            yield TensorMap((f"{tensor_map.ours[0]}.rest",), plain, rows.layout(False))

    @contextmanager
    def install(
        self,
        model: HybridModel,
        maps: Iterable[TensorMap],
        source: str,
        keeps_packing: bool = False,
    ) -> Iterator[None]:
        """Replace the parameters of this rank whose weights are packed, and packed ones whose
        weights are not; nothing is written into them. An error inside puts them back.

        Args:
            source: its name in errors.
            keeps_packing: refuse what would replace a parameter.

        Raises:
            CheckpointError: a weight that cannot be packed in the model.
        """
        modules = {
            model.canonical_name(f"{name}.weight"): module
            for name, module in model.named_modules()
            if isinstance(getattr(module, "weight", None), nn.Parameter | PackedWeight)
        }
        plan: list[tuple[nn.Module, nn.Parameter | PackedWeight]] = []
        for tensor_map in maps:
            packed = [name for name in tensor_map.theirs if name in self.stored]
            name = tensor_map.ours[0]
            module = modules.get(name)
            if packed or not self.unpacked.keys().isdisjoint(tensor_map.theirs):
                self.weight_maps[name] = tensor_map
            if module is None:
                continue
            if not packed:
                if isinstance(module.weight, PackedWeight):
                    plan.append((module, module.weight.parameter()))
                continue
            if not isinstance(module, PACKABLE):
                raise CheckpointError(
                    f"{packed[0]} is packed in {source}, but {name} is a weight of "
                    f"{type(module).__name__}, which needs it unpacked: "
                    "dequantize it with the library that packed it, or use layer_spec='local'."
                )
            packing = self._packing(tensor_map, packed, module.weight)
            self.groups |= {each: packing.group for each in packed}
            if isinstance(module.weight, PackedWeight) and module.weight.packing == packing:
                continue
            try:
                plan.append((module, PackedWeight(module.weight, packing)))
            except ValueError as error:
                raise CheckpointError(f"{packed[0]} is packed in {source}, but {error}.") from None
        if keeps_packing and plan:
            name = next(name for name, module in modules.items() if module is plan[0][0])
            kinds = [
                f"packed ({each.packing})" if isinstance(each, PackedWeight) else "not packed"
                for each in (plan[0][1], plan[0][0].weight)
            ]
            raise CheckpointError(
                f"{name} is {kinds[0]} in {source}, but {kinds[1]} in the model, which keeps "
                "the packing that it has: give a folder that is packed alike, or weights in "
                "floating point, or load the model anew from this folder."
            )
        before = [module.weight for module, _ in plan]
        try:
            for module, weight in plan:
                replace_weight(module, weight)
            yield
        except BaseException:
            for (module, _), weight in zip(plan, before):
                replace_weight(module, weight)
            raise
        model.packed_source = self if self.stored or self.kept else None

    def _packing(self, tensor_map: TensorMap, packed: list[str], weight: Tensor) -> Packing:
        """Return how one of our weights is packed."""
        dtypes = self.stored[packed[0]].dtypes
        group = math.gcd(*(self.stored[name].group for name in packed))
        return Packing(
            dtypes["codes"],
            dtypes["scale"],
            common_group(weight, group),
            "outer" in dtypes,
            dtypes.get("zero"),
            _Rows.of(tensor_map, self).num_rest,
        )


def own_source(
    names: Collection[str],
    shape: Callable[[str], tuple[int, ...]],
    dtype: Callable[[str], torch.dtype],
) -> tuple[PackedSource, list[TensorMap]]:
    """Find the packed weights of a checkpoint of ours, and their maps.

    Args:
        names: canonical ones of all its tensors.
        shape, dtype: of a tensor.
    """
    stored, shapes, maps = {}, {}, []
    for codes in [name for name in names if name.endswith(".weight.codes")]:
        weight = codes.removesuffix(".codes")
        parts = {
            part: PackedTensor(
                f"{weight}.{part}", shape(f"{weight}.{part}"), dtype(f"{weight}.{part}")
            )
            for part in PARTS
            if f"{weight}.{part}" in names
        }
        stored[weight] = StoredWeight.of_parts(parts)
        shapes[weight] = stored[weight].shape
        if (rest := f"{weight}.rest") in names:
            shapes[rest] = shape(rest)
            rows = shapes[weight][-2], shapes[rest][-2]
            maps.append(TensorMap((weight,), (weight, rest), joined(rows, -2)))
        else:
            maps.append(TensorMap((weight,), (weight,)))
    return PackedSource(stored, shapes, is_ours=True), maps


@dataclass(frozen=True)
class _Rows:
    """Which rows of one of our weights are packed: the first ones, if it is `packed_first`."""

    tensor_map: TensorMap
    source: PackedSource
    num_packed: int
    num_rest: int
    packed_first: bool

    @classmethod
    def of(cls, tensor_map: TensorMap, source: PackedSource) -> _Rows:
        """Find which rows are packed by the layout of a mask.

        Raises:
            CheckpointError: the layout is more than an order of rows.
        """
        shapes = [source.shapes[name][:-1] for name in tensor_map.theirs]
        mask = [
            torch.full((*shape, 2), float(name in source.stored))
            for name, shape in zip(tensor_map.theirs, shapes)
        ]
        for each in mask:
            each[..., 1] += 2.0  # tells the columns apart
        try:
            (ours,) = tensor_map.layout.to_ours(mask)
            by_rows = ours.shape[-1] == 2 and bool((ours[..., 1] == ours[..., 0] + 2.0).all())
        except (RuntimeError, ValueError):
            by_rows = False
        name = tensor_map.ours[0]
        if not by_rows or len(tensor_map.ours) != 1:
            raise CheckpointError(
                f"{tensor_map.theirs[0]} is packed, but {name} of the model has its columns in "
                "another order: dequantize it with the library that packed it."
            )
        is_packed = ours[..., 0].reshape(-1, ours.shape[-2])
        num_packed = int(is_packed[0].sum())
        first = bool((is_packed == (torch.arange(ours.shape[-2]) < num_packed)).all())
        return cls(tensor_map, source, num_packed, ours.shape[-2] - num_packed, first)

    def layout(self, packed: bool) -> Layout:
        """Return the layout of the packed rows alone, or of the others."""
        theirs, stored = self.tensor_map.theirs, self.source.stored
        chosen = [i for i, name in enumerate(theirs) if (name in stored) == packed]
        if not self.num_rest:
            return self.tensor_map.layout

        def to_ours(some: Tensors) -> Tensors:
            rows = [self.source.shapes[name][:-1] for name in theirs]
            filled = [some[0].new_zeros(*shape, some[0].shape[-1]) for shape in rows]
            for i, tensor in zip(chosen, some, strict=True):
                filled[i] = tensor
            (ours,) = self.tensor_map.layout.to_ours(filled)
            start = 0 if packed else self.num_packed
            return [ours.narrow(-2, start, self.num_packed if packed else self.num_rest)]

        def to_theirs(ours: Tensors) -> Tensors:
            (part,) = ours
            shape = list(part.shape)
            shape[-2] = self.num_rest if packed else self.num_packed
            other = part.new_zeros(shape)
            both = torch.cat((part, other) if packed else (other, part), -2)
            whole = self.tensor_map.layout.to_theirs([both])
            return [whole[i] for i in chosen]

        return Layout(to_ours, to_theirs)
