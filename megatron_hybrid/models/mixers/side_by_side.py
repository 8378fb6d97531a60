"""Attention in parallel with another part in one layer: Mamba-2 in Falcon-H1 (arXiv 2507.22448), an
MLP in Cohere's Command R (arXiv 2504.00698)."""

from typing import Literal

from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.attention import AttentionMixer
from megatron_hybrid.models.mixers.base import LayerCache, Mixer, MixerPlace, with_bias
from megatron_hybrid.models.mixers.mamba2 import Mamba2Mixer
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.mlp import MLPMixer


class ParallelHeadsMixer(Mixer):
    """a_out attention(a_in x) + m_out mamba(m_in x); the factors are fields of the config."""

    recompute_name = "parallel_heads"
    recompute_parts = ("core_attn",)

    splits_rows = True

    def __init__(self, config: HybridConfig, place: MixerPlace):
        super().__init__(config)
        self.attention = AttentionMixer(config, place)
        self.mamba = Mamba2Mixer(config, place)

    def cache_requirements(self) -> LayerCache:
        """Describe the keys and values of attention, and the states of Mamba-2."""
        kv = self.attention.cache_requirements().kv
        return LayerCache(kv=kv, states=self.mamba.cache_requirements().states)

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], None)."""
        config = self.config
        attended = self.attention(hidden_Th * config.attention_input_multiplier, context)
        scanned = self.mamba(hidden_Th * config.mamba_input_multiplier, context)
        return (
            with_bias(*attended) * config.attention_output_multiplier
            + with_bias(*scanned) * config.mamba_output_multiplier
        ), None


class AttentionAndMLPMixer(Mixer):
    """attention(x) + MLP(x), of one normed input x.

    Args:
        locality: see `AttentionMixer`.
    """

    recompute_name = "attention_and_mlp"
    recompute_parts = ("core_attn",)

    splits_rows = True

    def __init__(
        self, config: HybridConfig, place: MixerPlace, locality: Literal["window"] | None = None
    ):
        super().__init__(config)
        self.attention = AttentionMixer(config, place, locality)
        self.mlp = MLPMixer(config, place)

    def cache_requirements(self) -> LayerCache:
        """Describe the keys and values."""
        return self.attention.cache_requirements()

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], None)."""
        parts = self.attention(hidden_Th, context), self.mlp(hidden_Th, context)
        return with_bias(*parts[0]) + with_bias(*parts[1]), None
