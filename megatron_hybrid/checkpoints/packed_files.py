"""Packed weights in folders of Hugging Face: which tensors make up one, and how its scales lie.

Published formats differ in names, in how many rows and columns share a scale, and in how codes and
zero points fill their words. A `StoredWeight` says that of one weight; it is read off the names,
dtypes and shapes of its tensors, and checked against the config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.checkpoints.quantization_config import QUANT_FILE, Quantization
from megatron_hybrid.checkpoints.tensor_files import CheckpointError, TensorFiles
from megatron_hybrid.ops.packed import format_of, of_nibbles

PARTS = ("codes", "scale", "outer", "zero")
_COLUMNS = {torch.float8_e4m3fn: 16, torch.float8_e8m0fnu: 32}
"""Columns that share a scale of this dtype in fp4: NVFP4, MXFP4."""

_UNUSED = (
    *("input_scale", "input_global_scale", "input_zero_point", "activation_scale"),
    *("q_scale", "k_scale", "v_scale", "kv_scale", "prob_output_scale", "output_scale"),
    "g_idx",
)
"""Tensors that are written back as they were, and not used: activations stay in the model's dtype,
and keys and values are not quantized by what a file says."""


@dataclass(frozen=True)
class PackedTensor:
    """One part of a packed weight as a folder holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype in memory."""
    decode: Callable[[Tensor], Tensor] = lambda stored: stored
    """The stored tensor -> as in memory, but for rows that share a scale."""
    encode: Callable[[Tensor], Tensor] = Tensor.contiguous
    """Its inverse."""
    is_kept: bool = False
    """Whether it is written as it was read: the inverse may round."""


@dataclass(frozen=True)
class StoredWeight:
    """A packed weight of a folder, as the weight that it stands for."""

    shape: tuple[int, ...]
    """Shape of the unpacked weight."""
    parts: Mapping[str, PackedTensor]
    """Names of `ops.packed_linear`: "codes", "scale", and "outer" and "zero" if there."""
    block: tuple[int, int]
    """Rows and columns that share a scale; 0 means all of them."""

    @classmethod
    def of_parts(cls, parts: Mapping[str, PackedTensor]) -> StoredWeight:
        """Make a weight whose parts are stored as they are in memory, a scale for each row."""
        *rows, width = parts["codes"].shape
        columns = width * 8 // format_of(parts["codes"].dtype, parts["scale"].dtype).bits
        return cls((*rows, columns), parts, (1, columns // parts["scale"].shape[-1]))

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.block[1] or self.shape[-1]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the parts, in memory."""
        return {name: part.dtype for name, part in self.parts.items()}

    def by_row(self, name: str, stored: Tensor, group: int) -> Tensor:
        """Return a part with a row for each row of the weight and, of scales, a column for each
        `group` columns of it, a divisor of `self.group`."""
        return self.over_rows(name, self.parts[name].decode(stored), group)

    def over_rows(self, name: str, value: Tensor, group: int) -> Tensor:
        """Spread a decoded part as `by_row` does."""
        *lead, rows, columns = self.shape
        if name == "codes":
            return value
        if name == "outer":
            whole = (*lead, rows, 1)
            return value if value.shape == whole else value.reshape(*lead, 1, 1).expand(whole)
        block_rows = self.block[0] or rows
        grid = (-(-rows // block_rows), -(-columns // self.group))
        whole = value.reshape(*lead, *grid).repeat_interleave(block_rows, -2)
        return whole.repeat_interleave(self.group // group, -1)[..., :rows, : columns // group]

    def shape_by_row(self, name: str, group: int) -> tuple[int, ...]:
        """Return the shape of what `by_row` returns."""
        *lead, rows, columns = self.shape
        bits = format_of(self.parts["codes"].dtype, self.parts["scale"].dtype).bits
        counts = {"codes": columns * bits // 8, "outer": 1}
        return (*lead, rows, counts.get(name, columns // group))

    def as_stored(self, name: str, value: Tensor) -> Tensor:
        """Invert `by_row`."""
        part = self.parts[name]
        if name == "outer":
            value = value[..., :1, :1]
        elif name != "codes":
            step = self.group * value.shape[-1] // self.shape[-1]
            value = value[..., :: self.block[0] or self.shape[-2], ::step]
        return part.encode(value).reshape(part.shape)


class PackedFiles:
    """The tensors of a folder, where each packed weight counts as the one that it stands for.

    Args:
        files: of the folder.
        config: its `quantization_config`; None means that nothing may be packed.

    Raises:
        CheckpointError: a format that is not read, or tensors that contradict the config.
    """

    def __init__(self, files: TensorFiles, config: Mapping[str, Any] | None):
        self.files = files
        self._quantization = Quantization.read(config, str(files.folder)) if config else None
        self.may_be_packed = self._quantization is not None
        self._names = set(files.names())
        self.stored: dict[str, StoredWeight] = {}
        """Packed weights by the name of the weight."""
        for name in sorted(self._names):
            for ending, read in _READERS.items():
                if name.endswith(ending) and (parts := read(self, name)) is not None:
                    weight = name.removesuffix("_packed").replace(".qweight", ".weight")
                    self.stored[weight] = self._weight(weight, parts)
        parts = [part for each in self.stored.values() for part in each.parts.values()]
        others = self._names - {part.name for part in parts}
        self.kept = {part.name for part in parts if part.is_kept} | {
            name
            for name in others
            if self.may_be_packed and name.rpartition(".")[2] in (*_UNUSED, "weight_shape")
        }
        """Names of tensors that are written back as they were."""
        self._plain = others - self.kept

    def names(self) -> list[str]:
        """Name all weights; twice one that is there plain and packed."""
        return [*self._plain, *self.stored]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight, unpacked."""
        return self.stored[name].shape if name in self.stored else self.files.shape(name)

    def part(
        self, name: str, dtype: torch.dtype | None = None, *codec: Any, dims: int | None = None
    ) -> PackedTensor:
        """Return one of the folder's tensors as a part.

        Args:
            dtype: as stored by default.
            codec: further fields of `PackedTensor`.
            dims: any number by default.

        Raises:
            CheckpointError: there is none of this name, or with other dimensions.
        """
        if name not in self._names:
            raise CheckpointError(
                f"{name} is not in {self.files.folder}, but the rest of a packed weight is. Copy "
                "the folder again."
            )
        shape = self.files.shape(name)
        if dims not in (None, len(shape)) or 0 in shape:
            raise CheckpointError(
                f"{name} has shape {list(shape)} in {self.files.folder}, which must have "
                f"{dims or 'some'} dimensions, none of them 0. Copy the folder again."
            )
        return PackedTensor(name, shape, dtype or self.files.dtype(name), *codec)

    def has(self, name: str) -> bool:
        return name in self._names

    def quantization(self, name: str) -> Quantization:
        """Say how a weight is packed, by the config. Raise CheckpointError if that says nothing."""
        if self._quantization is None:
            raise CheckpointError(
                f"{name} is packed in {self.files.folder}, but neither config.json nor "
                f"{QUANT_FILE} says how. Copy the folder again, with both."
            )
        return self._quantization

    def _weight(self, name: str, parts: Mapping[str, PackedTensor]) -> StoredWeight:
        codes, scale = parts["codes"], parts["scale"]
        kind = format_of(codes.dtype, scale.dtype)
        whole = torch.empty(codes.shape, dtype=self.files.dtype(codes.name), device="meta")
        decoded: tuple[int, ...] = ()
        with suppress(RuntimeError):  # these are no whole bytes
            decoded = tuple(codes.decode(whole).shape)
        if kind is None or len(decoded) < 2:
            raise CheckpointError(
                f"{name} has codes of {codes.dtype} of shape {list(codes.shape)} and scales of "
                f"{scale.dtype} in {self.files.folder}, which is no format that is read. "
                "Dequantize it with the library that packed it."
            )
        *lead, rows, width = decoded
        shape = (*lead, rows, width * 8 // kind.bits)
        sizes = (1, _COLUMNS[scale.dtype]) if kind.name == "fp4" else None
        sizes = [sizes] if sizes else list(self.quantization(name).block_sizes)
        for block in (*sizes, (1, 0), (0, 0)):
            sides = block[0] or rows, block[1] or shape[-1]
            grid = (*lead, -(-rows // sides[0]), -(-shape[-1] // sides[1]))
            if self._misfit(scale, grid) is None:
                break
        else:
            raise CheckpointError(
                f"{name} of shape {list(shape)} has scales of shape {list(scale.shape)} in "
                f"{self.files.folder}, but by its config there is one for each "
                f"{' or '.join(f'{r} x {c}' for r, c in sizes)} numbers, for a row, or for all."
            )
        shapes = {"codes": decoded, "outer": (*lead, 1, 1)}
        for part, each in parts.items():
            if (wanted := self._misfit(each, shapes.get(part, grid))) is not None:
                raise CheckpointError(
                    f"{each.name} is {self.files.dtype(each.name)} of shape {list(each.shape)} in "
                    f"{self.files.folder}, but {name} of shape {list(shape)} needs {wanted.dtype} "
                    f"of shape {list(wanted.shape)} there. Copy the folder again."
                )
        for each in self.quantization(name).announced(name.removesuffix(".weight")):
            self.part(each)
        return StoredWeight(shape, parts, block)

    def _misfit(self, part: PackedTensor, shape: tuple[int, ...]) -> Tensor | None:
        """Return what should be stored, without values, for a part of this shape in memory; None:
        it is."""
        stored = torch.empty(part.shape, dtype=self.files.dtype(part.name), device="meta")
        wanted = value = torch.empty(shape, dtype=part.dtype, device="meta")
        with suppress(RuntimeError):  # no number of words holds these
            wanted = part.encode(value)
            pairs = ((part.decode(stored), value), (stored, wanted))
            if all(_kind(one, len(shape)) == _kind(other, len(shape)) for one, other in pairs):
                return None
        return wanted


def _kind(tensor: Tensor, dims: int) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of a part, without the dimensions of one that some folders leave out,
    or have twice, after the `dims` - 2 of experts."""
    lead, grid = tensor.shape[: dims - 2], tensor.shape[dims - 2 :]
    if len(grid) == 4 and grid[1] == grid[3] == 1:
        grid = grid[::2]
    return tensor.dtype, (*lead, *grid, *(1,) * (2 - len(grid)))


# Readers: the parts of a packed weight, by the name of its codes; None if these are no codes ------


def _plain_codes(files: PackedFiles, name: str) -> dict[str, PackedTensor] | None:
    """Find FP8 and INT8 of one code an element, and ModelOpt's NVFP4."""
    dtype, inverse = files.files.dtype(name), f"{name}_scale_inv"
    is_code = dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    if is_code and not (files.has(inverse) or files.has(f"{name}_scale")):
        if not files.may_be_packed:
            return None
        raise CheckpointError(
            f"{name} is {dtype} in {files.files.folder}, without {name}_scale or {inverse} next to "
            "it. Copy the folder again."
        )
    if not is_code:
        return None
    scale = inverse if files.has(inverse) else f"{name}_scale"
    parts = {"codes": files.part(name), "scale": files.part(scale)}
    if dtype == torch.uint8:
        parts["outer"] = files.part(f"{name}_scale_2")
    elif files.has(zero := f"{name}_zero_point"):
        parts["zero"] = files.part(zero)
    return parts


def _packed_codes(files: PackedFiles, name: str) -> dict[str, PackedTensor] | None:
    """Find the parts of compressed-tensors: NVFP4 in bytes, and integers in words of 32 bits, each
    of them offset to be positive."""
    weight, dtype = name.removesuffix("_packed"), files.files.dtype(name)
    scale = files.part(f"{weight}_scale")
    if dtype == torch.uint8:
        inverse = torch.reciprocal
        outer = files.part(f"{weight}_global_scale", torch.float32, inverse, inverse, True)
        return {"codes": files.part(name), "scale": scale, "outer": outer}
    bits, rows = _bits_and_rows(files, name)
    if files.has(f"{weight}_g_idx"):
        raise CheckpointError(
            f"{weight} has columns in an order of its own ({weight}_g_idx), which is not read. "
            "Quantize it without an order of activations (actorder)."
        )
    if bits == 4:
        codes = files.part(name, torch.uint8, _bytes_of_words, _words_of_bytes)
    else:
        codes = files.part(name, torch.int8, _int8_of_words, _words_of_int8)
    parts = {"codes": codes, "scale": scale}
    if files.has(zero := f"{weight}_zero_point"):
        # Only those of groups and of rows are in words.
        in_words = files.files.dtype(zero) == torch.int32
        parts["zero"] = _zero_points(files, zero, bits, rows) if in_words else files.part(zero)
    return parts


def _bits_and_rows(files: PackedFiles, name: str) -> tuple[int, int]:
    """Return the bits of the integers in a matrix of words, and its rows.

    Raises:
        CheckpointError: neither 4 nor 8, or the last words are filled up.
    """
    rows, num_words = files.part(name, dims=2).shape
    shape = files.part(f"{name.removesuffix('_packed')}_shape").name
    given = files.files.read(shape).flatten().tolist()
    for bits in (4, 8):
        if given == [rows, num_words * 32 // bits]:
            return bits, rows
    raise CheckpointError(
        f"{name} has {rows} rows of {num_words} words of 32 bits in {files.files.folder}, and "
        f"{shape} says {given}; whole words of integers of 4 or 8 bits are read. Dequantize it "
        "with the library that packed it."
    )


def _zero_points(files: PackedFiles, name: str, bits: int, rows: int) -> PackedTensor:
    """Return zero points, words of whose integers lie one below the other."""

    def decode(stored: Tensor) -> Tensor:
        words = _turned(stored)
        if bits == 8:
            return _int8_of_words(words).t()[:rows]
        return (of_nibbles(words.view(torch.uint8)).to(torch.int8) - 8).t()[:rows]

    def encode(zero: Tensor) -> Tensor:
        columns = zero.t()
        if bits == 8:
            return _turned(_words_of_int8(_filled(columns, 4, -128)))
        return _turned(_words_of_bytes(in_bytes(_filled((columns + 8).to(torch.uint8), 8, 0))))

    return files.part(name, torch.int8, decode, encode, dims=2)


def _blocks(files: PackedFiles, name: str) -> dict[str, PackedTensor] | None:
    """Find MXFP4 of GPT-OSS: groups of 32 columns as 16 bytes, with an exponent each."""
    scales = f"{name.removesuffix('_blocks')}_scales"
    if not files.has(scales):
        return None
    grid = files.files.shape(name)[:-1]
    return {
        "codes": files.part(
            name,
            torch.uint8,
            lambda stored: stored.flatten(-2),
            lambda codes: codes.unflatten(-1, (grid[-1], -1)).contiguous(),
            dims=4,
        ),
        "scale": files.part(
            scales,
            torch.float8_e8m0fnu,
            lambda stored: stored.view(torch.float8_e8m0fnu),
            lambda scale: scale.contiguous().view(torch.uint8),
        ),
    }


def _stack_of_experts(files: PackedFiles, name: str) -> None:
    """Refuse ModelOpt's experts of a layer in one tensor."""
    stack = name.removesuffix("_weight_scale")
    raise CheckpointError(
        f"{stack} holds the experts of a layer in one tensor of {files.part(stack).dtype} in "
        f"{files.files.folder}, with its scale in {name}: packed experts are read one by one, and "
        "in one tensor as MXFP4 alone. Quantize them one by one, or leave them as they are."
    )


_ONES = 0x11111111
"""A word of ones of 4 bits."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Rows of the weight whose codes lie in a word, from the lowest bits on."""


def _turned_words(files: PackedFiles, name: str) -> dict[str, PackedTensor]:
    """Find the parts of AWQ and GPTQ, of 4 bits and from 0 on. Rows are inputs, groups of them have
    a scale and a zero point for each output. Words hold neighbouring outputs in AWQ and in all zero
    points, inputs in GPTQ, whose first version takes 1 from each zero point of a word, and where
    that is 0 borrows from the next one."""
    layer, quantization = name.removesuffix(".qweight"), files.quantization(name)
    if layer.endswith(".gate_proj") and ".experts." in layer and files.has(f"{layer}.bias"):
        raise CheckpointError(
            f"{name} is of GPT-OSS, whose rows of gate and up alternate, but GPTQModel packs each "
            f"half of them as one of these, and nothing in {files.files.folder} says whether that "
            "is so here. Quantize it with llm-compressor, or load it in MXFP4."
        )
    is_awq = quantization.method == "awq"
    scale = files.part(f"{layer}.scales", None, _turned, _turned, dims=2)
    columns = files.part(name, dims=2).shape[0] * (1 if is_awq else 8)
    if files.has(order := f"{layer}.g_idx"):
        files.part(order, dims=1)
        _check_order(files, order, columns, scale.shape[0], quantization.group_size)
    order = _AWQ_ORDER if is_awq else range(8)
    places = sorted(range(8), key=order.__getitem__)
    less = _ONES if quantization.zeros_less_one else 0

    def rows_of(words: Tensor) -> Tensor:
        nibbles = of_nibbles(words.contiguous().view(torch.uint8))
        return nibbles.unflatten(-1, (-1, 8))[..., places].flatten(-2)

    def words_of(rows: Tensor) -> Tensor:
        return _words_of_bytes(in_bytes(rows.unflatten(-1, (-1, 8))[..., list(order)].flatten(-2)))

    codes = (
        (
            lambda stored: in_bytes(_turned(rows_of(stored))),
            lambda c: words_of(_turned(of_nibbles(c))),
        )
        if is_awq
        else (
            lambda stored: _bytes_of_words(_turned(stored)),
            lambda c: _turned(_words_of_bytes(c)),
        )
    )
    return {
        "codes": files.part(name, torch.uint8, *codes),
        "scale": scale,
        "zero": files.part(
            f"{layer}.qzeros",
            torch.int8,
            lambda stored: _turned(rows_of(stored + less)).to(torch.int8) - 8,
            lambda value: words_of(_turned((value + 8).to(torch.uint8))) - less,
            dims=2,
        ),
    }


def _check_order(files: PackedFiles, name: str, columns: int, groups: int, size: int) -> None:
    """Raise CheckpointError unless each column is in the group where its place puts it; the last
    one may have fewer."""
    found = files.files.read(name).long()
    size = size or -(-columns // groups)
    if torch.equal(found, torch.arange(columns) // size):
        return
    raise CheckpointError(
        f"{name} does not put {columns} columns into groups of {size}, as the config of "
        f"{files.files.folder} has them, one after the other: an order of their own is not read. "
        "Quantize it without an order of activations (desc_act), or copy the folder again."
    )


_READERS = {
    ".weight": _plain_codes,
    ".weight_packed": _packed_codes,
    "_blocks": _blocks,
    "_proj_weight_scale": _stack_of_experts,
    ".qweight": _turned_words,
}
"""Readers by the end of a tensor's name."""


def _turned(tensor: Tensor) -> Tensor:
    return _dense(tensor.t())


def _dense(tensor: Tensor) -> Tensor:
    """Copy a tensor so that its last stride is 1: a row or column alone counts as contiguous."""
    return tensor.clone(memory_format=torch.contiguous_format)


def in_bytes(nibbles: Tensor) -> Tensor:
    """Pack codes of 4 bits, two a byte, the first one below."""
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def _bytes_of_words(words: Tensor) -> Tensor:
    return words.view(torch.uint8)


def in_words(codes: Tensor) -> Tensor:
    """Pack codes of integers of 4 or 8 bits, four bytes a word, as compressed-tensors does."""
    return (_words_of_int8 if codes.dtype == torch.int8 else _words_of_bytes)(codes)


def _words_of_bytes(codes: Tensor) -> Tensor:
    return _dense(codes).view(torch.int32)


def _int8_of_words(words: Tensor) -> Tensor:
    return (words.view(torch.uint8) ^ 128).view(torch.int8)


def _words_of_int8(codes: Tensor) -> Tensor:
    return (_dense(codes).view(torch.uint8) ^ 128).view(torch.int32)


def _filled(tensor: Tensor, count: int, value: int) -> Tensor:
    """Return a tensor filled up with columns of `value` to a multiple of `count`."""
    return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % count), value=value)
