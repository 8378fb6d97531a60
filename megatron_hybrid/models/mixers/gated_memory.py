"""The gated memory unit (GMU) of SambaY, arXiv 2507.06607."""

from __future__ import annotations

from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.base import MixerPlace, StackInputs
from megatron_hybrid.models.mixers.gated_norm import gated
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.recurrent import RecurrentMixer


class GatedMemoryMixer(RecurrentMixer):
    """out_proj(memory * SiLU(in_proj(x))): the memory is what the last Mamba-1 layer before it gave
    for the same token in the same forward, before its gate. Nothing is kept between calls."""

    takes_stack_inputs = True

    def __init__(self, config: HybridConfig, place: MixerPlace):
        inner, bias = config.mamba1_inner_size, config.mamba1_proj_bias
        super().__init__(config, place, sections={"z": inner}, bias=bias)
        self.source = config.pattern.memory_sources[place.layer_number]
        self.out_proj = self._build_output(inner, bias)

    def forward(
        self, hidden_Th: Tensor, context: MixerContext, inputs: StackInputs
    ) -> tuple[Tensor, Tensor | None]:
        """[T, hidden] -> (output [T, hidden], bias or None)."""
        z_TC, _ = self.in_proj(hidden_Th)
        return self.out_proj(gated(inputs.memories[self.source], z_TC))
