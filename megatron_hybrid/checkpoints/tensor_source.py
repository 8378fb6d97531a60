"""TensorSource: tensors that come from somewhere, checked and copied into a model by maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_hybrid.checkpoints.folder import FLOATS
from megatron_hybrid.checkpoints.huggingface.base import TensorMap
from megatron_hybrid.checkpoints.model_tensors import own_tensors
from megatron_hybrid.checkpoints.tensor_files import CheckpointError, check_numbers
from megatron_hybrid.distributed.rendezvous import own_member
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.sharding.gathering import own_piece, whole_shape
from megatron_hybrid.utils.progress import progress


@dataclass(frozen=True)
class TensorSource:
    """Tensors to load from."""

    name: str
    given: dict[str, str]
    """Names of tensors in the maps -> names in the source."""
    shape: Callable[[str], tuple[int, ...]]
    dtype: Callable[[str], torch.dtype]
    read: Callable[[str], Tensor]
    rounded: tuple[torch.dtype, ...] = ()
    """Dtypes of values that are rounded to the model's."""

    def num_bytes(self, name: str) -> int:
        """Count the bytes of a tensor in the maps."""
        given = self.given[name]
        return math.prod(self.shape(given)) * self.dtype(given).itemsize


def load_tensors(model: HybridModel, maps: list[TensorMap], source: TensorSource) -> None:
    """Copy this rank's pieces into the model, after checking all of them; their numbers only when
    they are read.

    maps: of all pipeline stages.
    """
    check_names(maps, source.given, source.name)
    checked = checked_maps(model, maps, source)
    dtypes = {source.given[n]: dtype for n, dtype in dtypes_in_model(model, checked).items()}

    def read(name: str) -> Tensor:
        value = source.read(name)
        check_numbers(name, value, source.name, dtypes[name])
        return value

    copy_tensors(model, checked, replace(source, read=read))


def check_names(maps: Iterable[TensorMap], given: Collection[str], source: str) -> None:
    """Raise CheckpointError unless the names are those of a whole model.

    Args:
        maps: of all pipeline stages.
        given: names that a source has.
        source: its name in errors.
    """
    wanted, given = {name for m in maps for name in m.theirs}, set(given)
    for names, relation in (
        (wanted - given, f"not in {source}, but the model has"),
        (given - wanted, f"in {source}, but the model does not have"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(
                f"{relation} {min(names)}{more}. The config does not describe these weights."
            )


def checked_maps(
    model: HybridModel, maps: Iterable[TensorMap], source: TensorSource
) -> list[TensorMap]:
    """Return the maps of tensors that this rank has pieces of, after checking all of them."""
    own = own_tensors(model)
    maps = [tensor_map for tensor_map in maps if own.keys() & set(tensor_map.ours)]
    for tensor_map in maps:
        check_map(tensor_map, own, source)
    return maps


def dtypes_in_model(model: HybridModel, maps: Iterable[TensorMap]) -> dict[str, torch.dtype]:
    """Return the dtypes that tensors in the maps have in the model, by their names in the maps."""
    own = own_tensors(model)
    return {
        name: own[ours].dtype
        for tensor_map in maps
        for ours in tensor_map.ours
        if ours in own
        for name in tensor_map.theirs
    }


def copy_tensors(model: HybridModel, maps: list[TensorMap], source: TensorSource) -> None:
    """Copy this rank's pieces into the model."""
    own = own_tensors(model)
    sizes = [sum(source.num_bytes(name) for name in tensor_map.theirs) for tensor_map in maps]
    is_first = own_member().rank == 0  # one bar for all ranks
    with progress(f"loading {source.name}", sum(sizes), is_shown=is_first) as advance:
        for tensor_map, num_bytes in zip(maps, sizes, strict=True):
            theirs = [source.read(source.given[name]) for name in tensor_map.theirs]
            for name, value in zip(tensor_map.ours, tensor_map.layout.to_ours(theirs), strict=True):
                if name in own:
                    copy_piece(value, own[name], model)
            advance(num_bytes)


@torch.no_grad()
def copy_piece(whole: Tensor, tensor: Tensor, model: HybridModel) -> None:
    """Copy the piece of `whole` that lies in a tensor of the model."""
    tensor.copy_(own_piece(whole, tensor, model.pg_collection))
    tensor.loaded_dtype = whole.dtype  # for `full_state_dict`


def check_map(tensor_map: TensorMap, own: Mapping[str, Tensor], source: TensorSource) -> None:
    """Check shapes and dtypes, from headers only."""
    ours = [
        torch.empty(whole_shape(own[name]), dtype=own[name].dtype, device="meta")
        for name in tensor_map.ours
    ]
    for name, expected in zip(tensor_map.theirs, tensor_map.layout.to_theirs(ours), strict=True):
        given = source.given[name]
        if source.shape(given) != tuple(expected.shape):
            raise CheckpointError(
                f"{given} has shape {list(source.shape(given))} in {source.name}, but the model's "
                f"config gives it {list(expected.shape)}. Config and weights do not belong "
                "together."
            )
        dtype = source.dtype(given)
        if dtype == expected.dtype or dtype in source.rounded:
            continue
        if dtype not in FLOATS:
            remedy = (
                "Quantized weights are read with the scales next to them, in the formats of "
                "docs/guides/quantized_weights.md; dequantize others first."
            )
        elif torch.promote_types(dtype, expected.dtype) == expected.dtype:
            continue
        else:
            remedy = (
                "Set params_dtype alike, or have it rounded: by dtype=... of load_pretrained, "
                "--dtype of megatron-hybrid convert, cast=True of load_checkpoint."
            )
        raise CheckpointError(
            f"{given} is {dtype} in {source.name}, but {expected.dtype} in the model. {remedy}"
        )
