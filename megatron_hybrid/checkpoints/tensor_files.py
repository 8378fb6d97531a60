"""The safetensors files of a folder, read and written as one mapping of names to tensors.

A folder holds model.safetensors, or shards (model-00001-of-00003.safetensors, ...) with an index
(model.safetensors.index.json) of the shard of each tensor. If both are there, the single file
counts, as in Hugging Face's libraries.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_hybrid.utils.files import read_failure, read_json, temporary_path, write_json
from megatron_hybrid.utils.progress import progress

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONSOLIDATED_FILE = "consolidated.safetensors"
PICKLED_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_NAN_CODES = {torch.float8_e4m3fn: (127, 127), torch.float8_e8m0fnu: (255, 255)}
"""Bits that mean NaN in floats of 8 bits, and the value of NaN."""

_WRITE_BYTES = 64 << 20  # at a time, so that the progress bar moves within a large tensor


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or is not one of this model. Nothing has been loaded."""


class TensorFiles:
    """Tensors of a folder by name. Shapes and dtypes are read from the files' headers only.

    Raises:
        CheckpointError: no weights, an unreadable file, or files that contradict each other.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = folder = Path(folder)
        index, weight_map = folder / INDEX_FILE, None
        if os.path.lexists(folder / WEIGHTS_FILE):
            paths = [folder / WEIGHTS_FILE]
        elif os.path.lexists(index):
            weight_map = _read_index(index)
            paths = [folder / name for name in sorted(set(weight_map.values()))]
        else:
            raise CheckpointError(_nothing_found(folder))
        self._opened = {path: _open_file(path, index) for path in paths}
        names = {path: list(file.keys()) for path, file in self._opened.items()}
        if weight_map is not None:
            _check_index(index, weight_map, names)
        self._where = {name: path for path in paths for name in names[path]}

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raise CheckpointError if there is none of this name."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor. Raise CheckpointError if it, or the tensor, is unknown."""
        stored = self._slice(name).get_dtype()
        if stored not in DTYPES:
            raise CheckpointError(
                f"{name} in {self._where[name]} has the dtype {stored}, which is not read; known "
                f"are {', '.join(DTYPES)}."
            )
        return DTYPES[stored]

    def read(self, name: str) -> Tensor:
        """Map a tensor into the CPU's memory; its bytes are read when they are used.

        It stays valid without these files. Copy it before you write into it.

        Raises:
            CheckpointError: as `dtype`.
        """
        self.dtype(name)
        return self._opened[self._where[name]].get_tensor(name)

    def _slice(self, name: str):
        if name not in self._where:
            raise CheckpointError(f"{self.folder} holds no tensor {name}.")
        return self._opened[self._where[name]].get_slice(name)


def check_numbers(
    name: str, tensor: Tensor, source: object, dtype: torch.dtype | None = None
) -> None:
    """Raise CheckpointError if a tensor has a NaN, or a finite number that is infinite in another
    dtype, and warn of an infinity. One pass, no copy.

    tensor: without values (meta) it has none.
    source: the name of its folder, or what it came with.
    dtype: what it will be rounded to; its own by default.
    """
    codes = _NAN_CODES.get(tensor.dtype)
    has_numbers = codes or tensor.is_floating_point()
    if not tensor.numel() or tensor.is_meta or not has_numbers:
        return
    if codes is not None:
        mask, code = codes
        has_nan = bool((tensor.view(torch.uint8) & mask == code).any())
        ends = torch.zeros(2)
    else:
        ends = torch.stack(torch.aminmax(tensor)).cpu()
        has_nan = bool(ends.isnan().any())
    if has_nan:
        raise CheckpointError(
            f"{name} has numbers that are NaN in {source}, which would make every answer NaN. Copy "
            "or send it again, or go back to a checkpoint from before they came."
        )
    if bool(ends.isinf().any()):
        logger.warning("%s has infinite numbers in %s", name, source)
    beyond = ends.isfinite() & ends.to(dtype or ends.dtype).isinf()
    if bool(beyond.any()):
        raise CheckpointError(
            f"{name} has the number {ends[beyond][0].item():g} in {source}, but {dtype}, which it "
            f"would be rounded to, ends at {torch.finfo(dtype).max:g}. torch.bfloat16 and "
            "torch.float32 end at 3.4e+38: load the model in one of them."
        )


class TensorPlan(NamedTuple):
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: str | os.PathLike,
    plan: Sequence[TensorPlan],
    make: Callable[[str], Tensor],
    max_shard_bytes: int = 5 << 30,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Write tensors as the weights of a folder, replacing its old weights.

    All new files are complete before the first old one is replaced, and shards are ignored until
    their index exists. So a crash leaves the old weights; only if old and new shards have the same
    names, a crash between the renames leaves a folder without index, which `TensorFiles.open`
    refuses.

    Args:
        plan: all tensors, in the order of their creation.
        make: returns the tensor of a name, on any device. One tensor is held at a time.
        max_shard_bytes: most bytes of tensors in one file. A larger tensor has its own file.
        ready: called when all new files are complete; if it raises, the old files stay.

    Raises:
        CheckpointError: the folder cannot be written.
        ValueError: a tensor of `make` differs from the plan.
    """
    folder = Path(folder)
    shards = _split(plan, max_shard_bytes)
    paths = [folder / WEIGHTS_FILE]
    if len(shards) > 1:
        count = len(shards)
        paths = [folder / f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    temporaries = [temporary_path(path) for path in paths]
    total_bytes = sum(tensor.num_bytes for tensor in plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with progress(f"writing {folder}", total_bytes) as advance:
                for temporary, shard in zip(temporaries, shards):
                    _write_file(temporary, shard, make, advance)
            ready()
            _put_in_place(folder, temporaries, paths, shards)
        finally:
            for temporary in temporaries:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint to {folder}: {error}") from error


# Reading -----------------------------------------------------------------------------------------


def _nothing_found(folder: Path) -> str:
    message = f"{folder / WEIGHTS_FILE} does not exist, nor does {INDEX_FILE} next to it. "
    if any(_SHARD.fullmatch(path.name) for path in folder.glob("*.safetensors")):
        return message + (
            "There are shards, but without their index it is not known whether they belong "
            "together: the folder was copied or saved in part. Copy or save it again."
        )
    pickled = [name for name in PICKLED_FILES if (folder / name).exists()]
    if pickled:
        return message + (
            f"There is {pickled[0]}, but pickled weights are not read. Convert them: load the "
            "folder in transformers and call save_pretrained."
        )
    if (folder / CONSOLIDATED_FILE).exists():
        return message + (
            f"There is {CONSOLIDATED_FILE}, whose tensors have Mistral's own names: download "
            f"{WEIGHTS_FILE} of the same model."
        )
    return message + "A checkpoint holds its weights there."


def _read_index(index: Path) -> dict[str, str]:
    """Map tensor names to file names."""
    weight_map = read_json(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map, which says where each tensor lies.")
    for name, file in weight_map.items():
        # An index is untrusted: it must not name files outside its folder.
        if not isinstance(file, str) or file in ("", ".", "..") or re.search(r"[/\\\0]", file):
            raise CheckpointError(
                f"{index} puts {name} into {file!r}, which is not the name of a file in its folder."
            )
    return weight_map


def _open_file(path: Path, index: Path) -> Any:
    if not os.path.lexists(path):
        raise CheckpointError(f"{path} does not exist, but {index} names it. Copy it there.")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        unknown = f"{error}. It is truncated or no safetensors file; copy or save it again."
        raise CheckpointError(f"{path} cannot be read: {read_failure(path, unknown)}") from error
    except RuntimeError as error:  # of torch's memory mapping
        raise CheckpointError(f"{path} cannot be mapped into memory: {error}") from error


def _check_index(
    index: Path, weight_map: Mapping[str, str], names: Mapping[Path, list[str]]
) -> None:
    present = {(name, path.name) for path in names for name in names[path]}
    for name, file in sorted(weight_map.items() - present):
        raise CheckpointError(f"{index} puts {name} into {file}, which does not hold it.")
    for name, file in sorted(present - weight_map.items()):
        raise CheckpointError(
            f"{index.parent / file} holds {name}, which {index} puts into "
            f"{weight_map.get(name, 'no file')}. They do not belong together."
        )


# Writing -----------------------------------------------------------------------------------------


def _split(plan: Sequence[TensorPlan], max_bytes: int) -> list[list[TensorPlan]]:
    """Split a plan into at least one file, in order."""
    shards: list[list[TensorPlan]] = [[]]
    used = 0
    for tensor in plan:
        if shards[-1] and used + tensor.num_bytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.num_bytes
    return shards


def _write_file(
    path: Path,
    shard: list[TensorPlan],
    make: Callable[[str], Tensor],
    advance: Callable[[int], None],
) -> None:
    """Write a safetensors file: the header's length, the header (JSON), the tensors' bytes.

    safetensors' own writer needs all tensors of a file at once; this one takes them one by one.
    Format: https://huggingface.co/docs/safetensors, "Format".
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # which readers expect
    end = 0
    # Wide elements first, so that every tensor starts at a multiple of its element size.
    for tensor in sorted(shard, key=lambda tensor: -tensor.dtype.itemsize):
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in shard:
            file.seek(8 + len(text) + header[tensor.name]["data_offsets"][0])
            _write_tensor(file, tensor, make, advance)


def _write_tensor(
    file: BinaryIO, plan: TensorPlan, make: Callable[[str], Tensor], advance: Callable[[int], None]
) -> None:
    name, shape, dtype = plan
    tensor = make(name)
    if (tuple(tensor.shape), tensor.dtype) != (tuple(shape), dtype):
        raise ValueError(
            f"{name} was planned as {dtype} of shape {list(shape)}, but is {tensor.dtype} of shape "
            f"{list(tensor.shape)}"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a single element of another tensor counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    for piece in flat.split(_WRITE_BYTES):
        file.write(piece.numpy())
        advance(len(piece))


def _put_in_place(
    folder: Path, temporaries: list[Path], paths: list[Path], shards: list[list[TensorPlan]]
) -> None:
    """Rename the new files, write their index, remove the old weights."""
    index = folder / INDEX_FILE
    if len(paths) > 1 and any(path.exists() for path in paths):
        index.unlink(missing_ok=True)  # it must not combine old and new shards
    for temporary, path in zip(temporaries, paths):
        os.replace(temporary, path)
    kept = set(paths)
    if len(paths) > 1:
        total_size = sum(tensor.num_bytes for shard in shards for tensor in shard)
        files = {t.name: path.name for path, shard in zip(paths, shards) for t in shard}
        write_json(index, {"metadata": {"total_size": total_size}, "weight_map": files})
        kept.add(index)
    # First the files that readers open first.
    old_shards = [path for path in folder.glob("*.safetensors") if _SHARD.fullmatch(path.name)]
    for path in (folder / WEIGHTS_FILE, index, *old_shards):
        if path not in kept:
            path.unlink(missing_ok=True)
