"""StageBoundary: the tensors that pass from one pipeline stage to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.sharding.collectives import gather_rows, split_rows


class StageBoundary:
    """What stages send: hidden states [s, b, width], and beside them the word embedding if the
    pattern has a `Z` behind the first stage. Under sequence parallelism a rank sends its rows, of
    s / tp tokens.

    Args:
        config: of the model.
        tp: ranks that share the rows.
        stages: layer symbols of each pipeline stage.
    """

    def __init__(
        self, config: HybridConfig, tp: dist.ProcessGroup, stages: Sequence[Sequence[str]]
    ):
        self._config, self._tp = config, tp
        # The layers of a shared block see the embedding too, and it is on the first stage.
        self._has_embedding = any("Z" in symbols for symbols in stages[1:])
        self.width = config.hidden_size * (2 if self._has_embedding else 1)

    def room(self, num_tokens: int, device: torch.device) -> Tensor:
        """Room for what one sequence of `num_tokens` tokens sends, [s, 1, width]."""
        if self._config.sequence_parallel:
            num_tokens //= self._config.tensor_model_parallel_size
        shape = num_tokens, 1, self.width
        return torch.empty(shape, dtype=self._config.pipeline_dtype, device=device)

    def give(self, hidden_Th: Tensor, embedding_Th: Tensor | None, b: int) -> Tensor:
        """What b sequences send. hidden_Th: this rank's rows; embedding_Th: all rows."""
        splits_rows = self._config.sequence_parallel
        if self._has_embedding:
            if splits_rows:
                embedding_Th = split_rows(embedding_Th, self._tp)
            hidden_Th = torch.cat((hidden_Th, embedding_Th), -1)
        if splits_rows:
            return hidden_Th.view(-1, b, self.width)
        return hidden_Th.view(b, -1, self.width).transpose(0, 1).contiguous()

    def take(self, sent: Tensor) -> tuple[Tensor, Tensor | None]:
        """This rank's rows of the hidden states, and the embedding of all rows if it is sent."""
        splits_rows = self._config.sequence_parallel
        rows_Tc = (sent if splits_rows else sent.transpose(0, 1)).flatten(0, 1)
        if not self._has_embedding:
            return rows_Tc, None
        hidden_Th, embedding_Th = rows_Tc.chunk(2, -1)
        if splits_rows:
            embedding_Th = gather_rows(embedding_Th, self._tp, whole_gradient=True)
        return hidden_Th, embedding_Th
