"""HybridPolicy: placement and eviction by expected uses, which are learnt online."""

import math

import numpy as np

from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Kind, Origin, Path
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.placement import (
    NO_INTERVAL,
    choose_interval,
    prefill_positions,
    tail_position,
)
from megatron_hybrid.cache.policy.protocol import Evictable, NewState, Policy, Prompt
from megatron_hybrid.cache.policy.reuse import PolicyFlags, ReuseModel
from megatron_hybrid.cache.policy.values import (
    checkpoint_value,
    equal_start,
    kv_pages,
    rebuild_work,
    tail_value,
    value_per_page,
)

OPPORTUNISTIC_TOKENS = 256
"""Distance of the positions whose states are saved while pages are free."""
REFRESHED = 8
"""Values of states, and in pure attention of tails, that each request recomputes."""
STEP_TOKENS = 200
"""Tokens that can be computed in the time in which a step reads all weights: FLOP per byte of
memory traffic of accelerators, bf16 (A100 312 T / 2.0 T = 156, H200 989 T / 4.8 T = 206, H100 989 T
/ 3.35 T = 295)."""
ANSWERS = 64
"""Number of answers in the running mean of their lengths."""


def saved_by_one_more(running: int, answer_tokens: float) -> float:
    """Compute the work per request, in tokens, saved by one more request next to `running` others.
    Concurrent requests share the cost of a step, but their KV evicts states that waiting ones would
    resume from. With few running requests the first weighs more, with many the second.

    A request takes one step for its prompt and one per token of its answer; its share of a step
    falls from 1 / running to 1 / (running + 1). Steps that it has waited count as tokens of its
    answer, so a request never waits for more than its start costs.
    """
    return STEP_TOKENS * (answer_tokens + 1) / (running * (running + 1))


class AnswerLengths:
    """Running mean of the lengths of answers."""

    def __init__(self):
        self.mean = 0.0
        """Tokens."""
        self._observed = 0

    def observe(self, tokens: int) -> None:
        """Take the length of an answer that ended into the mean."""
        self._observed = min(self._observed + 1, ANSWERS)
        self.mean += (tokens - self.mean) / self._observed


class HybridPolicy(Policy):
    """Value of a candidate = expected uses per request x work to be done again / pages.

    Args:
        spec: bytes per token and sequence, windows and chunks.
        parts: by name (`PolicyFlags`); False leaves a part out.
    Raises:
        TypeError: there is no part of that name.
    """

    def __init__(self, spec: CacheSpec, **parts: bool):
        self.spec = spec
        self.parts = PolicyFlags(**parts)
        self._needs_state = spec.needs_state
        self.reuse = ReuseModel(self.parts)
        self.opportunistic_tokens = (
            OPPORTUNISTIC_TOKENS if self.parts.opportunistic else NO_INTERVAL
        )
        self.interval_tokens = NO_INTERVAL
        if spec.needs_state and self.parts.intervals:
            self.interval_tokens = choose_interval(
                *spec.interval_bytes,
                spec.local_reach,
                spec.block_size_tokens,
            )
        self.answers = AnswerLengths()
        self._never_saved = set() if self.parts.junctions else {Kind.JUNCTION}
        if not self.parts.prompt_ends:
            self._never_saved.add(Kind.PROMPT_END)

    @property
    def now(self) -> int:
        return self.reuse.now

    # ---- placement ----

    def positions(self, prompt: Prompt) -> tuple[dict[int, Kind], dict[int, Kind]]:
        length, skipped, known = prompt.length, prompt.skipped, prompt.known
        tail = length
        if self.parts.tails:
            tail = tail_position(length, skipped, self.reuse.distances.weights())
        if not self.spec.needs_state:
            saved = {length: Kind.PROMPT_END} if skipped < length else {}
            # No state is saved there, but the uses of the KV before these positions are counted.
            watched = ((tail, Kind.TAIL), (known, Kind.JUNCTION))
            return saved, {p: kind for p, kind in watched if known <= p < length and p}
        declared = [*prompt.declared, prompt.lost_fork]
        saved = prefill_positions(
            length,
            skipped,
            known,
            declared,
            prompt.messages,
            tail,
            self.interval_tokens,
            least_gain=self.spec.block_size_tokens,
            opportunistic_tokens=self.opportunistic_tokens if prompt.has_room else NO_INTERVAL,
        )
        return {p: kind for p, kind in saved.items() if kind not in self._never_saved}, {}

    def new_value(self, new: NewState) -> float:
        if not self.parts.price:
            return math.inf
        pages = new.pages
        if self._needs_state and self.parts.exclusive_kv:
            start = max(new.shared_tokens, new.previous.position if new.previous else 0)
            pages += kv_pages(max(0, new.position - start), self.spec)
        work = rebuild_work(new.previous, new.position, self.spec, self.parts)
        return value_per_page(self._new_rate(new), work, pages)

    def replaces(self, new: NewState) -> bool:
        """Return whether the previous state is worth less than the tokens between both states."""
        parts, previous = self.parts, new.previous
        if previous is None or not (parts.price and self._needs_state):
            return False
        gained = rebuild_work(previous, new.position, self.spec, parts)
        lost = rebuild_work(previous.previous(), previous.position, self.spec, parts)
        return self._new_rate(new) * gained > self.reuse.rate(previous) * lost

    def _new_rate(self, new: NewState) -> float:
        """Return the expected uses per request of a new state."""
        if new.known is not None:
            return self.reuse.rate(new.known)
        return self.reuse.new_rate(new.kind, new.origin)

    # ---- learning ----

    def on_request(
        self, path: Path, resumed: Checkpoint | None, prompt_tokens: int
    ) -> tuple[Origin, int]:
        return self.reuse.observe(path, resumed, prompt_tokens)

    def on_watch(self, checkpoint: Checkpoint) -> None:
        self.reuse.watch(checkpoint)

    def on_wait(self, checkpoint: Checkpoint, more: int) -> None:
        checkpoint.waiting += more
        self.reuse.num_waiting += more

    def on_finish(self, answer_tokens: int) -> None:
        self.answers.observe(answer_tokens)

    def maintain(self, evictable: Evictable) -> None:
        if self.parts.refresh:
            evictable.refresh(REFRESHED)

    # ---- eviction ----

    def state_value(self, checkpoint: Checkpoint, ref_counts: np.ndarray) -> float:
        return checkpoint_value(checkpoint, self.spec, self.reuse, ref_counts, self.parts)

    def tail_value(self, edge: Edge) -> float | None:
        return None if self._needs_state else tail_value(edge, self.spec, self.reuse)

    def equal_start(self, edge: Edge, start: int) -> int:
        return equal_start(edge, start, self.spec, self.reuse)

    # ---- admission ----

    def admission_value(self, running: int, held_back: int) -> float:
        return saved_by_one_more(running, self.answers.mean + held_back)
