"""Safetensors files of a folder: read lazily, written in shards, and refused where they lie."""

import json
import os
import resource
import struct
import weakref
from itertools import chain, repeat
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from bars import check_bars
from safetensors.torch import load_file, save_file

from megatron_hybrid.checkpoints import tensor_files
from megatron_hybrid.checkpoints.tensor_files import (
    CheckpointError,
    TensorFiles,
    TensorPlan,
    check_numbers,
    write_tensors,
)
from megatron_hybrid.utils.files import replace_file

SINGLE = "model.safetensors"
INDEX, PICKLED = "model.safetensors.index.json", "pytorch_model.bin.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def some_tensors():
    """Every dtype that files hold, odd sizes, no elements, no dimensions."""
    generator = torch.Generator().manual_seed(0)
    dtypes = [*tensor_files.DTYPES.values()]
    tensors = {
        f"t{i}": torch.randint(0, 2, (3, i % 4 + 1), generator=generator).to(dtype)
        for i, dtype in enumerate(dtypes)
    }
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.zeros(0, 4)
    tensors["transposed"] = torch.randn(4, 6, generator=generator).T
    return tensors


def plan_of(tensors):
    return [TensorPlan(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]


def write(folder, tensors, **options):
    write_tensors(folder, plan_of(tensors), tensors.__getitem__, **options)


def read_all(folder):
    files = TensorFiles(folder)
    return {name: files.read(name).clone() for name in files.names()}


def equal(first, second):
    assert first.keys() == second.keys()
    return all(
        first[name].dtype == second[name].dtype
        and first[name].shape == second[name].shape
        and torch.equal(first[name].float(), second[name].float())
        for name in first
    )


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def sharded(folder):
    """Two shards and their index: a and b in the first, c in the second."""
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, folder / FIRST, {"format": "pt"})
    save_file({"c": torch.full((4,), 2.0)}, folder / SECOND, {"format": "pt"})
    (folder / INDEX).write_text(index_of(a=FIRST, b=FIRST, c=SECOND))
    return folder


def index_of(**weight_map):
    return json.dumps({"metadata": {}, "weight_map": weight_map})


# Reading -----------------------------------------------------------------------------------------


def test_the_single_file_counts_before_shards(tmp_path):
    sharded(tmp_path)
    save_file({"only": torch.zeros(1)}, tmp_path / SINGLE)
    assert list(read_all(tmp_path)) == ["only"]


def sparse_file(path, num_bytes):
    """A file of one tensor, of whose zeros the file system stores nothing."""
    header = {"t": {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + num_bytes)


def test_nothing_is_read_before_it_is_used(tmp_path):
    sparse_file(tmp_path / SINGLE, 4 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    files = TensorFiles(tmp_path)
    assert files.shape("t") == (1 << 30,)
    assert files.dtype("t") == torch.float32
    assert files.read("t")[500_000_000] == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB


def test_what_was_read_outlives_the_files_and_never_changes_them(tmp_path):
    save_file({"a": torch.ones(5)}, tmp_path / SINGLE)
    tensor = TensorFiles(tmp_path).read("a")
    assert torch.equal(tensor, torch.ones(5))
    tensor.zero_()
    assert torch.equal(load_file(tmp_path / SINGLE)["a"], torch.ones(5))


@pytest.mark.parametrize("method", ["shape", "dtype", "read"])
def test_a_tensor_that_is_not_there(tmp_path, method):
    files = TensorFiles(sharded(tmp_path))
    with pytest.raises(CheckpointError, match=r"holds no tensor lm_head\.weight") as error:
        getattr(files, method)("lm_head.weight")
    assert str(tmp_path) in str(error.value)


def test_a_dtype_that_is_not_read(tmp_path):
    save_file({"a": torch.zeros(2), "odd": torch.zeros(2).cfloat()}, tmp_path / SINGLE)
    files = TensorFiles(tmp_path)
    assert files.shape("odd") == (2,)
    assert torch.equal(files.read("a"), torch.zeros(2))
    for method in (files.dtype, files.read):
        with pytest.raises(CheckpointError, match=r"odd in .*model\.safetensors has the dtype"):
            method("odd")


def test_a_folder_without_weights(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError) as error:
            TensorFiles(folder)
        assert f"{folder / SINGLE} does not exist, nor does {INDEX}" in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: sparse_file(folder / SINGLE, 10 << 40),
            "cannot be mapped into memory",
        ),
        (
            lambda folder: (folder / "pytorch_model.bin").touch(),
            "pytorch_model.bin, but pickled",
        ),
        (lambda folder: (folder / PICKLED).touch(), f"There is {PICKLED}, but pickled weights are"),
        (lambda folder: (folder / "consolidated.safetensors").touch(), "is consolidated.safetenso"),
        (lambda folder: (sharded(folder) / INDEX).unlink(), "are shards, but without their index"),
        (
            lambda folder: save_file({n: torch.ones(3) for n in "bc"}, sharded(folder) / SECOND),
            f"{SECOND} holds b, .* puts into {FIRST}",
        ),
    ],
)
def test_weights_that_cannot_be_read(tmp_path, make, message):
    make(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        TensorFiles(tmp_path)


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: cut(path, 0),
        lambda path: cut(path, 5),
        lambda path: cut(path, 30),
        lambda path: cut(path, -1),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)),
        lambda path: path.write_bytes(struct.pack("<Q", 4) + b"{{{{"),
        lambda path: path.write_bytes(struct.pack("<Q", 2) + b"\xff\xff"),
        lambda path: path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}"),
    ],
)
@pytest.mark.parametrize("name", [SINGLE, SECOND])
def test_broken_files(tmp_path, spoil, name):
    sharded(tmp_path)
    if name == SINGLE:
        save_file({"a": torch.zeros(2)}, tmp_path / SINGLE)
    spoil(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*\. It is truncated or") as e:
        TensorFiles(tmp_path)
    assert str(tmp_path / name) in str(e.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 5000, "cannot be read as JSON"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": ["a"]}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "puts a into 1, which is not the name of a file"),
        (index_of(a=FIRST, b=FIRST, c="gone.safetensors"), "gone.safetensors does not exist, but"),
        (index_of(a=FIRST, b=FIRST, c=SECOND, d=SECOND), f"puts d into {SECOND}, which does"),
        (index_of(a=FIRST, c=SECOND), f"{FIRST} holds b, which"),
    ],
)
def test_indexes_that_are_broken_or_contradict_their_shards(tmp_path, text, message):
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError) as error:
        TensorFiles(tmp_path)
    assert message in str(error.value)
    assert str(tmp_path / INDEX) in str(error.value)


@pytest.mark.parametrize(
    "outside", ["../x.safetensors", "/etc/passwd", "sub/x", "..", ".", "", "a\\b", "a\0b"]
)
def test_an_index_reaches_no_other_folder(tmp_path, outside):
    folder = tmp_path / "inner"
    folder.mkdir()
    save_file({"c": torch.zeros(4)}, tmp_path / "x.safetensors")
    (sharded(folder) / INDEX).write_text(index_of(a=FIRST, b=FIRST, c=outside))
    with pytest.raises(CheckpointError, match=r"puts c into .* not the name of a file in its"):
        TensorFiles(folder)


# Writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_bytes", [1, 20, 150, 1 << 30])
def test_round_trip(tmp_path, max_shard_bytes):
    tensors = some_tensors()
    folder = tmp_path / "new" / "folder"
    write(folder, tensors, max_shard_bytes=max_shard_bytes)
    assert equal(read_all(folder), tensors)
    files = [name for name in names_in(folder) if name.endswith(".safetensors")]
    if max_shard_bytes == 1 << 30:
        assert names_in(folder) == [SINGLE]
    else:
        count = len(files)
        assert files == [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        index = json.loads((folder / INDEX).read_text())
        assert list(index["weight_map"]) == list(tensors)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    # safetensors' own reader agrees.
    others = {}
    for name in files:
        others |= load_file(folder / name)
        sizes = [tensor.nbytes for tensor in load_file(folder / name).values()]
        assert sizes and (sum(sizes) <= max_shard_bytes or len(sizes) == 1)
    assert equal(others, tensors)


def test_tensors_start_at_multiples_of_their_element_size(tmp_path):
    write(tmp_path, some_tensors())
    files = TensorFiles(tmp_path)
    for name in files.names():
        assert files.read(name).data_ptr() % files.dtype(name).itemsize == 0


def test_one_tensor_at_a_time_and_in_order(tmp_path):
    tensors, made, alive = some_tensors(), [], []

    def make(name):
        assert not any(reference() is not None for reference in alive)
        made.append(name)
        tensor = tensors[name].clone()
        alive.append(weakref.ref(tensor))
        return tensor

    write_tensors(tmp_path, plan_of(tensors), make, max_shard_bytes=100)
    assert made == list(tensors)
    assert equal(read_all(tmp_path), tensors)


@pytest.mark.parametrize("before", [20, 1 << 30])
@pytest.mark.parametrize("after", [10, 20, 1 << 30])
def test_a_new_save_takes_the_place_of_the_old_one(tmp_path, before, after):
    old = {name: torch.randn(4) for name in "abcdefg"}
    new = {name: torch.randn(3) for name in "abcde"}
    write(tmp_path, old, max_shard_bytes=before)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter.safetensors").touch()
    write(tmp_path, new, max_shard_bytes=after)
    assert equal(read_all(tmp_path), new)
    fresh = tmp_path / "fresh"
    write(fresh, new, max_shard_bytes=after)
    expected = sorted([*names_in(fresh), "config.json", "adapter.safetensors", "fresh"])
    assert names_in(tmp_path) == expected


@pytest.mark.parametrize(
    ("before", "after"), [(16, 16), (16, 32), (1 << 30, 16), (16, 1 << 30), (1 << 30, 1 << 30)]
)
def test_a_crash_at_any_moment_mixes_no_two_saves(tmp_path, monkeypatch, before, after):
    """Only over shards of the same names may the old ones be lost, and then it shows."""
    old = {name: torch.zeros(4) for name in "abcd"}
    new = {name: torch.ones(4) for name in "abcd"}
    outcomes, steps = [], 0
    while "new" not in outcomes[-1:]:
        folder = tmp_path / str(steps)
        write(folder, old, max_shard_bytes=before)
        crash = chain(repeat(DEFAULT, steps), repeat(KeyboardInterrupt))
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", Mock(wraps=os.replace, side_effect=crash))
            try:
                write(folder, new, max_shard_bytes=after)
                finished = True
            except KeyboardInterrupt:
                finished = False
        try:
            found = read_all(folder)
            assert equal(found, old) or equal(found, new)
            outcomes.append("new" if equal(found, new) else "old")
        except CheckpointError as error:
            assert "without their index" in str(error)
            outcomes.append("refused")
        steps += 1
        if finished:
            break
    assert outcomes[-1] == "new"
    assert ("refused" in outcomes) == (before == after == 16)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([TensorPlan("a", (2,), torch.float32)], r"a was planned as .* shape \[2\], but is .* \[1"),
        ([TensorPlan("a", (1,), torch.float16)], "a was planned as torch.float16 .* torch.float32"),
    ],
)
def test_plans_that_do_not_hold(tmp_path, plan, message):
    with pytest.raises(ValueError, match=message):
        write_tensors(tmp_path, plan, lambda name: torch.zeros(1))
    assert names_in(tmp_path) == []


def test_files_have_the_mode_that_the_umask_gives(tmp_path):
    write(tmp_path, {"a": torch.zeros(4), "b": torch.zeros(4)}, max_shard_bytes=16)
    replace_file(tmp_path / "x", lambda path: save_file({"a": torch.zeros(1)}, path))
    (tmp_path / "plain").touch()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


# Progress ----------------------------------------------------------------------------------------


def test_writing_counts_every_byte(tmp_path, monkeypatch):
    advanced = check_bars(monkeypatch, tensor_files)
    monkeypatch.setattr(tensor_files, "_WRITE_BYTES", 16)
    tensors = some_tensors()
    write(tmp_path, tensors)
    assert max(advanced) == 16
    assert equal(read_all(tmp_path), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nan_is_refused_and_an_infinity_is_told_of(dtype, caplog):
    numbers = torch.tensor([1.0, -2.0, 3.0]).to(dtype)
    check_numbers("weight", numbers, "folder")
    check_numbers("empty", numbers[:0], "folder")
    assert not caplog.records
    for sign in (1, -1):
        numbers[1] = sign * torch.inf
        check_numbers("weight", numbers, "folder")
    assert [record.message for record in caplog.records] == [
        "weight has infinite numbers in folder"
    ] * 2
    numbers[2] = torch.nan
    with pytest.raises(CheckpointError, match="weight has numbers that are NaN in folder"):
        check_numbers("weight", numbers, "folder")


@pytest.mark.parametrize(
    ("number", "dtype", "into", "words"),
    [
        (70000.0, torch.bfloat16, torch.float16, "70144 in folder, .*float16.* ends at 65504"),
        (-65520.0, torch.float32, torch.float16, "-65520 in"),
        (1e300, torch.float64, torch.float32, r"1e\+300 in folder, but torch.float32"),
        (-1e300, torch.float64, torch.bfloat16, r"-1e\+300 in folder, but torch.bfloat16"),
        (65519.0, torch.float32, torch.float16, None),
        (1e38, torch.float64, torch.bfloat16, None),
    ],
)
def test_a_number_that_becomes_infinite_is_refused(number, dtype, into, words):
    numbers = torch.tensor([1.0, number, -1.0], dtype=dtype)
    check_numbers("weight", numbers, "folder")
    if words is None:
        check_numbers("weight", numbers, "folder", into)
    else:
        with pytest.raises(CheckpointError, match=f"weight has the number {words}"):
            check_numbers("weight", numbers, "folder", into)


@pytest.mark.parametrize(
    ("dtype", "code"),
    [(torch.float8_e4m3fn, 0x7F), (torch.float8_e4m3fn, 0xFF), (torch.float8_e8m0fnu, 0xFF)],
)
def test_codes_of_8_bits_that_are_nan_are_refused(dtype, code):
    codes = torch.tensor([0, 126, 254], dtype=torch.uint8)
    check_numbers("codes", codes.view(dtype), "folder")
    codes[1] = code
    with pytest.raises(CheckpointError, match="codes has numbers that are NaN"):
        check_numbers("codes", codes.view(dtype), "folder")
