"""Other policies over this project's cache: same pages, tree and leases, other choices.

engines/ has simulators of other engines with memory layouts of their own (whole blocks, states at
block ends); here only the policy differs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.replay.engines.marconi import normalised
from megatron_hybrid.cache.index.tree import NO_ORIGIN, Checkpoint, Edge, Kind, Origin, Path
from megatron_hybrid.cache.lazy_heap import Key
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.protocol import Evictable, Policy, Prompt


class LRUPolicy(Policy):
    """States at junctions and at the ends of prompts and answers, each saved at any price; what was
    not used for longest goes first."""

    def __init__(self, spec: CacheSpec):
        self.spec = spec

    def positions(self, prompt: Prompt) -> tuple[dict[int, Kind], dict[int, Kind]]:
        saved = {position: Kind.JUNCTION for position in (prompt.known, *prompt.declared)}
        saved[prompt.length] = Kind.PROMPT_END
        return {p: k for p, k in saved.items() if prompt.skipped < p <= prompt.length}, {}

    def on_request(
        self, path: Path, resumed: Checkpoint | None, prompt_tokens: int
    ) -> tuple[Origin, int]:
        self.now += 1
        if resumed is not None:
            resumed.uses += 1
        for checkpoint in path.checkpoints():
            if checkpoint is resumed or checkpoint.pages is None:  # it may be stored again
                checkpoint.last_use = self.now
        return NO_ORIGIN, 0


class MarconiPolicy(LRUPolicy):
    """Marconi's choices (Pan et al., MLSys 2025): states at junctions and at the ends of answers;
    by recency + alpha x FLOPs saved per byte, each normalised over the candidates. States at forks
    go last.

    Args:
        flops: of a prompt of so many tokens.
        alpha: weight of the FLOPs.
    """

    def __init__(self, spec: CacheSpec, flops: Callable[[int], float], alpha: float):
        super().__init__(spec)
        self._flops = flops
        self._alpha = alpha

    def positions(self, prompt: Prompt) -> tuple[dict[int, Kind], dict[int, Kind]]:
        saved, _ = super().positions(prompt)
        return {p: kind for p, kind in saved.items() if kind is Kind.JUNCTION}, {}

    def victim(self, evictable: Evictable) -> tuple[Edge | Checkpoint, Key] | None:
        found = [each for each in evictable.candidates() if not is_fork(each)]
        if not found:
            return evictable.least()
        edges = [each.edge if isinstance(each, Checkpoint) else each for each in found]
        used = np.array([edge.last_access for edge in edges], dtype=float)
        gain = np.array([self.flops_per_byte(each) for each in found])
        score = normalised(used) + self._alpha * normalised(gain)
        first = int(score.argmin())
        return found[first], (1, float(score[first]), edges[first].last_access)

    def flops_per_byte(self, candidate: Edge | Checkpoint) -> float:
        """What it saves over what is stored above it, for each byte that its eviction frees. A leaf
        goes with its KV; KV that no state reaches saves nothing."""
        spec = self.spec
        if isinstance(candidate, Edge):
            if spec.needs_state:
                return 0.0
            start, end, freed = candidate.start, candidate.held_end, 0
        else:
            previous = candidate.previous()
            start, end = previous.position if previous else 0, candidate.position
            freed = candidate.num_pages * spec.page_bytes
            if candidate.is_shadowed():
                return (self._flops(end) - self._flops(start)) / freed
        return (self._flops(end) - self._flops(start)) / (
            freed + (end - start) * spec.kv_bytes_per_token
        )


def is_fork(candidate: Edge | Checkpoint) -> bool:
    """Whether it is a state at which prompts part."""
    return isinstance(candidate, Checkpoint) and candidate.is_fork()
