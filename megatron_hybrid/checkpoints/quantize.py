"""Quantization to nearest: the codes and scales of a weight in one of the formats that are read."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.checkpoints.packed_files import in_bytes
from megatron_hybrid.ops.packed import format_of

_LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0, "fp4": 6.0}
"""Magnitude of the largest code that both signs have."""
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Middles between the magnitudes of e2m1."""
_SMALLEST = torch.finfo(torch.float32).tiny


def quantized(
    weight: Tensor, dtypes: Mapping[str, torch.dtype], block: tuple[int, int]
) -> dict[str, Tensor]:
    """Return the parts of a weight as a folder would hold them, but not yet in its words
    (`PackedTensor.encode`): scales of blocks, codes of each number.

    Args:
        weight: `[.., out, in]`, floating point.
        dtypes: of the parts. Zero points are 0.
        block: rows and columns that share a scale; 0 means all of them.
    """
    weight = weight.float()
    rows, columns = (size or whole for size, whole in zip(block, weight.shape[-2:]))
    largest = _blocks(weight, rows, columns).abs().amax((-3, -1)).clamp(min=_SMALLEST)
    kind = format_of(dtypes["codes"], dtypes["scale"]).name
    scale, parts, divisor = largest / _LARGEST[kind], {}, 1.0
    if "outer" in dtypes:
        divisor = fp4_divisor(weight)
        parts["outer"] = divisor.reciprocal()
        scale = (scale * divisor).clamp(max=_LARGEST["fp8"])
        # Groups that would have a scale of 0 get this one, as in compressed-tensors.
        scale = torch.where(scale.to(dtypes["scale"]).float() == 0, 0.125, scale)
    if dtypes["scale"] == torch.float8_e8m0fnu:
        scale = scale.log2().ceil().exp2()
    parts["scale"] = scale.to(dtypes["scale"])
    effective = parts["scale"].float() / divisor
    over = effective.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    over = over[..., : weight.shape[-2], : weight.shape[-1]].clamp(min=_SMALLEST)
    parts["codes"] = _CODES[kind](weight / over)
    if "zero" in dtypes:
        parts["zero"] = torch.zeros_like(scale, dtype=dtypes["zero"])
    return parts


def fp4_divisor(weight: Tensor) -> Tensor:
    """Return what compressed-tensors calls the global scale of a weight in NVFP4, fp32: the scales
    of its groups are multiplied by it before they are rounded to e4m3. `[.., 1, 1]`."""
    largest = weight.float().abs().amax((-2, -1), keepdim=True)
    divisor = _LARGEST["fp8"] * _LARGEST["fp4"] / largest.clamp(min=_SMALLEST)
    return divisor.nan_to_num(posinf=1.0)


def _blocks(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Cut [.., out, in] -> [.., blocks, rows, blocks, columns], filled up with zeros."""
    padded = F.pad(weight, (0, -weight.shape[-1] % columns, 0, -weight.shape[-2] % rows))
    return padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _fp4(scaled: Tensor) -> Tensor:
    middles = torch.tensor(_BETWEEN, device=scaled.device)
    below = torch.bucketize(scaled.abs(), middles)  # a middle itself goes down, and up in the other
    above = torch.bucketize(scaled.abs(), middles, right=True)
    magnitude = torch.where(below % 2 == 0, below, above)  # to the even code
    return in_bytes((magnitude + 8 * (scaled < 0)).to(torch.uint8))


_CODES = {
    "fp8": lambda scaled: scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn),
    "int8": lambda scaled: scaled.round().clamp(-127, 127).to(torch.int8),
    "int4": lambda scaled: in_bytes((scaled.round().clamp(-8, 7) + 8).to(torch.uint8)),
    "fp4": _fp4,
}
"""Scaled numbers -> codes, by the name of a format."""
