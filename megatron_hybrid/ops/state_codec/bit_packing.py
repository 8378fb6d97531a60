"""Integers of few bits in 64-bit words: fixed width, and Rice codes of a width for each block.

Blocks of 64 integers, so that one bit of each of them, a bit plane, is one word. Everything is
vectorised over the blocks, and no shape depends on values, so that nothing waits for a device.
Shape letters: B blocks, W words.
"""

import torch
from torch import Tensor

BLOCK = 64
"""Integers of a block."""
MAX_REMAINDER_BITS = 15
"""Most bit planes of a Rice-coded block: its parameter fits into 4 bits."""
_MAX_PLANES = 16

# (shift, mask) of the three exchanges that transpose an 8 x 8 matrix of bits (Warren, Hacker's
# Delight, section 7-3). The masks also clear what an arithmetic shift to the right brings in.
_EXCHANGES = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))


def to_planes(values_B64: Tensor) -> Tensor:
    """Return bit planes of integers in [0, 2^16): word j of a block holds bit j of each of these.

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
    """Invert `to_planes`: int32 `[B, 64]`."""
    octets_B2x8x8 = _transposed(planes_B16.contiguous().view(torch.uint8).view(-1, 2, 8, 8))
    octets_B2x8 = _transpose_bits(octets_B2x8x8.view(torch.int64).view(-1, 2, 8))
    bytes_B64x2 = _transposed(octets_B2x8.view(torch.uint8).view(-1, 2, BLOCK))
    return bytes_B64x2.view(torch.int16).view(-1, BLOCK).int() & 0xFFFF


def _transposed(matrices: Tensor) -> Tensor:
    # Not `contiguous`, which leaves the strides of no matrices at all as they are.
    return matrices.mT.clone(memory_format=torch.contiguous_format)


def _transpose_bits(octets: Tensor) -> Tensor:
    """Swap bit j of byte i with bit i of byte j in each int64, as 8 bytes of 8 bits."""
    for shift, mask in _EXCHANGES:
        changed = (octets >> shift).bitwise_xor_(octets).bitwise_and_(mask)
        octets = (octets ^ changed).bitwise_xor_(changed.bitwise_left_shift_(shift))
    return octets


def rice_parameters(values_B64: Tensor) -> Tensor:
    """Choose the Rice parameter of each block, int32 `[B]`: the binary exponent of its mean + 1/2.

    One more saves about (mean + 1/2) / 2^(parameter + 1) quotient bits and costs one. Half-normal
    values take 0.1 to 0.2 bits more than their entropy.
    """
    sums_B = values_B64.sum(-1)
    exponents_B = torch.frexp(sums_B.double() / BLOCK + 0.5).exponent - 1
    return exponents_B.clamp_(0, MAX_REMAINDER_BITS)


def rice_bits(values_B64: Tensor, parameters_B: Tensor) -> Tensor:
    """Count the bits that the codes of each block take, int64 `[B]`."""
    quotients = values_B64 >> parameters_B.unsqueeze(-1)
    return quotients.sum(-1) + BLOCK * (parameters_B + 1)


def rice_pack(
    words_W: Tensor, values_B64: Tensor, parameters_B: Tensor, planes_B: Tensor, streams_B: Tensor
) -> None:
    """Write Rice codes (Rice and Plaunt 1971) of non-negative integers.

    An integer v of a block with parameter k is v mod 2^k in k bits, and v div 2^k as so many zeros
    and a one. The former come as k bit planes of each block, the latter as a stream of bits.

    Args:
        words_W: int64 `[W]`, zeros where the codes go; the last word is lost.
        values_B64: int32 `[B, 64]`, not negative.
        parameters_B: int32 `[B]`, 0 to 15.
        planes_B: int64 `[B]`, the word of each block's first plane.
        streams_B: int64 `[B]`, the bit at which each block's stream begins, counted from the lowest
            one of the first word.
    """
    parameters_B1 = parameters_B.unsqueeze(-1)
    numbers_16 = torch.arange(_MAX_PLANES, device=words_W.device)
    planes_B16 = to_planes(values_B64 & ((1 << parameters_B1) - 1))
    places_B16 = (planes_B.unsqueeze(-1) + numbers_16).masked_fill_(
        numbers_16 >= parameters_B1, len(words_W) - 1
    )
    words_W.scatter_(0, places_B16.flatten(), planes_B16.flatten())
    ones_B64 = ((values_B64 >> parameters_B1) + 1).cumsum(-1, dtype=torch.int64)
    ones = ones_B64.add_(streams_B.unsqueeze(-1)).sub_(1).flatten()
    # Each bit is set once, so a sum sets them all.
    words_W.scatter_add_(0, ones >> 6, torch.ones_like(ones).bitwise_left_shift_(ones & 63))


def rice_unpack(
    words_W: Tensor, parameters_B: Tensor, planes_B: Tensor, streams_B: Tensor, ones_B64: Tensor
) -> Tensor:
    """Invert `rice_pack`: int32 `[B, 64]`.

    Args:
        words_W, parameters_B, planes_B: see there.
        streams_B, ones_B64: int64; the bit at which each block's stream begins, and the bits of its
            ones, both counted from anywhere.
    """
    parameters_B1 = parameters_B.unsqueeze(-1)
    numbers_16 = torch.arange(_MAX_PLANES, device=words_W.device)
    places_B16 = (planes_B.unsqueeze(-1) + numbers_16).clamp_(max=len(words_W) - 1)
    planes_B16 = words_W[places_B16].masked_fill_(numbers_16 >= parameters_B1, 0)
    quotients_B64 = ones_B64.diff(dim=-1, prepend=streams_B.unsqueeze(-1) - 1).sub_(1).int()
    return (quotients_B64 << parameters_B1) | from_planes(planes_B16)


def positions_of_ones(words_W: Tensor, count: int) -> Tensor:
    """Return the numbers of the first `count` bits that are 1, int64; -1 after the last one."""
    octets = words_W.contiguous().view(torch.uint8).unsqueeze(-1)
    bits = (octets >> torch.arange(8, dtype=torch.uint8, device=words_W.device)) & 1
    return torch.nonzero_static(bits.flatten(), size=count).squeeze(-1)
