"""Policy: every choice of the cache in one place.

`PrefixCache` asks where states are to be saved, what each candidate for eviction is worth, and
whether a request may start at that price; it tells what happened. What is asked never changes the
tree. The defaults here are those of a policy that learns nothing: `LRUPolicy` in
benchmarks/replay/ adds a few lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Kind, Origin, Path
from megatron_hybrid.cache.lazy_heap import Key
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.placement import NO_RUNG

TOKENS_PER_PAGE = 1024
"""Where nothing attends to everything, cached tokens cost no pages: the index then keeps at most
this many per page of the pool (4 KiB of host memory), or `MIN_KNOWN_TOKENS`."""
KNOWN_TOKENS = 1.4
"""Tokens that the index knows at most, per token whose KV fits in the pool (4 bytes each, long runs
without KV about 2); what was dropped still teaches where prompts part. A sequence counts as
`SEQUENCE_TOKENS` more."""
MIN_KNOWN_TOKENS = 1 << 24
"""Tokens that it may know in any case (64 MiB): a small pool's sessions are away for longer than
their tokens would be known, and a session that comes back as a stranger teaches nothing."""


class Prompt(NamedTuple):
    """A prompt that was admitted and is about to be prefilled."""

    length: int
    skipped: int
    """p: leading tokens that are not computed."""
    known: int
    """Leading tokens that the tree knew."""
    declared: Sequence[int]
    """Positions whose state the caller wants saved."""
    messages: Sequence[int]
    """Positions where messages of a chat start."""
    lost_fork: int
    """What `Policy.on_request` said."""


class NewState(NamedTuple):
    """A state that a running request could save."""

    position: int
    kind: Kind
    origin: Origin
    """Of its request."""
    pages: int
    """That it takes, local blocks included."""
    shared_tokens: int
    """q of its request: KV before it was there already."""
    known: Checkpoint | None
    """The record of its position, if there is one."""
    below: Checkpoint | None
    """The next stored state on the way to the root."""
    same_forward: Sequence[tuple[int, Kind]]
    """What the request saves in the same forward."""


class Evictable(Protocol):
    """What may be evicted now, as `Policy.victim` and `Policy.maintain` see it."""

    def least(self) -> tuple[Edge | Checkpoint, Key] | None:
        """The candidate of the least value, by a heap over `Policy.state_value` and `tail_value`;
        None: there is none."""

    def candidates(self) -> Iterator[Edge | Checkpoint]:
        """All of them: stored states, and leaves with a tail of KV to drop. Some may be pinned;
        `make_room` then asks again without them."""

    def num_values(self) -> int:
        """Number of candidates whose values change."""

    def refresh(self, most: int) -> None:
        """Compute the next `most` values anew, in rotation. Values that rise are noticed without
        it; it is for those that fall."""


class Policy(Protocol):
    """Where states are saved, what is evicted first, and who may start.

    A policy keeps the records of use: `on_request` sets `last_use` and `uses` of the checkpoints
    that served. Ranks must decide alike: no clock, no random number, no hash of a string.
    """

    spec: CacheSpec
    now: int = 0
    """Admitted requests: the clock of `Checkpoint.born` and `last_use`; `on_request` counts."""
    rung_tokens: int = NO_RUNG
    """Distance of the states that are saved on the way in answers."""

    # ---- placement ----

    def positions(self, prompt: Prompt) -> tuple[dict[int, Kind], dict[int, Kind]]:
        """Positions in (p, L] whose state the prefill should save; and positions of which only a
        record is kept."""
        raise NotImplementedError

    def new_value(self, new: NewState) -> float:
        """What a new state is worth per page: what is worth less is evicted for it. infinity: it
        is saved at any price."""
        return math.inf

    def replaces(self, new: NewState) -> bool:
        """Whether a state that found no room takes that of `new.below`."""
        return False

    # ---- learning ----

    def on_request(
        self, path: Path, resumed: Checkpoint | None, prompt_tokens: int
    ) -> tuple[Origin, int]:
        """A prompt was admitted, the path being what was known of it, `resumed` the state that it
        is restored from. Returns its origin, and the position of a lost state in (p, q] that is
        worth saving again (0: none)."""
        raise NotImplementedError

    def on_watch(self, checkpoint: Checkpoint) -> None:
        """A position has a record from now on."""

    def on_change(self, checkpoint: Checkpoint) -> None:
        """The kind of a checkpoint, or whether a deeper state is stored, is about to change."""

    def on_finish(self, answer_tokens: int) -> None:
        """A request ended after so many tokens of its answer."""

    def maintain(self, evictable: Evictable, num_watched: int) -> None:
        """Called once per admitted request. num_watched: records in the tree."""

    def check_integrity(self, watched: Iterable[Checkpoint]) -> None:
        """Raises RuntimeError unless the policy keeps account of all records in the tree."""

    # ---- eviction ----

    def state_value(self, checkpoint: Checkpoint, ref_counts: np.ndarray) -> float:
        """What a stored state is worth per page. Equal ones go in order of `last_use`. ref_counts:
        `PageAllocator.ref_counts`."""
        return 0.0

    def tail_value(self, edge: Edge) -> float | None:
        """What the last block of a leaf's KV is worth per page; None: nothing resumes from it, so
        it goes before all that has a value. Equal ones go in order of `last_access`."""
        return None if self.spec.needs_state else 0.0

    def equal_start(self, edge: Edge, start: int) -> int:
        """How far back the blocks at a leaf's end are worth no more than the last one: they may be
        dropped at once. From `start` to where the last block begins."""
        return start

    def victim(self, evictable: Evictable) -> tuple[Edge | Checkpoint, Key] | None:
        """What goes next, and its place in the order; None: nothing can."""
        return evictable.least()

    # ---- admission ----

    def admission_value(self, running: int, held_back: int) -> float:
        """What one more request beside `running` others is worth: it starts if what has to go for
        it is worth less, all its pages together. held_back: attempts in a row that did not."""
        return math.inf

    # ---- memory ----

    def known_limit(self, num_pages: int) -> int:
        """Tokens that the tree knows at most, held or not, beside a pool of so many pages."""
        spec, known = self.spec, TOKENS_PER_PAGE * num_pages
        if spec.kv_pages_per_block:
            fits = num_pages // spec.kv_pages_per_block * spec.block_size_tokens
            known = int(KNOWN_TOKENS * fits)
        return max(MIN_KNOWN_TOKENS, known)
