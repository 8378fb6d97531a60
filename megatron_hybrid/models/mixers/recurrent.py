"""Base of the recurrent mixers: a projection in, a short convolution, a state, a projection out."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.base import LayerCache, Mixer, MixerPlace, StateTensor
from megatron_hybrid.models.mixers.projections import (
    build_input_projection,
    build_output_projection,
)
from megatron_hybrid.models.mixers.short_conv import ShortConv


class RecurrentMixer(Mixer):
    """Builds `in_proj` and `conv1d`, split over the tensor-parallel ranks by channels or heads.

    Args:
        sections: widths of the parts of `in_proj`'s output, by their names in core's distributed
            checkpoints.
        convolved: names of those that `conv1d` takes, as one.
        kernel_size: of the convolution.
        copies: by name, ranks that have a copy of each part of a section; none: 1.
        bias: whether `in_proj` has one.
        conv_bias: whether `conv1d` has one.
        activation: of `conv1d`, "silu" or None.
    """

    splits_rows = True

    def __init__(
        self,
        config: HybridConfig,
        place: MixerPlace,
        *,
        sections: Mapping[str, int],
        convolved: tuple[str, ...],
        kernel_size: int,
        copies: Mapping[str, int] | None = None,
        bias: bool = False,
        conv_bias: bool = False,
        activation: str | None = "silu",
    ):
        super().__init__(config)
        self.layer_number, self.pg_collection = place.layer_number, place.pg_collection
        self._output_projection = place.submodules.row
        self.in_proj = build_input_projection(
            place.submodules.input_projection,
            config,
            tuple(sections.values()),
            place.pg_collection,
            comm_buffer="fc1",
            section_names=tuple(sections),
            copies=copies and tuple(copies.get(name, 1) for name in sections),
            bias=bias,
        )
        self.conv1d = ShortConv(
            tuple(sections[name] for name in convolved),
            convolved,
            kernel_size,
            bias=conv_bias,
            tp_group=place.pg_collection.tp,
            dtype=config.params_dtype,
            activation=activation,
            copies=copies and tuple(copies.get(name, 1) for name in convolved),
        )

    def _build_output(self, width: int, bias: bool = False) -> nn.Module:
        """width channels of all ranks -> hidden_size."""
        return build_output_projection(
            self._output_projection,
            self.config,
            width,
            self.pg_collection,
            comm_buffer="fc2",
            bias=bias,
        )

    def cache_requirements(self) -> LayerCache:
        """A convolution tail, and the state if there is one."""
        return LayerCache(states=(self.conv1d.state(), *self.recurrent_states()))

    def recurrent_states(self) -> tuple[StateTensor, ...]:
        """States of the recurrence, in addition to the tail."""
        return ()

    def _state(
        self, name: str, shape: tuple[int, ...], full_size: int, decay: Tensor
    ) -> StateTensor:
        """Arguments as of `StateTensor`; it is kept in the dtype of the config."""
        return StateTensor(name, shape, self.config.recurrent_state_dtype, decay, full_size)
