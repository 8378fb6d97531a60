"""The gated short convolution of LFM2, a layer that mixes only the last few tokens."""

from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.base import MixerPlace
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.recurrent import RecurrentMixer


class GatedShortConvMixer(RecurrentMixer):
    """y = C * conv(B * x), where B, C and x are projections of the layer's input."""

    recompute_name = "short_conv"

    def __init__(self, config: HybridConfig, place: MixerPlace):
        width, bias = config.hidden_size, config.short_conv_bias
        super().__init__(
            config,
            place,
            sections=dict.fromkeys(("B", "C", "x"), width),
            convolved=("x",),
            kernel_size=config.short_conv_kernel,
            bias=bias,
            conv_bias=bias,
            activation=None,
        )
        self.out_proj = self._build_output(width, bias)

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], bias or None)."""
        projected, _ = self.in_proj(hidden_Th)
        B_TC, C_TC, x_TC = projected.chunk(3, -1)
        return self.out_proj(C_TC * self.conv1d(B_TC * x_TC, context, self.layer_number))
