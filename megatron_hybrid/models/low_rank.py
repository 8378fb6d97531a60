"""Low-rank adapters of projections (Hu et al. 2021, arXiv:2106.09685).

An adapted projection computes `W x + scale * B A x`. Adapters are cut over tensor-parallel ranks as
their projection is: B of one that is cut by output row, A of one that is cut by input column.
"""

import math
import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.mixers.projections import ReplicatedLinear
from megatron_hybrid.models.sharding.collectives import (
    gather_rows,
    sum_and_split_rows,
    sum_gradient_of_copies,
)
from megatron_hybrid.models.sharding.tensor_sharding import copy_marks, cut_of, full_shape, shard
from megatron_hybrid.ops.linear import linear


@dataclass(frozen=True)
class LowRankPart:
    """A part of a projection that has an adapter of its own, such as the queries of `linear_qkv`.
    It has `rank` rows of A and columns of B, after those of the parts before it."""

    name: str
    rank: int
    rows: Tensor | None = None
    """bool [out]: its rows of the whole projection; None means all."""


def projections_of(model: HybridModel) -> dict[str, nn.Module]:
    """Find the projections of this pipeline stage that can have adapters, by canonical name.

    Raises:
        ValueError: the projections of the model cannot have any.
    """
    if any(type(each).__name__.startswith("TELayerNorm") for each in model.modules()):
        raise ValueError(
            "LoRA needs layer_spec='local': projections of Transformer Engine include a norm, of "
            "which adapters would need the output."
        )
    return {
        model.canonical_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear))
        and name != "output_layer"
        and not name.endswith("linear_kv_up_proj")  # its weight serves without it, absorbed
    }


def adapters_of(model: HybridModel) -> dict[str, nn.Module]:
    """Find the projections of this pipeline stage that have adapters, by canonical name."""
    return {
        model.canonical_name(name): module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "lora", None), LowRankAdapter)
    }


class LowRankAdapter(nn.Module):
    """Computes what an adapter adds to the output of a projection. B is initially 0.

    Args:
        projection: cut by output row or by input column, or replicated.
        parts: of it, with adapters of their own.
        scale: factor of B A.
        dropout: share of the inputs that are dropped in training.
        seed: of the initial values of A, which also depend on the names of the parts.
    """

    def __init__(
        self,
        projection: nn.Module,
        parts: list[LowRankPart],
        scale: float,
        dropout: float = 0.0,
        seed: int = 0,
    ):
        super().__init__()
        self.parts, self.scale, self.dropout = parts, scale, dropout
        self.group, self.splits_rows, self.by_column = cut_of_projection(projection)
        self.is_on = True  # else the projection computes as its base
        self._rank = 0 if self.group is None else self.group.rank()
        weight, rank = projection.weight, sum(part.rank for part in parts)
        input_size = full_shape(weight)[1]
        like = {"dtype": weight.dtype, "device": weight.device}
        self.a = nn.Parameter(torch.empty(rank, weight.shape[1], **like))
        self.b = nn.Parameter(torch.zeros(weight.shape[0], rank, **like))
        # core's `finalize_model_grads` sums what each rank's rows give to what is not cut.
        self.a.sequence_parallel = self.b.sequence_parallel = self.splits_rows
        if self.group is not None:
            cut_part = self.a if self.by_column else self.b
            copy_marks(weight, cut_part)
            del cut_part.sequence_parallel
        if cut_of(self.b) is not None:
            sum_gradient_of_copies(self.b, self.group)
        drawn = torch.cat([_first_values(part, input_size, seed) for part in parts])
        with torch.no_grad():
            self.a.copy_(shard(drawn, self.a, self._rank))
        self._mask = None
        if any(part.rows is not None for part in parts):
            mask = shard(_mask(parts, full_shape(weight)[0]), self.b, self._rank)
            self._mask = mask.to(**like)

    def forward(self, x: Tensor) -> Tensor:
        """Map the projection's input [..., in] to what is added to its output [..., out]."""
        low = linear(F.dropout(x, self.dropout, self.training), self.a)
        low = exchange_ranks(low, self.group, self.splits_rows, self.by_column)
        return linear(low, self.own_b() * self.scale)

    def own_b(self) -> Tensor:
        """Return B with 0 where a part's A has no effect, [out, rank] of this rank."""
        if self._mask is None:
            return self.b
        self._mask = self._mask.to(self.b.device, self.b.dtype)
        return self.b * self._mask

    def product(self) -> Tensor:
        """Return the product B A that is added to this rank's weight, [out, in], fp32."""
        return self.own_b().float() @ self.a.float() * self.scale


def _first_values(part: LowRankPart, input_size: int, seed: int) -> Tensor:
    drawn = torch.Generator().manual_seed(zlib.crc32(f"{seed} {part.name}".encode()))
    values = torch.rand(part.rank, input_size, generator=drawn) * 2 - 1
    return values / math.sqrt(input_size)


def _mask(parts: list[LowRankPart], num_rows: int) -> Tensor:
    columns = []
    for part in parts:
        rows = torch.ones(num_rows) if part.rows is None else part.rows.float()
        columns.append(rows[:, None].expand(-1, part.rank))
    return torch.cat(columns, 1)


def cut_of_projection(projection: nn.Module) -> tuple[dist.ProcessGroup | None, bool, bool]:
    """Return the tensor-parallel ranks of a projection (None if it is replicated), whether they
    split rows, and whether they cut it by input column."""
    if isinstance(projection, ReplicatedLinear):
        return None, projection.weight.sequence_parallel, False
    by_column = isinstance(projection, RowParallelLinear)
    return projection.tp_group, projection.sequence_parallel, by_column


def exchange_ranks(
    low: Tensor, group: dist.ProcessGroup | None, splits_rows: bool, by_column: bool
) -> Tensor:
    """Return A's output of all tensor-parallel ranks, from that of this one."""
    if group is None or group.size() == 1:
        return low
    if by_column:
        reduce = sum_and_split_rows if splits_rows else reduce_from_tensor_model_parallel_region
        return reduce(low, group)
    return (gather_rows if splits_rows else copy_to_tensor_model_parallel_region)(low, group)
