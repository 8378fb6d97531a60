"""Sharding of parameters over tensor-parallel ranks, described by one attribute of the parameters.

A sharded parameter carries a `Cut` next to megatron-core's own attributes (`tensor_model_parallel`,
`partition_dim`, `partition_stride`), and all that cuts or joins parameters follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CORE_MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride")


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut along one dimension over tensor-parallel ranks.

    The dimension is one row of blocks, or `repeats` such rows one after the other, each of which
    equally many ranks share. Within a row each block is cut evenly, block by block.
    """

    dim: int
    sections: tuple[int, ...]
    """Full sizes of the blocks of a row."""
    num_ranks: int
    names: tuple[str, ...] | None = None
    """Names of the blocks in core's distributed checkpoints, if it keeps them apart."""
    copies: tuple[int, ...] | None = None
    """Number of neighbouring ranks that hold the same piece of each block; None means 1 for all."""
    repeats: int = 1
    unpadded_size: int | None = None
    """Full size along `dim` without padding; None if there is none."""

    @property
    def size(self) -> int:
        """Full size along `dim`, with padding."""
        return sum(self.sections) * self.repeats

    @property
    def local_sections(self) -> tuple[int, ...]:
        """Sizes of a rank's pieces, in its order."""
        return tuple(stop - start for start, stop in self.ranges(0))

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Find (start, stop) of a rank's piece of each block in the full dimension, in order."""
        sharing = self.num_ranks // self.repeats
        row, rank = divmod(rank, sharing)
        at, found = row * sum(self.sections), []
        for size, copies in zip(self.sections, self._copies):
            length = size * copies // sharing
            start = at + rank // copies * length
            found.append((start, start + length))
            at += size
        return found

    def copy_numbers(self, rank: int) -> list[int]:
        """Return for each block which copy of its piece the rank holds, from 0."""
        rank %= self.num_ranks // self.repeats
        return [rank % copies for copies in self._copies]

    def copied(self) -> Cut | None:
        """Return the blocks with pieces that several ranks hold, as one tensor, if any."""
        blocks = [(size, copies) for size, copies in zip(self.sections, self._copies) if copies > 1]
        if not blocks:
            return None
        sections, copies = zip(*blocks)
        return Cut(self.dim, sections, self.num_ranks, copies=copies, repeats=self.repeats)

    def blocks(self) -> list[Cut]:
        """Return each block as a tensor of its own; this cut repeats none."""
        return [
            replace(self, sections=(size,), names=None, copies=(copies,))
            for size, copies in zip(self.sections, self._copies)
        ]

    @property
    def _copies(self) -> tuple[int, ...]:
        return self.copies or (1,) * len(self.sections)


def mark_tensor_parallel(parameter: Tensor, cut: Cut) -> None:
    """Mark `parameter` as this rank's piece of a tensor."""
    parameter.cut = cut
    parameter.tensor_model_parallel = True
    parameter.partition_dim = cut.dim
    parameter.partition_stride = 1


def cut_of(tensor: Tensor) -> Cut | None:
    """Return how a tensor of a model is cut; None if every rank holds all of it."""
    return getattr(tensor, "cut", None)


def copy_marks(source: Tensor, target: Tensor, dropped_dims: int = 0) -> None:
    """Mark `target` as a piece of the same kind as `source`; core's marks that it has are kept.

    Args:
        dropped_dims: leading dimensions of `source` that `target` lacks.
    """
    if (cut := cut_of(source)) is None:
        return
    given = {name: getattr(target, name) for name in _CORE_MARKS if hasattr(target, name)}
    mark_tensor_parallel(target, replace(cut, dim=cut.dim - dropped_dims))
    for name, value in given.items():
        setattr(target, name, value)


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor that `parameter` is this rank's piece of."""
    shape = list(parameter.shape)
    if (cut := cut_of(parameter)) is not None:
        shape[cut.dim] = cut.unpadded_size or cut.size
    return tuple(shape)


def sharded_parameter(full: Tensor, cut: Cut, rank: int) -> nn.Parameter:
    """Return this rank's piece of `full`, which all ranks have drawn alike, so that a model starts
    with the same weights on any number of them."""
    parameter = nn.Parameter(_piece(full, cut, rank).contiguous())
    mark_tensor_parallel(parameter, cut)
    return parameter


def shard(full: Tensor, parameter: Tensor, rank: int) -> Tensor:
    """Return one rank's piece of `full`, cut like `parameter`."""
    cut = cut_of(parameter)
    return full if cut is None else _piece(full, cut, rank)


def _piece(full: Tensor, cut: Cut, rank: int) -> Tensor:
    padding = cut.size - full.shape[cut.dim]
    if padding:
        full = F.pad(full, (0, 0) * (full.dim() - 1 - cut.dim) + (0, padding))
    if cut.num_ranks == 1:
        return full
    pieces = [full.narrow(cut.dim, at, end - at) for at, end in cut.ranges(rank)]
    return torch.cat(pieces, cut.dim)


def unshard(pieces: Sequence[Tensor], parameter: Tensor) -> Tensor:
    """Return the whole tensor, from the pieces of all ranks in order. Inverse of `shard`."""
    cut = cut_of(parameter)
    if cut is None:
        return pieces[0]
    full = pieces[0]
    if cut.num_ranks > 1:
        shape = list(full.shape)
        shape[cut.dim] = cut.size
        full = full.new_empty(shape)
        for rank, piece in enumerate(pieces):
            blocks = piece.split(cut.local_sections, cut.dim)
            for (start, stop), block in zip(cut.ranges(rank), blocks):
                full.narrow(cut.dim, start, stop - start).copy_(block)
    return full.narrow(cut.dim, 0, cut.unpadded_size or cut.size)
