"""Rotary position embedding: halves rotated against each other, tables in fp32.

RoFormer (arXiv 2104.09864) in the layout of GPT-NeoX, LLaMA and megatron-core's default: dimension
i is paired with i + d/2, and the pair at position t turns by t * base^(-2i/d).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_SMALLEST_TABLE = 1024


class RotaryEmbedding:
    """RoPE for the leading `dim` dimensions of each head.

    Args:
        dim: rotated dimensions, even.
        base: base of the frequencies.
    """

    def __init__(self, dim: int, base: float):
        self.dim = dim
        self.base = base

    def cos_sin(
        self, positions_T: Tensor, num_positions: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles at `positions_T`, each [T, 1, dim / 2] in `dtype`.

        Args:
            positions_T: absolute positions, int64.
            num_positions: a bound that all of them lie below, known without reading the tensor.
        """
        # Tables grow in powers of two, so that a growing sequence makes few of them.
        size = max(_SMALLEST_TABLE, 1 << (num_positions - 1).bit_length())
        cos, sin = _tables(self.dim, self.base, size, positions_T.device, dtype)
        return cos[positions_T], sin[positions_T]

    def rotate(self, x_THD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """`x_THD` with its leading `dim` dimensions rotated; the rest passes through."""
        cos, sin = cos_sin
        half = self.dim // 2
        first, second = x_THD[..., :half], x_THD[..., half : self.dim]
        rotated = [first * cos - second * sin, second * cos + first * sin]
        if self.dim < x_THD.shape[-1]:
            rotated.append(x_THD[..., self.dim :])
        return torch.cat(rotated, -1)


@lru_cache(maxsize=16)
def _tables(
    dim: int, base: float, size: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin at positions [0, size), each [size, 1, dim / 2]; shared by all layers."""
    # A table made in inference mode could not be used in a later training step.
    with torch.inference_mode(False), torch.no_grad():
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        frequencies = 1.0 / base**exponents
        positions = torch.arange(size, dtype=torch.float32, device=device)
        angles = torch.outer(positions, frequencies).unsqueeze(1)
        return angles.cos().to(dtype), angles.sin().to(dtype)
