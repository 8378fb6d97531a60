"""What follows a restore, in float64: the same tokens from the exact states or from others."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.inference.memory.cache_pool import CachePool, cache_spec_of
from megatron_hybrid.inference.scheduling.step_plan import StepPlan, Work
from megatron_hybrid.inference.worker.context import DynamicInferenceContext
from megatron_hybrid.models.mixers.base import LayerCache

States = dict[tuple[int, str], Tensor]
"""(layer number, name) -> the state of every sequence, `[R, *shape]`."""


class Restores:
    """Sequences that have run up to a position each.

    Args:
        model: any; it is converted to float64, so that differences of 1e-9 can be seen.
        sequences: token ids, `num_tokens` beyond each position.
        positions: where each sequence is cut.
        num_tokens: tokens that follow.
    """

    def __init__(self, model, sequences: list[np.ndarray], positions: list[int], num_tokens: int):
        self.model = model.double().eval()
        self.positions, self.num_tokens = positions, num_tokens
        self.layers = [_in_float64(layer) for layer in model.cache_requirements()]
        hidden_size, count = model.config.hidden_size, len(sequences)
        longest = max(positions) + num_tokens
        spec = cache_spec_of(self.layers, hidden_size, torch.float64, 16)
        blocks = spec.num_blocks(longest)
        columns = [spec.kv_pages_per_block, *(spec.pages_per_block[g] for g in spec.local_groups)]
        self.memory = CachePool(
            spec,
            self.layers,
            hidden_size,
            torch.float64,
            1 + count * blocks * sum(columns),
            count,
            torch.device("cpu"),
        )
        most = max(longest, count * num_tokens)
        self.context = DynamicInferenceContext(self.memory, count, most, longest, 0)
        pages = iter(range(1, len(self.memory.pool)))
        self.requests = []
        for slot, tokens in enumerate(sequences):
            tables = [
                np.array([next(pages) for _ in range(blocks * n)], np.int32).reshape(blocks, n)
                for n in columns
            ]
            self.requests.append((slot, np.asarray(tokens, np.int32), tables))
        for index, position in enumerate(positions):
            self._forward([self._work(index, 0, position)])
        self._slots = self.memory.slots.clone()

    def _work(self, index: int, start: int, count: int, num_logits: int = 0) -> Work:
        slot, tokens, tables = self.requests[index]
        return Work(index, slot, start, tokens[start : start + count], 0, tables, num_logits)

    @torch.inference_mode()
    def _forward(self, works: list[Work]) -> Tensor:
        self.context.begin_step(StepPlan(work=works))
        return self.model(self.context.input_ids, inference_context=self.context)[0]

    def states(self) -> States:
        """The exact states, fp32, of all that an encoding may touch."""
        self.memory.slots.copy_(self._slots)
        return {
            (number, state.name): self.memory.state(number, state.name).float()
            for number, layer in enumerate(self.layers, start=1)
            for state in layer.states
            if state.decay is not None
        }

    def decays(self) -> States:
        """Return what a token leaves of each state, by the parameters of its layer."""
        return {
            (number, state.name): state.decay.float()
            for number, layer in enumerate(self.layers, start=1)
            for state in layer.states
            if state.decay is not None
        }

    def log_probs(self, states: States) -> Tensor:
        """Log-probabilities `[R, tokens, V]` after each of the tokens that follow."""
        self.memory.slots.copy_(self._slots)
        for (number, name), state in states.items():
            self.memory.state(number, name).copy_(state)
        works = [
            self._work(index, position, self.num_tokens, num_logits=self.num_tokens)
            for index, position in enumerate(self.positions)
        ]
        logits = self._forward(works)
        return logits.view(len(works), self.num_tokens, -1).log_softmax(-1)


def _in_float64(layer: LayerCache) -> LayerCache:
    return replace(
        layer, states=tuple(replace(state, dtype=torch.float64) for state in layer.states)
    )


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL(exact || other) of each distribution, `[R, tokens]`."""
    return (exact.exp() * (exact - other)).sum(-1)
