"""The layer that adds a per-layer embedding to the residual stream (Gemma 3n, Gemma 4)."""

from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.base import Mixer, MixerPlace, StackInputs
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import ReplicatedLinear
from megatron_hybrid.ops import activate


class PerLayerInputMixer(Mixer):
    """projection(activation(gate(x)) * input), with this layer's input of `PerLayerEmbedding`.
    Replicated on all ranks.
    """

    splits_rows = True
    takes_stack_inputs = True

    def __init__(self, config: HybridConfig, place: MixerPlace):
        super().__init__(config)
        self.index = config.pattern.symbols[: place.layer_number - 1].count("P")
        """Number of layers of this symbol before this one."""
        size = config.per_layer_input_size
        self.gate = ReplicatedLinear(config, config.hidden_size, size)
        self.projection = ReplicatedLinear(config, size, config.hidden_size)

    def forward(
        self, hidden_Th: Tensor, context: MixerContext, inputs: StackInputs
    ) -> tuple[Tensor, None]:
        """[T, hidden] -> (output [T, hidden], None)."""
        inputs_Tp = inputs.per_layer_TJp[:, self.index]
        gated_Tp = activate(self.gate(hidden_Th), self.config.activation_func, inputs_Tp)
        return self.projection(gated_Tp), None
