"""Cutting and joining of parameters. (A whole model: tests/functional/models.)"""

import pytest
import torch
from torch import nn

from megatron_hybrid.models.sharding.tensor_sharding import (
    full_shape,
    mark_tensor_parallel,
    shard,
    unshard,
)


def marked(shape, **how):
    parameter = nn.Parameter(torch.zeros(shape))
    mark_tensor_parallel(parameter, **how)
    return parameter


def test_sections_are_cut_one_by_one():
    full = torch.arange(12.0)[:, None]
    local = marked((6, 1), dim=0, sections=(4, 6, 2))
    first, second = (shard(full, local, rank, 2) for rank in range(2))
    assert first.flatten().tolist() == [0, 1, 4, 5, 6, 10]
    assert second.flatten().tolist() == [2, 3, 7, 8, 9, 11]
    assert torch.equal(unshard([first, second], local), full)


def test_columns():
    full = torch.arange(8.0).view(2, 4)
    local = marked((2, 2), dim=1)
    pieces = [shard(full, local, rank, 2) for rank in range(2)]
    assert pieces[1].tolist() == [[2, 3], [6, 7]]
    assert torch.equal(unshard(pieces, local), full)


@pytest.mark.parametrize("dim", [0, 1])
def test_padding_is_added_and_taken_away(dim):
    full = torch.arange(10.0).view(5, 2)
    full = full if dim == 0 else full.t().contiguous()
    shape = (3, 2) if dim == 0 else (2, 3)
    local = marked(shape, dim=dim, unpadded_size=5)
    pieces = [shard(full, local, rank, 2) for rank in range(2)]
    assert all(piece.shape == shape for piece in pieces)
    assert full_shape(local, 2) == tuple(full.shape)
    assert torch.equal(unshard(pieces, local), full)


def test_unmarked_parameters_are_whole_everywhere():
    parameter = nn.Parameter(torch.zeros(3))
    full = torch.arange(3.0)
    assert shard(full, parameter, 1, 2) is full
    assert unshard([full], parameter) is full
    assert full_shape(parameter, 2) == (3,)
