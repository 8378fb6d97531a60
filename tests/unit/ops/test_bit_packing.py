"""Bit planes and Rice codes against their definitions, one bit at a time."""

import pytest
import torch

from megatron_hybrid.ops.state_codec.bit_packing import (
    BLOCK,
    MAX_REMAINDER_BITS,
    from_planes,
    positions_of_ones,
    rice_bits,
    rice_pack,
    rice_parameters,
    rice_unpack,
    to_planes,
)


def integers(num_blocks: int, high: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, (num_blocks, BLOCK), generator=generator, dtype=torch.int32)


def bits_of_words(words: torch.Tensor) -> list[int]:
    """All bits of int64 words, the lowest of each first."""
    return [(word >> i) & 1 for word in words.tolist() for i in range(64)]


def half_normal(num_blocks: int, deviation: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_blocks, BLOCK, generator=generator) * deviation
    return values.abs().floor().int()


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
    bits = bits_of_words(words)
    assert bits[192 : 192 + len(expected)] == expected
    assert not any(bits[:192]) and not any(bits[192 + len(expected) :])
    assert torch.equal(unpacked(words, parameters, first=3), values)


@pytest.mark.parametrize("deviation", [0.0, 0.3, 1.0, 20.0, 1e3, 1e5, 2e6])
def test_codes_come_back_from_the_fewest_words(deviation):
    values = half_normal(20, deviation)
    values[3] = 0
    parameters = rice_parameters(values)
    words = packed(values, parameters, first=0, behind=0)
    assert torch.equal(unpacked(words, parameters, first=0), values)


def test_positions_of_ones_count_from_the_lowest_bit():
    words = torch.tensor([0b1010, 0, -(1 << 63)])
    assert positions_of_ones(words, 3).tolist() == [1, 3, 191]
    assert positions_of_ones(words, 2).tolist() == [1, 3]
    assert positions_of_ones(words, 5).tolist() == [1, 3, 191, -1, -1]


@pytest.mark.parametrize("deviation", [0.5, 1.0, 3.0, 30.0, 41.0, 50.0, 5e3])
def test_parameters_are_near_the_best_ones(deviation):
    """Within 0.05 bits of the best parameter of each block, of all that can be chosen."""
    values = half_normal(50, deviation)
    quotients = torch.stack([values >> k for k in range(MAX_REMAINDER_BITS + 1)])
    sizes = quotients.sum(-1) + BLOCK * torch.arange(1, MAX_REMAINDER_BITS + 2)[:, None]
    best = int(sizes.min(0).values.sum())
    parameters = rice_parameters(values)
    assert int(parameters.min()) >= 0 and int(parameters.max()) <= MAX_REMAINDER_BITS
    assert best <= rice_bits(values, parameters).sum() <= best + 0.05 * values.numel()
