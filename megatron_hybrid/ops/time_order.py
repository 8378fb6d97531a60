"""TimeOrder: the tokens of a ragged batch in the order of a plain recurrence."""

from __future__ import annotations

import torch

from megatron_hybrid.ops.permutation import Permutation
from megatron_hybrid.ops.ragged import RaggedLayout


class TimeOrder:
    """Row by row: the first tokens of all sequences after the leading steps, then the second ones.

    The sequences lie longest first, so that those alive in a row are a prefix of those of the row
    before (as in torch's PackedSequence). No row is padded.
    """

    @classmethod
    def of(cls, layout: RaggedLayout, device: torch.device | str) -> TimeOrder:
        """The order of a layout, made once per device and cached in the layout."""
        return layout.cached(("time_order", torch.device(device)), lambda: cls(layout, device))

    def __init__(self, layout: RaggedLayout, device: torch.device | str) -> None:
        first_seq = layout.num_steps
        lengths = layout.lengths[first_seq:]
        num_tokens = layout.num_step_tokens
        starts = [start - num_tokens for start in layout.cu_seqlens[first_seq:]]
        order = sorted(range(len(lengths)), key=lambda r: -lengths[r])
        rows = [
            [starts[r] + j for r in order if j < lengths[r]] if len(order) > 1 else [j]
            for j in range(max(lengths))
        ]
        self.row_sizes = [len(row) for row in rows]
        """Number of sequences with a token in row j."""
        tokens = [token for row in rows for token in row]
        self.tokens = Permutation(tokens, device)
        self.sequences = Permutation(order, device)

        captured = [count - 1 - num_tokens for count in layout.captures if count > num_tokens]
        place_of = {token: place for place, token in enumerate(tokens)} if captured else {}
        places = [place_of[token] for token in captured]
        in_time = sorted(range(len(places)), key=places.__getitem__)
        self.captured = [places[i] for i in in_time]
        """Places of the captured tokens in time order, ascending."""
        self.captures = Permutation(in_time, device)
