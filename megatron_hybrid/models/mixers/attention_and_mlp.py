"""Attention and an MLP in parallel in one layer, as in Cohere's Command R (arXiv 2504.00698)."""

from typing import Literal

from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.attention import AttentionMixer
from megatron_hybrid.models.mixers.base import LayerCache, Mixer, MixerPlace, with_bias
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.mlp import MLPMixer


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
        """Keys and values."""
        return self.attention.cache_requirements()

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, None]:
        """[T, hidden] -> (output [T, hidden], None)."""
        parts = self.attention(hidden_Th, context), self.mlp(hidden_Th, context)
        return with_bias(*parts[0]) + with_bias(*parts[1]), None
