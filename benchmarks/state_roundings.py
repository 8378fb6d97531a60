"""Other ways to keep a state in a byte per element: each rounds states fp32 `[..., N, P]`.

Scales of rows, where there are any, are not counted: they favour these over the encoding "int8",
whose overheads all count.
"""

import math

import torch
from torch import Tensor


def amax_of_rows(x: Tensor, dim: int = -1) -> Tensor:
    """255 levels up to the largest of each row. SGLang's int8 states, for one of the two `dim`."""
    scale = x.abs().amax(dim, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round() * scale


def amax_of_columns(x: Tensor) -> Tensor:
    return amax_of_rows(x, -2)


def amax_of_blocks(x: Tensor) -> Tensor:
    """A scale for 16 elements in a row: 1.06 (8 bits each) to 1.25 bytes (fp32, as here)."""
    return amax_of_rows(x.unflatten(-1, (-1, 16))).flatten(-2)


def clipped(x: Tensor) -> Tensor:
    """Rows clipped where the squared error is least."""
    peak = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    best, least = x, torch.full_like(peak, torch.inf)
    for part in torch.linspace(0.5, 1.0, 11).tolist():
        scale = peak * part / 127
        rounded = (x / scale).round().clamp(-127, 127) * scale
        error = (rounded - x).square().sum(-1, keepdim=True)
        best = torch.where(error < least, rounded, best)
        least = torch.minimum(error, least)
    return best


def stochastic(x: Tensor) -> Tensor:
    """Up or down by chance, so that the mean is right."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    chance = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    return (x / scale + chance).floor() * scale


def e4m3(x: Tensor) -> Tensor:
    """8-bit floating point with 3 bits of mantissa, a scale for each row."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def mu_law(x: Tensor) -> Tensor:
    """255 levels of a logarithmic scale."""
    peak = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    level = (x.abs() / peak * 15).log1p() / math.log(16)
    return ((level * 127).round() / 127 * math.log(16)).expm1() / 15 * peak * x.sign()


def hadamard(x: Tensor) -> Tensor:
    """Rows turned by a Hadamard matrix first, which spreads what sticks out."""
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = matrix / math.sqrt(len(matrix))
    return amax_of_rows(x @ matrix) @ matrix


def low_rank(x: Tensor) -> Tensor:
    """The two leading singular parts exactly, the rest by `amax_of_rows`: 1.1 to 1.5 bytes."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    leading = (u[..., :2] * s[..., None, :2]) @ v[..., :2, :]
    return leading + amax_of_rows(x - leading)


ROUNDINGS = {
    "255 levels, a scale per row": amax_of_rows,
    "255 levels, a scale per column": amax_of_columns,
    "255 levels, a scale per 16 elements": amax_of_blocks,
    "clipped rows": clipped,
    "stochastic rounding": stochastic,
    "e4m3": e4m3,
    "mu-law": mu_law,
    "Hadamard": hadamard,
    "low rank + 255 levels": low_rank,
}
