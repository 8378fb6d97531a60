"""Formats of packed weights: what a code stands for.

The dtypes alone give the format, so a packed weight needs no field that could contradict them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """What the codes of a weight stand for."""

    name: str
    bits: int
    """Bits of a code: 8 or 4. A byte holds two codes of 4 bits, the first in its lower half."""
    values: Callable[[Tensor], Tensor]
    """Codes -> what they stand for before scaling, fp32, one number a code."""


def of_nibbles(codes: Tensor) -> Tensor:
    """Split [..., n] bytes -> [..., 2n] codes of 4 bits, the lower half first."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


# Exponents and fractions of e4m3 and e2m1 are moved to their places in a float16, where they stand
# for the same number but for a power of two, subnormals too.


def _e4m3(codes: Tensor) -> Tensor:
    if codes.device.type != "cpu":
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16) << 7  # the sign is in bits 15 and 14
    return bits.bitwise_and_(~(1 << 14)).view(torch.float16).float().mul_(2.0**8)


def _e2m1(codes: Tensor) -> Tensor:
    codes = of_nibbles(codes).to(torch.int16)
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return bits.view(torch.float16).float().mul_(2.0**14)


FP8 = Format("fp8", 8, _e4m3)
"""e4m3, without NaN: such codes are refused when weights are read. On a CPU torch's own conversion
takes ten times as long."""
INT8 = Format("int8", 8, lambda codes: codes.float())
INT4 = Format("int4", 4, lambda codes: of_nibbles(codes).float() - 8.0)
"""Codes are the numbers plus 8."""
FP4 = Format("fp4", 4, _e2m1)
"""e2m1 (OCP Microscaling Formats 1.0, table 5), of NVFP4, with groups of 16 and scales in e4m3, and
MXFP4, with groups of 32 and powers of two."""

_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_FORMATS = {
    (torch.float8_e4m3fn, torch.float8_e8m0fnu): FP8,
    (torch.uint8, torch.float8_e4m3fn): FP4,
    (torch.uint8, torch.float8_e8m0fnu): FP4,
    **{(torch.float8_e4m3fn, scale): FP8 for scale in _SCALES},
    **{(torch.int8, scale): INT8 for scale in _SCALES},
    **{(torch.uint8, scale): INT4 for scale in _SCALES},
}


def format_of(codes: torch.dtype, scale: torch.dtype) -> Format | None:
    """Find the format of a weight with codes and scales of these dtypes; None if there is none."""
    return _FORMATS.get((codes, scale))
