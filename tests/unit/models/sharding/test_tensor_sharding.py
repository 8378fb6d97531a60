"""Cutting and joining of parameters. (A whole model: tests/functional/models.)"""

import math

import pytest
import torch
from torch import nn

from megatron_hybrid.models.sharding.tensor_sharding import (
    Cut,
    copy_marks,
    full_shape,
    mark_tensor_parallel,
    shard,
    unshard,
)


def marked(shape, *how, **more):
    parameter = nn.Parameter(torch.zeros(shape))
    mark_tensor_parallel(parameter, Cut(*how, **more))
    return parameter


NEIGHBOURS = marked((3,), 0, (8, 2), 4, copies=(1, 2))


@pytest.mark.parametrize(
    ("shape", "local", "expected"),
    [
        ((12, 1), marked((6, 1), 0, (4, 6, 2), 2), [[0, 1, 4, 5, 6, 10], [2, 3, 7, 8, 9, 11]]),
        ((2, 4), marked((2, 2), 1, (4,), 2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ((10,), NEIGHBOURS, [[0, 1, 8], [2, 3, 8], [4, 5, 9], [6, 7, 9]]),
        # Two groups of attention heads, of two queries, a key and a value, on four ranks.
        (
            (8,),
            marked((3,), 0, (2, 1, 1), 4, copies=(1, 2, 2), repeats=2),
            [[0, 2, 3], [1, 2, 3], [4, 6, 7], [5, 6, 7]],
        ),
    ],
    ids=["sections", "columns", "copies", "blocks"],
)
def test_each_rank_holds_its_part_of_each_section(shape, local, expected):
    full = torch.arange(float(math.prod(shape))).view(shape)
    pieces = [shard(full, local, rank) for rank in range(len(expected))]
    assert [piece.flatten().tolist() for piece in pieces] == expected
    assert torch.equal(unshard(pieces, local), full)
    assert full_shape(local) == shape


def test_copies_are_numbered():
    cut = NEIGHBOURS.cut
    assert [cut.copy_numbers(rank) for rank in range(4)] == [[0, 0], [0, 1], [0, 0], [0, 1]]
    assert cut.local_sections == (2, 1)


def test_copied_blocks_alone():
    cut = Cut(0, (2, 1, 1), 4, copies=(1, 2, 2), repeats=2)
    copied = cut.copied()
    assert copied.size == 4
    assert [copied.ranges(rank) for rank in range(4)] == [[(0, 1), (1, 2)]] * 2 + [
        [(2, 3), (3, 4)]
    ] * 2
    assert Cut(0, (2, 1), 2).copied() is None


@pytest.mark.parametrize("dim", [0, 1])
def test_padding_is_added_and_taken_away(dim):
    full = torch.arange(10.0).view(5, 2)
    full = full if dim == 0 else full.t().contiguous()
    shape = (3, 2) if dim == 0 else (2, 3)
    local = marked(shape, dim, (6,), 2, unpadded_size=5)
    pieces = [shard(full, local, rank) for rank in range(2)]
    assert all(piece.shape == shape for piece in pieces)
    assert full_shape(local) == tuple(full.shape)
    assert torch.equal(unshard(pieces, local), full)


def test_unmarked_parameters_are_whole_everywhere():
    parameter = nn.Parameter(torch.zeros(3))
    full = torch.arange(3.0)
    assert shard(full, parameter, 1) is full
    assert unshard([full], parameter) is full
    assert full_shape(parameter) == (3,)


def test_copied_marks_keep_those_of_core():
    stack = marked((5, 2, 2), 2, (4,), 2)
    one = nn.Parameter(torch.zeros(2, 2))
    one.partition_stride = 2
    copy_marks(stack, one, dropped_dims=1)
    assert one.cut == Cut(1, (4,), 2)
    assert (one.tensor_model_parallel, one.partition_dim, one.partition_stride) == (True, 1, 2)
