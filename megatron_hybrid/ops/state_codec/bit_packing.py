"""Integers of few bits in 64-bit words: fixed width, and Rice codes of a width for each block.

Blocks of 64 integers, so that one bit of each of them, a bit plane, is one word. Everything is
vectorised over the blocks. Shape letters: B blocks, W words.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
"""Integers of a block."""
MAX_REMAINDER_BITS = 15
"""Most bit planes of a Rice-coded block: its parameter fits into 4 bits."""
_MAX_PLANES = 16

# Bit 8 i + j of a word times this constant lands in bit 56 + i where j = 0: eight bytes of 0 or 1
# become one byte, the top one (arithmetic modulo 2^64, without carries into it).
_GATHER_BITS = 0x0102040810204080
# (shift, mask) of the three exchanges that transpose an 8 x 8 matrix of bits (Warren, Hacker's
# Delight, section 7-3). The masks also clear what an arithmetic shift to the right brings in.
_EXCHANGES = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))


def to_planes(values_B64: Tensor) -> Tensor:
    """Bit planes of integers in [0, 2^16): word j of a block holds bit j of each of its integers.

    Args:
        values_B64: int16, int32 or int64 `[B, 64]`; its low 16 bits count.

    Returns:
        int64 `[B, 16]`.
    """
    # Little-endian bytes: first the low one of all 64 integers, then the high one.
    bytes_B2x64 = _transposed(values_B64.to(torch.int16).view(torch.uint8).view(-1, BLOCK, 2))
    octets_B2x8 = _transpose_bits(bytes_B2x64.view(torch.int64))
    planes_B2x8x8 = _transposed(octets_B2x8.view(torch.uint8).view(-1, 2, 8, 8))
    return planes_B2x8x8.view(torch.int64).view(-1, _MAX_PLANES)


def from_planes(planes_B16: Tensor) -> Tensor:
    """Inverse of `to_planes`: int32 `[B, 64]`."""
    octets_B2x8x8 = _transposed(planes_B16.contiguous().view(torch.uint8).view(-1, 2, 8, 8))
    octets_B2x8 = _transpose_bits(octets_B2x8x8.view(torch.int64).view(-1, 2, 8))
    bytes_B64x2 = _transposed(octets_B2x8.view(torch.uint8).view(-1, 2, BLOCK))
    return bytes_B64x2.view(torch.int16).view(-1, BLOCK).int() & 0xFFFF


def _transposed(matrices: Tensor) -> Tensor:
    # Not `contiguous`, which leaves the strides of no matrices at all as they are.
    return matrices.mT.clone(memory_format=torch.contiguous_format)


def _transpose_bits(octets: Tensor) -> Tensor:
    """Each int64 as 8 bytes of 8 bits: swap bit j of byte i with bit i of byte j."""
    for shift, mask in _EXCHANGES:
        changed = (octets >> shift).bitwise_xor_(octets).bitwise_and_(mask)
        octets = (octets ^ changed).bitwise_xor_(changed.bitwise_left_shift_(shift))
    return octets


def rice_parameters(values_B64: Tensor) -> Tensor:
    """The Rice parameter of each block, int32 `[B]`: the binary exponent of the mean and a half.

    One more saves about (mean + 1/2) / 2^(parameter + 1) quotient bits and costs one. Half-normal
    values take 0.1 to 0.2 bits more than their entropy.
    """
    sums_B = values_B64.sum(-1)
    exponents_B = torch.frexp(sums_B.double() / BLOCK + 0.5).exponent - 1
    return exponents_B.clamp_(0, MAX_REMAINDER_BITS)


def rice_bits(values_B64: Tensor, parameters_B: Tensor) -> Tensor:
    """Bits that `rice_pack` fills, int64 scalar."""
    quotients = values_B64 >> parameters_B.unsqueeze(-1)
    return quotients.sum() + BLOCK * (parameters_B.sum() + len(parameters_B))


def rice_pack(values_B64: Tensor, parameters_B: Tensor, num_words: int) -> Tensor:
    """Rice codes (Rice and Plaunt 1971) of non-negative integers.

    An integer v of a block with parameter k is v mod 2^k in k bits, and v div 2^k as so many zeros
    and a one. The former come as k bit planes of each block, the latter as one stream behind them.

    Args:
        values_B64: int32 `[B, 64]`, not negative.
        parameters_B: int32 `[B]`, 0 to 15.
        num_words: W; at least `rice_bits` / 64.

    Returns:
        int64 `[W]`, zeros behind the last one.

    Raises:
        ValueError: the codes do not fit into W words.
    """
    device = values_B64.device
    parameters_B1 = parameters_B.unsqueeze(-1)
    planes_B16 = to_planes(values_B64 & ((1 << parameters_B1) - 1))
    planes_W = planes_B16[torch.arange(_MAX_PLANES, device=device) < parameters_B1]

    lengths_B64 = (values_B64 >> parameters_B1).add_(1)
    ends = lengths_B64.flatten().cumsum(0, dtype=torch.int32).sub_(1)
    free_words = num_words - len(planes_W)
    if ends[-1] >= BLOCK * free_words:
        raise ValueError(
            f"{len(planes_W)} planes and {int(ends[-1]) + 1} bits do not fit into {num_words} "
            "words of 64 bits: give as many as rice_bits says"
        )
    stream = torch.zeros(BLOCK * free_words, dtype=torch.uint8, device=device)
    stream[ends] = 1
    octets = (stream.view(torch.int64) * _GATHER_BITS).bitwise_right_shift_(56)
    return torch.cat([planes_W, octets.to(torch.uint8).view(torch.int64)])


def rice_unpack(words_W: Tensor, parameters_B: Tensor) -> Tensor:
    """Inverse of `rice_pack`: int32 `[B, 64]`."""
    device = words_W.device
    parameters_B1 = parameters_B.unsqueeze(-1)
    present_B16 = torch.arange(_MAX_PLANES, device=device) < parameters_B1
    num_planes = int(parameters_B.sum())
    planes_B16 = torch.zeros(present_B16.shape, dtype=torch.int64, device=device)
    planes_B16[present_B16] = words_W[:num_planes]

    octets = words_W[num_planes:].contiguous().view(torch.uint8).unsqueeze(-1)
    # In reverse: `_GATHER_BITS` puts the first byte of eight into the lowest bit.
    stream = (octets >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    ends = stream.flatten().nonzero().squeeze(-1)
    quotients = ends.diff(prepend=ends.new_full((1,), -1)) - 1
    quotients_B64 = quotients.int().view(-1, BLOCK)
    return (quotients_B64 << parameters_B1) | from_planes(planes_B16)
