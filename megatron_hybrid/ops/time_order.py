"""TimeOrder: the tokens of a ragged batch in the order of a plain recurrence."""

from __future__ import annotations

import numpy as np
import torch

from megatron_hybrid.ops.permutation import Permutation, Waves
from megatron_hybrid.ops.ragged import RaggedLayout


class TimeOrder:
    """The tokens of all sequences after the leading steps, row by row: see `Waves`. No row is
    padded.
    """

    @classmethod
    def of(cls, layout: RaggedLayout, device: torch.device | str) -> TimeOrder:
        """The order of a layout, made once per device and cached in the layout."""
        return layout.cached(("time_order", torch.device(device)), lambda: cls(layout, device))

    def __init__(self, layout: RaggedLayout, device: torch.device | str) -> None:
        waves, num_tokens = (
            Waves(layout.lengths[layout.num_steps :], device),
            layout.num_step_tokens,
        )
        self.row_sizes, self.tokens, self.sequences = waves.sizes, waves.items, waves.sequences
        tokens = [count - 1 - num_tokens for count in layout.captures if count > num_tokens]
        places = waves.places[tokens] if tokens else np.arange(0)
        in_time = np.argsort(places)
        self.captured: list[int] = places[in_time].tolist()
        """Places of the captured tokens in time order, ascending."""
        self.captures = Permutation(in_time, device)
