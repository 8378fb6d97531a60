"""A policy: what was not used for longest goes first."""

from __future__ import annotations

from megatron_hybrid.cache.index.tree import NO_ORIGIN, Checkpoint, Kind, Origin, Path
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.protocol import Policy, Prompt


class LRUPolicy(Policy):
    """States at junctions and at the ends of prompts and answers, each saved at any price. All are
    worth the same, so the one that was used longest ago is evicted first."""

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
