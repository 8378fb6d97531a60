"""The gated short convolution of LFM2, a layer that mixes only the last few tokens."""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.base import LayerCache, Mixer, MixerSubmodules
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import (
    build_input_projection,
    build_output_projection,
)
from megatron_hybrid.models.mixers.short_conv import ShortConv


class GatedShortConvMixer(Mixer):
    """y = C * conv(B * x), where B, C and x are projections of the layer's input.

    Args:
        config: its `short_conv_*` fields are used; there are `hidden_size` channels.
        submodules: classes of the projections.
        layer_number: from 1, within the pipeline stage.
        pg_collection: process groups; `tp` is used.
    """

    recompute_name = "short_conv"

    splits_rows = True
    input_projection = "in_proj"

    def __init__(
        self,
        config: HybridConfig,
        submodules: MixerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
    ):
        super().__init__(config)
        self.layer_number = layer_number
        width, bias = config.hidden_size, config.short_conv_bias
        self.in_proj = build_input_projection(
            submodules.input_projection,
            config,
            (width, width, width),
            pg_collection,
            comm_buffer="fc1",
            section_names=("B", "C", "x"),
            bias=bias,
        )
        self.conv1d = ShortConv(
            (width,),
            ("x",),
            config.short_conv_kernel,
            bias=bias,
            tp_group=pg_collection.tp,
            dtype=config.params_dtype,
            activation=None,
        )
        self.out_proj = build_output_projection(
            submodules.row, config, width, pg_collection, comm_buffer="fc2", bias=bias
        )

    def cache_requirements(self) -> LayerCache:
        """A convolution tail."""
        return LayerCache(states=(self.conv1d.state(),))

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """[T, hidden] -> (output [T, hidden], bias or None)."""
        projected, _ = self.in_proj(hidden_Th)
        B_TC, C_TC, x_TC = projected.chunk(3, -1)
        return self.out_proj(C_TC * self.conv1d(B_TC * x_TC, context, self.layer_number))
