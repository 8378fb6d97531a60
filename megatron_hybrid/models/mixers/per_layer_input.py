"""Per-layer embeddings (Gemma 3n, Gemma 4), one per token and `P` layer, and the layer that adds
them to the residual stream."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_specs import build_norm
from megatron_hybrid.models.mixers.base import Mixer, MixerPlace, StackInputs
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import ReplicatedLinear, replicated_weight
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
        """Run the mixer, [T, hidden] -> (output [T, hidden], None)."""
        inputs_Tp = inputs.per_layer_TJp[:, self.index]
        gated_Tp = activate(self.gate(hidden_Th), self.config.activation_func, inputs_Tp)
        return self.projection(gated_Tp), None


class PerLayerEmbedding(nn.Module):
    """(norm(projection of the word embedding) + another embedding of the token) / sqrt(2), separate
    for each of the J layers of the symbol `P`.

    Replicated on all ranks.

    Args:
        config: `vocab_size`, `hidden_size` and `per_layer_input_size` are used.
    """

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.size = config.per_layer_input_size
        width = config.pattern.symbols.count("P") * self.size
        self.vocab_size = config.per_layer_vocab_size or config.vocab_size
        self.weight = replicated_weight(config, self.vocab_size, width)
        self.projection = ReplicatedLinear(config, config.hidden_size, width)
        self.norm = build_norm(config, self.size)

    def forward(self, input_ids_T: Tensor, embedding_Th: Tensor) -> Tensor:
        """Map tokens, int64 [T], and their word embedding, [T, hidden], to [T, J, p]."""
        projected = self.projection(embedding_Th) * embedding_Th.shape[-1] ** -0.5
        projected_TJp = self.norm(projected.unflatten(-1, (-1, self.size)))
        # Gemma's factors of embeddings have the dtype of the weights.
        factor = rounded(self.size**0.5, self.weight.dtype)
        input_ids_T = input_ids_T.masked_fill(input_ids_T >= self.vocab_size, 0)
        own_TJp = F.embedding(input_ids_T, self.weight).view_as(projected_TJp) * factor
        return (projected_TJp + own_TJp) * 2**-0.5


@cache
def rounded(factor: float, dtype: torch.dtype) -> float:
    """Round a factor to a dtype. The result is cached, as rounding makes a tensor."""
    return torch.tensor(factor, dtype=dtype).item()
