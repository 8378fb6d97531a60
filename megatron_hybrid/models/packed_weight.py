"""PackedWeight: a weight of 8 or 4 bits in the place of a parameter of a projection.

Layers know no format: they call `linear` with whatever their `weight` is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_hybrid import ops
from megatron_hybrid.models.derived_weights import reordered_weight
from megatron_hybrid.models.sharding.gathering import mark_experts, num_experts_of
from megatron_hybrid.models.sharding.tensor_sharding import Cut, cut_of, mark_tensor_parallel
from megatron_hybrid.ops import packed_linear, unpack
from megatron_hybrid.ops.packed import Format, format_of


@dataclass(frozen=True)
class Packing:
    """How a weight is packed: what `ops.packed_linear` takes, as dtypes and sizes."""

    codes: torch.dtype
    scale: torch.dtype
    group: int
    """Columns with one scale, a divisor of their number."""
    has_outer: bool = False
    zero: torch.dtype | None = None
    num_rest: int = 0
    """Rows of the whole weight, the last ones, that are not packed."""

    @property
    def columns_per_code(self) -> int:
        """Columns in an element of codes."""
        return 8 // format_of(self.codes, self.scale).bits


class PackedWeight(nn.Module):
    """The codes and scales of a weight `[out, in]`, or of E stacked ones `[E, out, in]`; of the
    latter it is a sequence of the unpacked weights, each unpacked when it is taken.

    Its parameters are `codes`, `scale`, and what there is of `outer`, `zero` and `rest`; see
    `ops.packed_linear`. They have no gradients, and keep their dtypes whatever dtype a model is
    converted to. On tensor-parallel ranks they are cut as the weight.

    What asks for sizes finds those of the weight.

    Args:
        weight: the parameter to replace; its values are not kept.
        packing: see there.

    Raises:
        ValueError: the weight cannot be packed like this.
    """

    requires_grad = False

    def __init__(self, weight: nn.Parameter | PackedWeight, packing: Packing):
        super().__init__()
        self.packing = packing
        self.dtype, self.shape, self.cut = weight.dtype, weight.shape, cut_of(weight)
        if (num_experts := num_experts_of(weight)) is not None:
            mark_experts(self, num_experts)
        *_, rows, columns = weight.shape
        width = packing.columns_per_code
        by_row, by_column, rest_cut = self.cut, self.cut, None
        num_rest = packing.num_rest
        if self.cut is not None and self.cut.dim == self.dim() - 2:
            by_column = None
            if packing.num_rest:
                by_row, rest_cut = _rows_apart(self.cut, packing.num_rest)
                num_rest = sum(rest_cut.local_sections)
        else:
            by_row = None
            _require_whole_codes(columns, by_column, width)
        packed_rows = rows - num_rest
        parts = {
            "codes": (packed_rows, columns // width, packing.codes, width),
            "scale": (packed_rows, columns // packing.group, packing.scale, packing.group),
            "outer": (packed_rows, 1, torch.float32 if packing.has_outer else None, columns),
            "zero": (packed_rows, columns // packing.group, packing.zero, packing.group),
            "rest": (num_rest, columns, weight.dtype if num_rest else None, 1),
        }
        for name, (length, count, dtype, columns_each) in parts.items():
            if dtype is None:
                self.register_parameter(name, None)
                continue
            shape = (*weight.shape[:-2], length, count)
            part = nn.Parameter(
                torch.empty(shape, dtype=dtype, device=weight.device), requires_grad=False
            )
            cut = rest_cut if name == "rest" else by_row
            if by_column is not None and name != "outer":
                sections = tuple(size // columns_each for size in by_column.sections)
                cut = replace(by_column, sections=sections)
            if cut is not None:
                mark_tensor_parallel(part, cut)
            if num_experts is not None:
                mark_experts(part, num_experts)
            self.register_parameter(name, part)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        """Count the elements, unpacked."""
        return math.prod(self.shape)

    @property
    def format(self) -> Format:
        """What its codes stand for."""
        return format_of(self.codes.dtype, self.scale.dtype)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parameters())

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def parameter(self) -> nn.Parameter:
        """Make a parameter for the weight's place, without values."""
        found = nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device=self.device))
        if self.cut is not None:
            mark_tensor_parallel(found, self.cut)
        if (num_experts := num_experts_of(self)) is not None:
            mark_experts(found, num_experts)
        return found

    def as_parameter(self) -> nn.Parameter:
        """Make a `parameter` with the values of the weight."""
        found = self.parameter()
        found.data.copy_(self.unpacked())
        return found

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        """What `ops.unpack` takes before the dtype."""
        return self.codes, self.scale, self.outer, self.zero, self.rest

    def unpacked(self) -> Tensor:
        """Return the weight as a tensor, in the dtype that it was built in."""
        return unpack(*self.parts, self.dtype)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, expert: int) -> Tensor:
        return unpack(*(None if p is None else p[expert] for p in self.parts), self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedWeight:
        """See torch. Parts move between devices, and are converted to no dtype."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)


def replace_weight(module: nn.Module, weight: nn.Parameter | PackedWeight) -> None:
    """Put a weight, packed or not, in the place of a layer's."""
    del module.weight
    module.weight = weight


def require_unpacked(model: nn.Module, task: str) -> None:
    """Raise ValueError if a weight of the model is packed. task: what cannot be done with it."""
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight):
            raise ValueError(
                f"{task}: weights of the model are packed, such as {name} ({module.format.name}). "
                "Load it from a folder with unpacked weights."
            )


def linear(x: Tensor, weight: Tensor | PackedWeight, module: nn.Module) -> Tensor:
    """Compute x W^T, `[..., in] -> [..., out]`; the weight is that of `module`."""
    if isinstance(weight, PackedWeight):
        rows = packed_linear(x.reshape(-1, x.shape[-1]), *weight.parts)
        return rows.view(*x.shape[:-1], rows.shape[-1])
    return ops.linear(x, reordered_weight(module, weight))


def unpacked(weight: Tensor | PackedWeight) -> Tensor:
    """Return a weight as a tensor."""
    return weight.unpacked() if isinstance(weight, PackedWeight) else weight


def named_weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter | PackedWeight]]:
    """Yield the parameters of a module by name; a packed weight counts as one."""
    packed = {name: part for name, part in module.named_modules() if isinstance(part, PackedWeight)}
    yield from packed.items()
    for name, parameter in module.named_parameters():
        if name.rpartition(".")[0] not in packed:
            yield name, parameter


def common_group(weight: Tensor | PackedWeight, group: int) -> int:
    """Find the widest group of columns that divides `group`, all columns and each rank's."""
    cut, shape = cut_of(weight), weight.shape
    columns = shape[-1] if cut is None or cut.dim != weight.dim() - 1 else cut.size
    found = math.gcd(group, columns)
    if columns != shape[-1]:
        for rank in range(cut.num_ranks):
            found = math.gcd(found, *(at for span in cut.ranges(rank) for at in span))
    return found


def _require_whole_codes(columns: int, cut: Cut | None, width: int) -> None:
    """Raise ValueError if columns that share an element of codes lie on different ranks.

    Args:
        columns: of this rank.
        width: columns in an element of codes.
    """
    sections = (columns,) if cut is None else cut.sections
    num_ranks = 1 if cut is None else cut.num_ranks // cut.repeats
    fitting = [n for n in range(1, num_ranks + 1) if all(s % (n * width) == 0 for s in sections)]
    if num_ranks not in fitting:
        most = f" {fitting[-1]} is the largest one that fits." if fitting else ""
        raise ValueError(
            f"its {sum(sections)} columns are cut into pieces of {columns} for {num_ranks} "
            f"tensor-parallel ranks, and {width} columns share a byte, which cannot be cut. Choose "
            f"a tensor-parallel size that divides them into multiples of {width}.{most} Weights of "
            "8 bits can be cut anywhere"
        )


def _rows_apart(cut: Cut, num_rest: int) -> tuple[Cut, Cut]:
    """Split a cut into those of the leading rows and of the `num_rest` last ones."""
    sections = list(cut.sections)
    rest: list[int] = []
    while sections and sum(rest) < num_rest:
        rest.insert(0, sections.pop())
    if sum(rest) != num_rest or cut.repeats != 1 or not sections:
        raise ValueError(
            f"its last {num_rest} rows are not packed, which is no whole number of its blocks of "
            f"{list(cut.sections)} rows"
        )

    def of(blocks: slice) -> Cut:
        parts = (cut.sections, cut.names, cut.copies)
        sections, names, copies = (each and each[blocks] for each in parts)
        return replace(cut, sections=sections, names=names, copies=copies)

    return of(slice(len(sections))), of(slice(len(sections), None))
