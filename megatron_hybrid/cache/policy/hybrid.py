"""HybridPolicy: placement and eviction by expected uses, which are learnt online."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Kind, Origin, Path
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.admission import AnswerLengths, saved_by_one_more
from megatron_hybrid.cache.policy.amortized_sweep import AmortizedSweep
from megatron_hybrid.cache.policy.parts import Parts
from megatron_hybrid.cache.policy.placement import (
    NO_RUNG,
    prefill_positions,
    rung_distance,
    tail_position,
)
from megatron_hybrid.cache.policy.protocol import Evictable, NewState, Policy, Prompt
from megatron_hybrid.cache.policy.reuse import ReuseModel
from megatron_hybrid.cache.policy.values import (
    checkpoint_value,
    equal_start,
    kv_pages,
    own_rate,
    rebuild_work,
    tail_value,
    value_per_page,
)

MAX_REFRESHED = 512
"""Most values of states, and in pure attention of tails, that one request recomputes: two to four
milliseconds."""


class HybridPolicy(Policy):
    """Value of a candidate = expected uses per request x work to be done again / pages.

    Args:
        spec: bytes per token and sequence, windows and chunks.
        parts: by name (`Parts`); False leaves a part out.
    Raises:
        TypeError: there is no part of that name.
    """

    def __init__(self, spec: CacheSpec, **parts: bool):
        self.spec = spec
        self.parts = Parts(**parts)
        self._needs_state = spec.needs_state
        self.reuse = ReuseModel(spec.needs_state, self.parts)
        self.rung_tokens = NO_RUNG
        if spec.needs_state and self.parts.rungs:
            self.rung_tokens = rung_distance(
                *spec.rung_bytes,
                spec.local_reach,
                spec.block_size_tokens,
            )
        self.answers = AnswerLengths()
        self._appraised = None, (0.0, 0.0, 0)
        self._sweep = AmortizedSweep(least=4, share=8, at_once=MAX_REFRESHED)
        self._never_saved = {
            kind
            for kind, saved in (
                (Kind.JUNCTION, self.parts.junctions),
                (Kind.PROMPT_END, self.parts.prompt_ends),
            )
            if not saved
        }

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
            length, skipped, known, declared, prompt.messages, tail, self.rung_tokens
        )
        return {p: kind for p, kind in saved.items() if kind not in self._never_saved}, {}

    def new_value(self, new: NewState) -> float:
        if not self.parts.price:
            return math.inf
        rate, work, start = self._appraise(new)
        pages = new.pages
        if self._needs_state and self.parts.exclusive_kv:
            pages += kv_pages(max(0, new.position - max(start, new.shared_tokens)), self.spec)
        return value_per_page(rate, work, pages)

    def replaces(self, new: NewState) -> bool:
        """Whether the previous state's own uses are worth less than the tokens between both."""
        parts, previous = self.parts, new.previous
        if previous is None or not (parts.price and parts.replacing and self._needs_state):
            return False
        rate, work, start = self._appraise(new)
        if start > previous.position:
            return False
        if parts.own_uses:
            own = own_rate(previous, new.known, self.reuse)
        else:
            own = self.reuse.rate(previous, covered=True)
        if parts.work:
            own *= rebuild_work(previous, previous.previous(), self.spec)
        return rate * work > own

    def _appraise(self, new: NewState) -> tuple[float, float, int]:
        """Expected uses of a new state, the work that it saves, and the position where that work
        starts. The last answer is kept: `replaces` asks right after `new_value`."""
        if self._appraised[0] is not new:
            reuse = self.reuse
            known, start, work = new.known, self._start(new), 1.0
            rate = reuse.rate(known) if known else reuse.new_rate(new.kind, new.origin)
            if self._needs_state and self.parts.work:
                work = self.spec.work(start, new.position)
            self._appraised = new, (rate, work, start)
        return self._appraised[1]

    def _start(self, new: NewState) -> int:
        """The position that would serve without the new state: of the previous state, or of the
        last one before it in the same forward. Guesses (rungs, and tails before a distance was
        observed) count for rungs only, since the end may be the only position ever used."""
        start = new.previous.position if new.previous is not None else 0
        if not new.same_forward or not self.parts.same_forward:
            return start
        guesses = ()
        if new.kind is not Kind.RUNG:
            guesses = (Kind.RUNG,) if self.reuse.distances.known else (Kind.RUNG, Kind.TAIL)
        for position, kind in new.same_forward:
            if start < position < new.position and kind not in guesses:
                start = position
        return start

    # ---- learning ----

    def on_request(
        self, path: Path, resumed: Checkpoint | None, prompt_tokens: int
    ) -> tuple[Origin, int]:
        return self.reuse.observe(path, resumed, prompt_tokens)

    def on_watch(self, checkpoint: Checkpoint) -> None:
        self.reuse.watch(checkpoint)

    def on_change(self, checkpoint: Checkpoint) -> None:
        self.reuse.count_exposure(checkpoint)

    def on_finish(self, answer_tokens: int) -> None:
        self.answers.observe(answer_tokens)

    def maintain(self, evictable: Evictable, num_watched: int) -> None:
        self.reuse.maintain(num_watched)
        part = self._sweep.due(self.reuse.now, evictable.num_values())
        if part and self.parts.refresh:
            evictable.refresh(part)

    def check_integrity(self, watched: Iterable[Checkpoint]) -> None:
        self.reuse.check_integrity(watched)

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

    # ---- memory ----

    def known_limit(self, num_pages: int) -> int:
        if self.parts.known_tokens or not self.spec.kv_pages_per_block:
            return super().known_limit(num_pages)
        return 0
