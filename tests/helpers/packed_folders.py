"""Folders with packed weights, written from the published definitions of their formats, and the
weights that they stand for.

Each function takes a weight [out, in] and returns the tensors to store, by what follows the name of
the layer, and the numbers that they stand for in float64.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
Stored = tuple[dict[str, Tensor], Tensor]


def _over(scale: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """A scale for each number of a weight."""
    rows, columns = block[0] or shape[0], block[1] or shape[1]
    whole = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return whole[: shape[0], : shape[1]]


def _largest(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude of each block."""
    rows, columns = block[0] or weight.shape[0], block[1] or weight.shape[1]
    pad = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
    blocks = F.pad(weight, pad).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.abs().amax((1, 3)).clamp(min=1e-6)


def fp8(
    weight: Tensor,
    block: tuple[int, int],
    name: str = "weight_scale",
    shape: Callable[[Tensor], Tensor] = lambda scale: scale,
    dtype: torch.dtype = torch.float32,
) -> Stored:
    """Codes in e4m3, multiplied by one scale a block."""
    scale = _largest(weight, block) / 448
    if dtype == E8M0:
        scale = 2.0 ** scale.log2().ceil()
    scale = scale.to(dtype)
    over = _over(scale.double(), block, weight.shape)
    codes = (weight / over).clamp(-448, 448).to(E4M3)
    return {"weight": codes, name: shape(scale)}, codes.double() * over


def int8(weight: Tensor) -> Stored:
    """One scale a row, bf16."""
    scale = (_largest(weight, (1, 0)) / 127).bfloat16()
    codes = (weight / scale.double()).round().clamp(-127, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.double() * scale.double()


def words(codes: Tensor, bits: int) -> Tensor:
    """Integers, offset to be positive, in words of 32 bits: the first one lowest."""
    codes = F.pad(codes.long() + (1 << bits - 1), (0, -codes.shape[1] % (32 // bits)))
    places = torch.arange(32 // bits) * bits
    found = (codes.unflatten(1, (-1, 32 // bits)) << places).sum(-1)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def one_scale(weight: Tensor, bits: int) -> Stored:
    """compressed-tensors' pack-quantized with one scale and one zero point of all, which is not in
    words."""
    most = (1 << bits - 1) - 1
    scale = ((weight.max() - weight.min()) / (2 * most + 1)).bfloat16().reshape(1)
    zero = (-weight.min() / scale.double()).round() - most - 1
    codes = (weight / scale.double() + zero).round().clamp(-most - 1, most)
    stored = {"weight_packed": words(codes, bits), "weight_shape": torch.tensor(weight.shape)}
    stored |= {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    return stored, (codes - zero) * scale.double()


def integers(weight: Tensor, bits: int, group: int, symmetric: bool = True) -> Stored:
    """compressed-tensors' pack-quantized."""
    block = (1, group)
    groups = weight.unflatten(1, (-1, group or weight.shape[1]))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    most = (1 << bits - 1) - 1
    stored = {"weight_shape": torch.tensor(weight.shape)}
    if symmetric:
        scale = (_largest(weight, block) / most).bfloat16()
        zero = torch.zeros(scale.shape, dtype=torch.float64)
    else:
        scale = ((high - low) / (2 * most + 1)).clamp(min=1e-6).bfloat16()
        zero = (-low / scale.double()).round().clamp(0, 2 * most + 1) - most - 1
        stored["weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    over, zeros = (_over(each.double(), block, weight.shape) for each in (scale, zero))
    codes = (weight / over + zeros).round().clamp(-most - 1, most)
    stored |= {"weight_packed": words(codes, bits), "weight_scale": scale}
    return stored, (codes - zeros) * over


def turned(weight: Tensor, kind: str) -> Stored:
    """AWQ ("awq"), GPTQ ("gptq", "gptq_v2"): codes and zero points from 0 to 15, inputs as rows.
    The last group may have fewer, and a row has positive numbers alone: its zero points are 0."""
    weight = torch.cat((weight[:5], weight[5:6].abs(), weight[6:]))
    rows, group = weight.t(), 32
    groups = rows.split(group)
    low = torch.stack([each.amin(0) for each in groups]).clamp(max=0)
    high = torch.stack([each.amax(0) for each in groups]).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-6).bfloat16()
    zero = (-low / scale.double()).round().clamp(0, 15).long()
    over, zeros = (each.repeat_interleave(group, 0)[: len(rows)] for each in (scale.double(), zero))
    codes = (rows / over + zeros).round().clamp(0, 15).long()

    def packed(numbers: Tensor, order: list[int]) -> Tensor:
        found = sum(numbers[..., at::8] << 4 * place for place, at in enumerate(order))
        return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)

    order = [0, 2, 4, 6, 1, 3, 5, 7] if kind == "awq" else list(range(8))
    stored = {
        "qweight": packed(codes, order) if kind == "awq" else packed(codes.t(), order).t(),
        # GPTQModel subtracts from whole words: a zero point of 0 borrows from the next one.
        "qzeros": packed(zero, order) - (0x11111111 if kind == "gptq" else 0),
        "scales": scale,
    }
    if kind != "awq":
        stored["g_idx"] = (torch.arange(len(rows)) // group).to(torch.int32)
    stored = {name: tensor.contiguous() for name, tensor in stored.items()}
    return stored, ((codes - zeros) * over).t()


def _nibbles(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest numbers of e2m1: two codes a byte, and their values."""
    index = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    codes = (index + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, E2M1[index] * scaled.sign()


def nvfp4(weight: Tensor, compressed_tensors: bool = False) -> Stored:
    """e2m1 in groups of 16 with scales in e4m3, and one scale of all."""
    block = (1, 16)
    largest = _largest(weight, block)
    outer = (largest.max() / (448 * 6)).float()
    if compressed_tensors:
        outer = 1 / outer  # a divisor
    effective = 1 / outer if compressed_tensors else outer
    scale = (largest / 6 / effective).to(E4M3)
    # Both libraries round the product of both scales to fp32.
    over = _over((scale.float() * effective).double(), block, weight.shape)
    codes, values = _nibbles(weight / over.clamp(min=1e-12))
    if compressed_tensors:
        stored = {"weight_packed": codes, "weight_global_scale": outer.reshape(1)}
    else:
        stored = {"weight": codes, "weight_scale_2": outer, "input_scale": torch.tensor(0.25)}
    return {**stored, "weight_scale": scale}, values * over


PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
GROUPS = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}}
FORMATS: dict[str, tuple[Callable[[Tensor], Stored], dict]] = {
    "fp8-block": (
        lambda w: fp8(w, (128, 128), "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ),
    "fp8-block-ue8m0": (
        lambda w: fp8(w, (128, 128), "weight_scale_inv", dtype=E8M0),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    ),
    "fp8-small-blocks": (
        lambda w: fp8(w, (32, 16), "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"},
    ),
    "modelopt-fp8": (
        lambda w: _with_input_scale(fp8(w, (0, 0), shape=lambda scale: scale.reshape(()))),
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}},
    ),
    "modelopt-fp8-channel": (
        lambda w: fp8(w, (1, 0), shape=lambda scale: scale.reshape(-1)),
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    ),
    "modelopt-fp8-pb": (
        lambda w: fp8(w, (128, 128), shape=lambda scale: scale[:, None, :, None].contiguous()),
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
    ),
    "modelopt-nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "ct-fp8-channel": (
        lambda w: fp8(w, (1, 0), dtype=torch.bfloat16),
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
    ),
    "ct-int8": (int8, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "ct-w8a16": (lambda w: integers(w, 8, 0), PACKED),
    "ct-w4a16": (lambda w: integers(w, 4, 32), PACKED | GROUPS),
    "ct-w4a16-asymmetric": (lambda w: integers(w, 4, 32, symmetric=False), PACKED | GROUPS),
    **{
        f"ct-w{bits}a16-tensor": (lambda w, bits=bits: one_scale(w, bits), PACKED)
        for bits in (4, 8)
    },
    **{
        kind: (
            lambda w, kind=kind: turned(w, kind),
            {
                "quant_method": kind.partition("_")[0],
                "bits": 4,
                "group_size": 32,
                **({"checkpoint_format": kind} if kind != "awq" else {"version": "gemm"}),
            },
        )
        for kind in ("awq", "gptq", "gptq_v2")
    },
    "ct-nvfp4": (
        lambda w: nvfp4(w, compressed_tensors=True),
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ),
}
"""By name: the function, and the quantization_config."""


def _with_input_scale(stored: Stored) -> Stored:
    return {**stored[0], "input_scale": torch.tensor(0.5)}, stored[1]


def mxfp4(weight: Tensor) -> Stored:
    """[E, out, in] -> blocks [E, out, in / 32, 16] and exponents, as GPT-OSS has them."""
    groups = weight.unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1).clamp(min=1e-6).log2().floor() - 2).clamp(-127, 127)
    over = 2.0 ** exponent.unsqueeze(-1)
    blocks, values = _nibbles((groups / over).clamp(-6, 6))
    scales = (exponent + 127).to(torch.uint8)
    return {"blocks": blocks, "scales": scales}, (values * over).flatten(-2)


def write_folders(
    source: Path, folder: Path, formats: dict[str, str], config: dict | None = None
) -> tuple[Path, Path]:
    """Copy a folder in bf16 with packed weights, and with the weights that they stand for.

    Args:
        source: has one file of weights.
        formats: names of `FORMATS` by patterns of the names of layers.
        config: the quantization_config; None: of the first format.

    Returns:
        The packed folder and the other one.
    """
    packed, plain = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        found = [f for pattern, f in formats.items() if re.search(pattern, layer)]
        if not found or not name.endswith(".weight") or weight.dim() != 2:
            packed[name] = plain[name] = weight
            continue
        stored, values = FORMATS[found[0]][0](weight.double())
        packed |= {f"{layer}.{part}": tensor for part, tensor in stored.items()}
        plain[name] = values.to(weight.dtype).contiguous()
    config = config or FORMATS[next(iter(formats.values()))][1]
    values = json.loads((source / "config.json").read_text())
    return (
        _write(source, folder / "packed", packed, {**values, "quantization_config": config}),
        _write(source, folder / "plain", plain, values),
    )


def stored_bytes(folder: Path) -> dict[str, tuple]:
    """Dtype, shape and bytes of each tensor of a folder."""
    tensors = load_file(folder / "model.safetensors")
    return {
        name: (tensor.dtype, tensor.shape, tensor.flatten().view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


def _write(source: Path, folder: Path, tensors: dict[str, Tensor], config: dict) -> Path:
    shutil.copytree(source, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
