"""How the numbers of a few tensors lie in our parameters and in theirs: pairs of inverse functions.

All are pure index work (cut, join, reorder, shift), so that there and back is exact to the bit, and
all run on `meta` tensors too: that is how expected shapes are known without a table of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Layout:
    """A pair of inverse functions between lists of tensors."""

    to_ours: Callable[[Tensors], Tensors]
    to_theirs: Callable[[Tensors], Tensors]

    @property
    def inverse(self) -> Layout:
        """The same with the two sides swapped."""
        return Layout(self.to_theirs, self.to_ours)


SAME = Layout(lambda theirs: theirs, lambda ours: ours)
"""One tensor, the same in both."""


@dataclass(frozen=True)
class TensorMap:
    """Some of our tensors hold the same numbers as some of theirs."""

    ours: tuple[str, ...]
    """Canonical parameter names (`models/parameter_names.py`)."""
    theirs: tuple[str, ...]
    """Names in the safetensors files."""
    layout: Layout = SAME
    """How the numbers lie in each."""


def same(ours: str, theirs: str, layout: Layout = SAME) -> TensorMap:
    """Map one tensor of ours to one of theirs."""
    return TensorMap((ours,), (theirs,), layout)


def joined(sizes: Sequence[int], dim: int = 0) -> Layout:
    """Lay out our one tensor as theirs, of these sizes along `dim`, one after another."""
    sizes = list(sizes)
    return Layout(
        lambda theirs: [torch.cat(list(theirs), dim)], lambda ours: list(ours[0].split(sizes, dim))
    )


def stacked(num_parts: int = 1) -> Layout:
    """Lay out E experts along a leading dimension of our one tensor. Theirs are E times `num_parts`
    tensors, expert by expert; the parts of an expert lie one after another in its rows of ours."""

    def stack(theirs: Tensors) -> Tensors:
        lots = [theirs[i : i + num_parts] for i in range(0, len(theirs), num_parts)]
        return [torch.stack([torch.cat(list(lot)) for lot in lots])]

    def part(ours: Tensors) -> Tensors:
        return [piece for expert in ours[0].unbind(0) for piece in expert.chunk(num_parts)]

    return Layout(stack, part)


def transposed() -> Layout:
    """Swap the last two dimensions."""

    def swap(tensors: Tensors) -> Tensors:
        return [tensor.transpose(-2, -1).contiguous() for tensor in tensors]

    return Layout(swap, swap)


def alternating(dim: int) -> Layout:
    """Lay out theirs with gate and value in turns along `dim`, ours with gates, then values."""

    def swap(tensor: Tensor, sizes: tuple[int, int]) -> Tensors:
        return [tensor.unflatten(dim, sizes).transpose(dim, dim + 1).flatten(dim, dim + 1)]

    return Layout(lambda theirs: swap(theirs[0], (-1, 2)), lambda ours: swap(ours[0], (2, -1)))


def chained(*layouts: Layout) -> Layout:
    """Apply layouts one after another, from theirs to ours."""

    def to_ours(tensors: Tensors) -> Tensors:
        for layout in layouts:
            tensors = layout.to_ours(tensors)
        return tensors

    def to_theirs(tensors: Tensors) -> Tensors:
        for layout in reversed(layouts):
            tensors = layout.to_theirs(tensors)
        return tensors

    return Layout(to_ours, to_theirs)


def reshaped(ours: Sequence[int], theirs: Sequence[int]) -> Layout:
    """Lay out one tensor's numbers in the same order, under another shape."""
    return Layout(
        lambda tensors: [tensors[0].reshape(tuple(ours))],
        lambda tensors: [tensors[0].reshape(tuple(theirs))],
    )


def grouped(rows_per_group: Sequence[int], num_groups: int) -> Layout:
    """Lay out theirs as projections one by one, ours as one, group of heads by group of heads.

    So `linear_qkv` lies: per key/value head its queries, its key, its value.

    Args:
        rows_per_group: rows of each of their tensors that belong to one group.
    """
    rows = list(rows_per_group)

    def join(theirs: Tensors) -> Tensors:
        return [torch.cat([t.unflatten(0, (num_groups, -1)) for t in theirs], 1).flatten(0, 1)]

    def part(ours: Tensors) -> Tensors:
        pieces = ours[0].unflatten(0, (num_groups, -1)).split(rows, 1)
        return [piece.flatten(0, 1) for piece in pieces]

    return Layout(join, part)


def grouped_with_gates(heads_per_group: int, head_dim: int, num_groups: int) -> Layout:
    """Lay out as `grouped`, where each query head is followed by its output gate in their `q_proj`
    (Qwen3-Next); ours has a group's queries, its gates, its key, its value."""
    queries = heads_per_group * head_dim

    def join(theirs: Tensors) -> Tensors:
        q, k, v = (t.unflatten(0, (num_groups, -1)) for t in theirs)
        q, gate = q.unflatten(1, (heads_per_group, 2, head_dim)).unbind(2)
        return [torch.cat([q.flatten(1, 2), gate.flatten(1, 2), k, v], 1).flatten(0, 1)]

    def part(ours: Tensors) -> Tensors:
        groups = ours[0].unflatten(0, (num_groups, -1))
        q, gate, k, v = groups.split([queries, queries, head_dim, head_dim], 1)
        heads = [t.unflatten(1, (heads_per_group, head_dim)) for t in (q, gate)]
        return [torch.stack(heads, 2).flatten(0, 3), k.flatten(0, 1), v.flatten(0, 1)]

    return Layout(join, part)


def ungrouped(rows_per_group: Sequence[Sequence[int]], num_groups: int) -> Layout:
    """Lay out theirs as projections group by group of heads, ours as one, part by part.

    Args:
        rows_per_group: for each of their tensors, the rows of a group that belong to each part.
    """

    def join(theirs: Tensors) -> Tensors:
        pairs = zip(theirs, rows_per_group, strict=True)
        parts = [p for t, rows in pairs for p in t.unflatten(0, (num_groups, -1)).split(rows, 1)]
        return [torch.cat([part.flatten(0, 1) for part in parts])]

    def part(ours: Tensors) -> Tensors:
        sizes = [num_groups * size for rows in rows_per_group for size in rows]
        parts = iter(p.unflatten(0, (num_groups, -1)) for p in ours[0].split(sizes))
        return [torch.cat([next(parts) for _ in rows], 1).flatten(0, 1) for rows in rows_per_group]

    return Layout(join, part)
