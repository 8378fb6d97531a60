"""A layer kind: each channel is averaged over the tokens before, with a decay that is learnt."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from megatron_hybrid.models.config.field_group import LayerFields
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_pattern import LayerKind
from megatron_hybrid.models.mixers.base import LayerCache, Mixer, MixerPlace, StateTensor
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.ops import RaggedLayout
from megatron_hybrid.ops.slot_states import SlotOp


def scan(
    x_TC: Tensor, decay_C: Tensor, initial_states_RC: Tensor | None, layout: RaggedLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """h_t = a h_{t-1} + (1 - a) x_t, for each sequence of a ragged batch.

    Returns:
        The averages of all rows, those at the ends of the sequences, and those after the tokens
        that the layout captures.
    """
    if initial_states_RC is None:
        initial_states_RC = x_TC.new_zeros(layout.num_sequences, x_TC.shape[1])
    averages, final = [], []
    for average_C, (start, end) in zip(initial_states_RC, pairwise(layout.cu_seqlens)):
        for x_C in x_TC[start:end]:
            average_C = decay_C * average_C + (1 - decay_C) * x_C
            averages.append(average_C)
        final.append(average_C)
    y_TC = torch.stack(averages)
    captured_nC = y_TC[[count - 1 for count in layout.captures]]
    padding = y_TC.new_zeros(layout.num_padding, y_TC.shape[1])
    return torch.cat([y_TC, padding]), torch.stack(final), captured_nC


moving_average = SlotOp(
    "moving_average", scan, {"x_TC": "T C", "decay_C": "C"}, state="state C", conditions={}
)
"""`scan` on states in the slots of running requests, with checks of sizes and dtypes."""


class MovingAverageFields(LayerFields):
    """What the layer reads of a config's `layer_options`: `decay`, where training starts."""

    def check(self) -> None:
        decay = self.layer_options.get("decay", 0.9)
        if not isinstance(decay, float) or not 0 < decay < 1:
            raise ValueError(f"layer_options has decay={decay!r}; use a number between 0 and 1")


class MovingAverageMixer(Mixer):
    """A moving average and a projection. Every tensor-parallel rank computes all of it.

    Args:
        config: of the layer.
        place: its number, among others.
    """

    def __init__(self, config: HybridConfig, place: MixerPlace):
        super().__init__(config)
        self.layer_number = place.layer_number
        width, dtype = config.hidden_size, config.params_dtype
        start = torch.tensor(config.layer_options.get("decay", 0.9)).logit()
        self.decay_logit = nn.Parameter(torch.full((width,), start.item()))
        self.out_proj = nn.Linear(width, width, bias=False, dtype=dtype)

    def cache_requirements(self) -> LayerCache:
        """One vector for each sequence."""
        width, decay_C = self.config.hidden_size, self.decay_logit.sigmoid()
        return LayerCache(states=(StateTensor("average", (width,), torch.float32, decay_C),))

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """[T, hidden] -> (output [T, hidden], no bias)."""
        average_Th = moving_average(
            hidden_Th.float(),
            self.decay_logit.sigmoid(),
            context.states(self.layer_number, "average"),
            context.ragged_layout(),
        )
        return self.out_proj(average_Th.to(hidden_Th.dtype)), None


MOVING_AVERAGE = LayerKind(
    meaning="moving average",
    mixer="hybrid_extras.moving_average:MovingAverageMixer",
    fields=(MovingAverageFields,),
)
