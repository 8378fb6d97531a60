"""The tensor-parallel projections into and out of a mixer, marked for sharding when built."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import nn

from megatron_hybrid.config import HybridConfig
from megatron_hybrid.models.tensor_sharding import mark_tensor_parallel


def build_input_projection(
    spec: ModuleSpec | type,
    config: HybridConfig,
    sections: Sequence[int],
    pg_collection: ProcessGroupCollection,
    *,
    comm_buffer: str,
    section_names: Sequence[str] | None = None,
    bias: bool = False,
) -> nn.Module:
    """hidden_size -> sum(sections), split over the ranks by output row.

    Args:
        sections: full sizes of the blocks that lie one after another, each cut on its own.
        comm_buffer: which of Transformer Engine's communication buffers it shares ("fc1", "qkv").
        section_names: what core's distributed checkpoints call the sections, where they do.
    """
    projection = build_module(
        spec,
        config.hidden_size,
        sum(sections),
        config=config,
        init_method=config.init_method,
        gather_output=False,
        bias=bias,
        skip_bias_add=False,
        is_expert=False,
        tp_comm_buffer_name=comm_buffer,
        tp_group=pg_collection.tp,
    )
    marked_sections = sections if len(sections) > 1 else None
    mark_tensor_parallel(projection.weight, 0, marked_sections, section_names)
    if bias:
        mark_tensor_parallel(projection.bias, 0, marked_sections)
    return projection


def build_output_projection(
    spec: ModuleSpec | type,
    config: HybridConfig,
    width: int,
    pg_collection: ProcessGroupCollection,
    *,
    comm_buffer: str,
    bias: bool = False,
) -> nn.Module:
    """width -> hidden_size, split over the ranks by input column and summed over them."""
    projection = build_module(
        spec,
        width,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=bias,
        input_is_parallel=True,
        skip_bias_add=True,
        is_expert=False,
        tp_comm_buffer_name=comm_buffer,
        tp_group=pg_collection.tp,
    )
    mark_tensor_parallel(projection.weight, 1)
    return projection
