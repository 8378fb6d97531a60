"""Sharding of parameters over tensor-parallel ranks, by attributes of the parameters.

A sharded parameter carries megatron-core's attributes (`tensor_model_parallel`, `partition_dim`,
`partition_stride`) and, where a rank holds pieces of several concatenated blocks,
`partition_sections`: the full sizes of these blocks along `partition_dim` (and `section_names`,
their names in core's distributed checkpoints). So one pair of functions cuts and joins all
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MARKS = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "partition_sections",
    "section_names",
    "unpadded_size",
)


def mark_tensor_parallel(
    parameter: nn.Parameter,
    dim: int,
    sections: Sequence[int] | None = None,
    section_names: Sequence[str] | None = None,
    unpadded_size: int | None = None,
) -> None:
    """Mark `parameter` as this rank's piece of a tensor that is cut along `dim`.

    Args:
        sections: full sizes of the concatenated blocks along `dim`, each cut separately; None: one
            block.
        section_names: core's names of these blocks, if it keeps them apart.
        unpadded_size: full size along `dim` without padding rows.
    """
    parameter.tensor_model_parallel = True
    parameter.partition_dim = dim
    parameter.partition_stride = 1
    if sections is not None:
        parameter.partition_sections = tuple(sections)
    if section_names is not None:
        parameter.section_names = tuple(section_names)
    if unpadded_size is not None:
        parameter.unpadded_size = unpadded_size


def copy_marks(source: Tensor, target: Tensor, dropped_dims: int = 0) -> None:
    """Mark `target` as a piece of the same kind as `source`; marks that it has are kept.

    Args:
        dropped_dims: leading dimensions of `source` that `target` lacks.
    """
    for name in _MARKS:
        if hasattr(source, name) and not hasattr(target, name):
            value = getattr(source, name)
            setattr(target, name, value - dropped_dims if name == "partition_dim" else value)


def full_shape(parameter: Tensor, tp_size: int) -> tuple[int, ...]:
    """Shape of the whole tensor that `parameter` is this rank's piece of."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        dim = parameter.partition_dim
        shape[dim] = getattr(parameter, "unpadded_size", shape[dim] * tp_size)
    return tuple(shape)


def shard(full: Tensor, parameter: Tensor, rank: int, tp_size: int) -> Tensor:
    """One rank's piece of `full`, cut like `parameter`."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    dim = parameter.partition_dim
    padding = parameter.shape[dim] * tp_size - full.shape[dim]
    if padding:
        full = F.pad(full, (0, 0) * (full.dim() - 1 - dim) + (0, padding))
    if tp_size == 1:
        return full
    sections = getattr(parameter, "partition_sections", (full.shape[dim],))
    pieces = [block.chunk(tp_size, dim)[rank] for block in full.split(sections, dim)]
    return torch.cat(pieces, dim)


def unshard(pieces: Sequence[Tensor], parameter: Tensor) -> Tensor:
    """The whole tensor, from the pieces of all ranks in order. Inverse of `shard`."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return pieces[0]
    dim = parameter.partition_dim
    if len(pieces) == 1:
        full = pieces[0]
    else:
        total = sum(piece.shape[dim] for piece in pieces)
        sections = getattr(parameter, "partition_sections", (total,))
        local = [size // len(pieces) for size in sections]
        blocks = zip(*(piece.split(local, dim) for piece in pieces))
        full = torch.cat([piece for block in blocks for piece in block], dim)
    return full.narrow(dim, 0, getattr(parameter, "unpadded_size", full.shape[dim]))
