"""Policy: every choice of the cache in one place.

`PrefixCache` asks a policy where to save states, what each candidate for eviction is worth and
whether a request may start, and reports events to it. A policy never changes the tree. The defaults
here are those of a policy that learns nothing: `LRUPolicy` in examples/extension/ adds a few lines.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Kind, Origin, Path
from megatron_hybrid.cache.lazy_heap import Key
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.placement import NO_INTERVAL
from megatron_hybrid.utils.registry import Registry, check_class


class Prompt(NamedTuple):
    """A prompt that was admitted and is about to be prefilled."""

    length: int
    skipped: int
    """p: leading tokens that are not computed, or would not be without opportunistic states."""
    known: int
    """Leading tokens that the tree knew."""
    declared: Sequence[int]
    """Positions whose state the caller wants saved."""
    messages: Sequence[int]
    """Positions where messages of a chat start."""
    lost_fork: int
    """Position of the lost fork, as `Policy.on_request` returned it."""
    has_room: bool
    """Whether pages for a state are free."""


class NewState(NamedTuple):
    """A state that a running request could save now."""

    position: int
    kind: Kind
    origin: Origin
    """Origin of the request that saves it."""
    pages: int
    """Pages of the state, local blocks included."""
    shared_tokens: int
    """q of its request: KV before this position was cached already."""
    known: Checkpoint | None
    """The record of its position, if there is one."""
    previous: Checkpoint | None
    """The stored state before it: `Checkpoint.previous`."""


class Evictable(Protocol):
    """The candidates for eviction, as `Policy.victim` and `Policy.maintain` see them."""

    def least(self) -> tuple[Edge | Checkpoint, Key] | None:
        """Return the candidate of the least value, by a heap over `Policy.state_value` and
        `tail_value`, or None."""

    def candidates(self) -> Iterator[Edge | Checkpoint]:
        """Yield all candidates: stored states, and leaves with a tail of KV to drop. Some may be
        pinned; `make_room` then asks again without these."""

    def refresh(self, most: int) -> None:
        """Recompute the next `most` values, in rotation. Only values that fall need it; those that
        have risen are noticed at the top of the heap."""


class Policy(Protocol):
    """Decides where states are saved, what is evicted first, and which requests may start.

    A policy keeps the records of use: `on_request` sets `last_use` and `uses` of the checkpoints
    that served. Ranks must decide alike: no clock, no random number, no hash of a string.
    """

    spec: CacheSpec
    now: int = 0
    """Admitted requests, counted by `on_request`: the clock of `Checkpoint.born` and `last_use`."""
    interval_tokens: int = NO_INTERVAL
    """Tokens between two saved states inside an answer."""

    # ---- placement ----

    @abstractmethod
    def positions(self, prompt: Prompt) -> tuple[dict[int, Kind], dict[int, Kind]]:
        """Return the positions in (p, L] whose state the prefill should save, and positions that
        are only watched."""

    def new_value(self, new: NewState) -> float:
        """Return the value per page of a new state. Candidates of a lesser value are evicted for
        it; with infinity it is saved at any price."""
        return math.inf

    def replaces(self, new: NewState) -> bool:
        """Return whether a state that found no room takes the place of `new.previous`."""
        return False

    # ---- learning ----

    @abstractmethod
    def on_request(
        self, path: Path, resumed: Checkpoint | None, prompt_tokens: int
    ) -> tuple[Origin, int]:
        """Note that a prompt was admitted. path: its known tokens. resumed: the state that it is
        restored from. Return its origin, and the position of a lost state in (p, q] that is worth
        saving again, or 0."""

    def on_watch(self, checkpoint: Checkpoint) -> None:
        """Note that a position is watched from now on."""

    def on_wait(self, checkpoint: Checkpoint, more: int) -> None:
        """Note that `more` further requests wait to start from this checkpoint, or fewer if < 0."""

    def on_finish(self, answer_tokens: int) -> None:
        """Note that a request ended, with so many tokens in its answer."""

    def maintain(self, evictable: Evictable) -> None:
        """Do the work that is due once per admitted request."""

    # ---- eviction ----

    def state_value(self, checkpoint: Checkpoint, ref_counts: np.ndarray) -> float:
        """Return the value per page of a stored state. Ties are broken by `last_use`, oldest first.
        ref_counts: `PageAllocator.ref_counts`."""
        return 0.0

    def tail_value(self, edge: Edge) -> float | None:
        """Return the value per page of the last block of a leaf's KV, or None if no position
        resumes from it, so that it is evicted first. Ties are broken by `last_access`."""
        return None if self.spec.needs_state else 0.0

    def equal_start(self, edge: Edge, start: int) -> int:
        """Return the position, in [start, start of the last block], from which on the blocks of a
        leaf are worth no more than the last one, so that they may be dropped at once."""
        return start

    def victim(self, evictable: Evictable) -> tuple[Edge | Checkpoint, Key] | None:
        """Return the candidate to evict next and its key, or None."""
        return evictable.least()

    # ---- admission ----

    def admission_value(self, running: int, held_back: int) -> float:
        """Return the value of one more request next to `running` others. It starts if candidates
        to evict for all its pages are worth less. held_back: refused attempts in a row."""
        return math.inf


POLICIES: Registry[type[Policy]] = Registry(
    "policy",
    "megatron_hybrid.policies",
    lambda name, policy: check_class(f"the policy {name!r}", policy, Policy, "spec"),
    {"hybrid": "megatron_hybrid.cache.policy.hybrid:HybridPolicy"},
)
"""Every policy, made with the `CacheSpec` of the engine's cache."""
