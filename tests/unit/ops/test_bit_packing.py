"""Bit planes and Rice codes against their definitions, one bit at a time."""

import pytest
import torch

from megatron_hybrid.ops.state_codec.bit_packing import (
    BLOCK,
    from_planes,
    positions_of_ones,
    rice_bits,
    rice_pack,
    rice_unpack,
    to_planes,
)


def integers(num_blocks: int, high: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, (num_blocks, BLOCK), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("num_blocks", [0, 1, 5])
def test_word_j_holds_bit_j_of_each_integer(num_blocks):
    values = integers(num_blocks, 1 << 16)
    planes = to_planes(values)
    assert (planes.shape, planes.dtype) == ((num_blocks, 16), torch.int64)
    for block, words in zip(values.tolist(), planes.tolist()):
        for j, word in enumerate(words):
            assert [(word >> i) & 1 for i in range(64)] == [(value >> j) & 1 for value in block]
    assert torch.equal(from_planes(planes), values)


def places(values: torch.Tensor, parameters: torch.Tensor, first: int) -> tuple[torch.Tensor, ...]:
    """The words of planes and the bits of streams of blocks, all planes first, from a word on."""
    streams = rice_bits(values, parameters) - BLOCK * parameters
    first_bit = BLOCK * (first + int(parameters.sum()))
    return (
        first + parameters.cumsum(0) - parameters,
        first_bit + streams.cumsum(0) - streams,
    )


def packed(values: torch.Tensor, parameters: torch.Tensor, first: int, behind: int) -> torch.Tensor:
    """Words of Rice codes, zeros before and behind them."""
    num_words = -(-int(rice_bits(values, parameters).sum()) // BLOCK)
    words = torch.zeros(first + num_words + behind + 1, dtype=torch.int64)
    rice_pack(words, values, parameters, *places(values, parameters, first))
    return words[:-1]


def unpacked(words: torch.Tensor, parameters: torch.Tensor, first: int) -> torch.Tensor:
    stream = first + int(parameters.sum())
    ones = positions_of_ones(words[stream:], BLOCK * len(parameters)).view(-1, BLOCK)
    streams = torch.cat([torch.zeros(1, dtype=torch.int64), ones[:-1, -1] + 1])
    planes = first + parameters.cumsum(0) - parameters
    return rice_unpack(words, parameters, planes, streams, ones)


@pytest.mark.parametrize("parameters", [(0,), (3,), (0, 15, 4), (7, 0, 0, 2)])
def test_rice_codes_are_those_of_the_definition(parameters):
    values = integers(len(parameters), 40)
    values[0, :3] = torch.tensor([0, 1, 70])
    expected = []
    for block, k in zip(values.tolist(), parameters):
        for j in range(k):
            expected += [(value >> j) & 1 for value in block]
    for block, k in zip(values.tolist(), parameters):
        for value in block:
            expected += [0] * (value >> k) + [1]
    parameters = torch.tensor(parameters, dtype=torch.int32)
    assert rice_bits(values, parameters).sum() == len(expected)
    words = packed(values, parameters, first=3, behind=2)
    bits = [(word >> i) & 1 for word in words.tolist() for i in range(64)]  # the lowest first
    assert bits[192 : 192 + len(expected)] == expected
    assert not any(bits[:192]) and not any(bits[192 + len(expected) :])
    assert torch.equal(unpacked(words, parameters, first=3), values)
