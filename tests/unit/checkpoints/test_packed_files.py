"""Words of packed weights, of any number of rows and groups, there and back; others are refused."""

import pytest
import torch
from packed_folders import FORMATS, integers
from safetensors.torch import save_file

from megatron_hybrid.checkpoints.packed_files import PackedFiles
from megatron_hybrid.checkpoints.tensor_files import CheckpointError, TensorFiles

CODES = ("weight", "weight_packed", "qweight")
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
    tensors = {f"{NAME}.{part}": tensor for part, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    stored = PackedFiles(files, config).stored[f"{NAME}.weight"]
    for part, each in stored.parts.items():
        value = stored.by_row(part, files.read(each.name), 32)
        assert tuple(value.shape) == stored.shape_by_row(part, 32)
        assert torch.equal(stored.as_stored(part, value), tensors[each.name])


def written(folder, kind: str, change) -> PackedFiles:
    """A folder with a weight of 32 x 64, by whose config it has all the parts that it has.

    change: its tensors -> those of the folder.
    """
    generator = torch.Generator().manual_seed(3)
    pack, config = FORMATS[kind]
    tensors = pack(torch.randn(32, 64, generator=generator, dtype=torch.float64))[0]
    if "weight_zero_point" in tensors:
        config = config | {"config_groups": {"g": {"weights": {"symmetric": False}}}}
        if tensors["weight_scale"].numel() > 1:
            config["config_groups"]["g"]["weights"]["group_size"] = 32
    elif "g_idx" in tensors:
        config = config | {"desc_act": True}
    folder.mkdir(exist_ok=True)
    tensors = {f"{NAME}.{k}": v.contiguous() for k, v in change(tensors).items()}
    save_file(tensors, folder / "model.safetensors")
    files = TensorFiles(folder)
    packed = PackedFiles(files, config)
    for stored in packed.stored.values():
        for part, each in stored.parts.items():
            group = 16 if stored.group % 16 == 0 else stored.group
            value = stored.by_row(part, files.read(each.name), group)
            assert tuple(value.shape) == stored.shape_by_row(part, group)
    return packed


@pytest.mark.parametrize("kind", FORMATS)
def test_parts_that_the_config_announces_are_required(tmp_path, kind):
    names = []
    written(tmp_path / "whole", kind, lambda tensors: names.extend(tensors) or tensors)
    for name in set(names) - {"input_scale", *CODES}:
        with pytest.raises(CheckpointError, match=rf"{NAME}\.{name}\b.* (not in|next to)"):
            written(tmp_path, kind, lambda t, name=name: {k: v for k, v in t.items() if k != name})


MALFORMED = {
    "a row too few": lambda t: t[:-1],
    "a column too few": lambda t: t[..., :-1],
    "one a row": lambda t: t.reshape(-1)[:1].expand(32),
    "a row too many": lambda t: torch.cat((t, t[-1:])),
    "more dimensions": lambda t: t.expand(2, 3, *t.shape),
    "one dimension": lambda t: t.flatten(),
    "none": lambda t: t.flatten()[0],
    "longer words": lambda t: t.long(),
}


@pytest.mark.parametrize("change", MALFORMED)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_malformed_part_is_refused_by_name_or_read_whole(tmp_path, kind, change):
    names = {}
    written(tmp_path / "whole", kind, lambda tensors: names.update(tensors) or tensors)
    for name in set(names) - {"input_scale"}:
        if names[name].dim() == 0 and change not in ("one a row", "more dimensions"):
            continue
        other = MALFORMED[change](names[name])
        # Other codes may be those of another weight, and scales may be one a row, or of all.
        is_possible = other.numel() == names[name].numel() or name in CODES
        is_possible |= name in ("weight_scale", "weight_scale_inv") and other.numel() in (1, 32)
        is_possible &= change != "longer words" or name not in (
            "weight_packed",
            "qweight",
            "qzeros",
        )
        try:
            written(tmp_path, kind, lambda t, name=name, other=other: t | {name: other})
        except CheckpointError as error:
            assert str(error).startswith(NAME)
        else:
            assert is_possible
