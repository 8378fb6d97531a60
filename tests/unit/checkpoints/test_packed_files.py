"""Words of packed weights, of any number of rows and groups, there and back."""

from __future__ import annotations

import pytest
import torch
from packed_folders import integers, turned
from safetensors.torch import save_file

from megatron_hybrid.checkpoints.packed_files import PackedFiles
from megatron_hybrid.checkpoints.tensor_files import TensorFiles

NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 4, 7, 8, 9, 16])
def test_zero_points_of_few_outputs(tmp_path, rows, groups, bits):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, 32 * groups, generator=generator, dtype=torch.float64)
    tensors, _ = integers(weight, bits, 32, symmetric=False)
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": {"group_size": 32}}},
    }
    assert_words_come_back(tmp_path, {f"{NAME}.{k}": v for k, v in tensors.items()}, config)


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq_v2"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rows", [8, 16])
def test_zero_points_of_words_that_borrow(tmp_path, rows, groups, kind):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, 32 * groups, generator=generator, dtype=torch.float64)
    tensors, _ = turned(weight, kind)
    config = {"quant_method": kind.partition("_")[0], "bits": 4, "group_size": 32}
    if kind != "awq":
        config["checkpoint_format"] = kind
    found = assert_words_come_back(tmp_path, {f"{NAME}.{k}": v for k, v in tensors.items()}, config)
    assert found.min() == -8 and found.max() < 8  # the row of positive numbers has 0, less 8


def assert_words_come_back(folder, tensors: dict[str, torch.Tensor], config: dict) -> torch.Tensor:
    """Each part by row, and stored again; returns the zero points."""
    save_file(tensors, folder / "model.safetensors")
    with TensorFiles.open(folder) as files:
        stored = PackedFiles(files, config).stored[f"{NAME}.weight"]
        for part, each in stored.parts.items():
            value = stored.by_row(part, files.read(each.name), 32)
            assert tuple(value.shape) == stored.shape_by_row(part, 32)
            assert torch.equal(stored.as_stored(part, value), tensors[each.name])
        zero = stored.by_row("zero", files.read(stored.parts["zero"].name), 32)
        return zero.clone()
