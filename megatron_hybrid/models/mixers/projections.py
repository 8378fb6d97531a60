"""The tensor-parallel projections into and out of a mixer, marked for sharding when built."""

from collections.abc import Callable, Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.base import MixerPlace
from megatron_hybrid.models.packed_weight import PackedWeight, linear, unpacked
from megatron_hybrid.models.sharding.collectives import (
    gather_rows,
    sum_and_split_rows,
    sum_gradient_of_copies,
)
from megatron_hybrid.models.sharding.tensor_sharding import Cut, mark_tensor_parallel, shard


class LocalColumnLinear(ColumnParallelLinear):
    """core's; on a CPU `linear`, in training, too, so that a row has the same bits in both. On CUDA
    one plain product if no gradient is needed and a single rank has the weight."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See core: `[..., in] -> ([..., out], bias or None)`."""
        weight = self.weight if weight is None else weight
        if _core_multiplies(input_) or self.gather_output or runtime_gather_output:
            return super().forward(input_, unpacked(weight), runtime_gather_output)
        if self.sequence_parallel:
            input_ = gather_rows(input_, self.tp_group)
        elif self.allreduce_dgrad:
            input_ = copy_to_tensor_model_parallel_region(input_, self.tp_group)
        output = linear(input_, weight, self)
        if self.bias is None or self.skip_bias_add:
            return output, self.bias
        return output + self.bias, None


class LocalRowLinear(RowParallelLinear):
    """See `LocalColumnLinear`."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """See core: `[..., in] -> ([..., out], bias or None)`."""
        if _core_multiplies(input_) and not isinstance(self.weight, PackedWeight):
            return super().forward(input_)
        output = linear(input_, self.weight, self)
        if self.sequence_parallel:
            output = sum_and_split_rows(output, self.tp_group)
        elif self.input_size_per_partition != self.input_size:
            output = reduce_from_tensor_model_parallel_region(output, self.tp_group)
        if self.bias is None or self.skip_bias_add:
            return output, self.bias
        return output + self.bias, None


def _core_multiplies(x: Tensor) -> bool:
    """Return whether core's linear layers compute: in training on CUDA. In buffers that inference
    and training cannot share they then gather and scatter the rows of sequence parallelism."""
    return x.is_cuda and torch.is_grad_enabled()


def build_input_projection(
    spec: type,
    config: HybridConfig,
    sections: Sequence[int],
    pg_collection: ProcessGroupCollection,
    *,
    section_names: tuple[str, ...] | None = None,
    copies: tuple[int, ...] | None = None,
    repeats: int = 1,
    bias: bool = False,
    skip_bias_add: bool = False,
    input_size: int | None = None,
    init_method: Callable | None = None,
) -> nn.Module:
    """Build hidden_size (or input_size) -> sum(sections) * repeats, split over ranks by output row.

    Args:
        sections: full sizes of the concatenated blocks, each cut separately.
        section_names: names of the sections in core's distributed checkpoints, if they have any.
        copies, repeats: see `Cut`.
        skip_bias_add: return the bias next to the output.
        init_method: of the weight; None means the config's.

    Raises:
        ValueError: gradients of copies would be missed by `gradient_accumulation_fusion`.
    """
    tp, init_method = pg_collection.tp, init_method or config.init_method
    input_size = input_size or config.hidden_size
    cut = Cut(0, tuple(sections), tp.size(), section_names, copies, repeats)
    if cut.copied() is not None and config.gradient_accumulation_fusion:
        raise ValueError(
            f"gradient_accumulation_fusion=True does not sum the gradients of heads or groups that "
            f"several of tensor_model_parallel_size={tp.size()} ranks hold. Use False, or no more "
            "ranks than there are of them."
        )
    projection = spec(
        input_size,
        sum(cut.local_sections) * tp.size(),
        config=config,
        init_method=init_method,
        gather_output=False,
        bias=bias,
        skip_bias_add=skip_bias_add,
        is_expert=False,
        tp_comm_buffer_name="fc1",  # of an overlap that is not there
        tp_group=tp,
    )
    for parameter in (projection.weight, projection.bias)[: 1 + bias]:
        mark_tensor_parallel(parameter, cut)
        sum_gradient_of_copies(parameter, tp)
    if cut.copied() is not None and config.perform_initialization:
        full = torch.empty(cut.size, input_size)  # the same on all ranks, so copies are equal
        init_method(full)
        projection.weight.data.copy_(shard(full, projection.weight, tp.rank()))
    return projection


def build_output_projection(
    place: MixerPlace,
    config: HybridConfig,
    width: int,
    *,
    bias: bool = False,
    output_size: int | None = None,
    init_method: Callable | None = None,
) -> nn.Module:
    """Build width -> hidden_size (or output_size), split over the ranks by input column and summed
    over them; drawn by `init_method`, or as the config draws output layers."""
    tp = place.pg_collection.tp
    projection = place.submodules.row(
        width,
        output_size or config.hidden_size,
        config=config,
        init_method=init_method or config.output_layer_init_method,
        bias=bias,
        input_is_parallel=True,
        skip_bias_add=True,
        is_expert=False,
        tp_comm_buffer_name="fc2",
        tp_group=tp,
    )
    mark_tensor_parallel(projection.weight, Cut(1, (width,), tp.size()))
    return projection


def replicated_weight(
    config: HybridConfig, *shape: int, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """Build a replicated weight, drawn like those of the projections. Under sequence parallelism
    core's `finalize_model_grads` sums the gradients of all ranks' rows.

    Args:
        dtype: `config.params_dtype` by default.
    """
    weight = torch.empty(shape)
    if config.perform_initialization:
        config.init_method(weight)
    parameter = nn.Parameter(weight.to(dtype or config.params_dtype))
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


class ReplicatedLinear(nn.Module):
    """A replicated projection without bias."""

    def __init__(self, config: HybridConfig, input_size: int, output_size: int):
        super().__init__()
        self.weight = replicated_weight(config, output_size, input_size)

    def forward(self, x: Tensor) -> Tensor:
        """Project [..., input_size] -> [..., output_size]."""
        return linear(x, self.weight, self)
