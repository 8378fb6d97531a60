"""Handles that `PrefixCache` returns: Lease, Reservation. Data without decisions.

Shape letters: M block rows, n pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_hybrid.cache.index.tree import NO_ORIGIN, Kind, Origin, Path
from megatron_hybrid.cache.policy.placement import NO_INTERVAL
from megatron_hybrid.cache.report import PrefixReport

NO_LOCAL_END = 1 << 62
"""`Lease.local_end` of a model without local groups."""


@dataclass(frozen=True)
class PageCopy:
    """A copy of the first `num_rows` tokens of one block, all layers of one group, page by page."""

    group: int
    """Index into `CacheSpec.groups`."""
    src_pages: np.ndarray
    """int32 [pages_per_block of the group]."""
    dst_pages: np.ndarray
    """int32 [pages_per_block of the group]; private to the lease that owns the copy."""
    num_rows: int
    """Token rows [0, num_rows) of every layer's K and V are copied."""


@dataclass(eq=False)
class Lease:
    """The pages held by one running request. Change it only through `PrefixCache`."""

    salt: str
    tokens: np.ndarray
    """The prompt, int32; after a commit, the array last given to `commit`."""
    shared_tokens: int
    """q: KV of full attention for positions < q is shared or copied, and written from q on."""
    skipped_tokens: int
    """p: start of the prefill. With p == L there is none, as a saved hidden state gives logits."""
    report: PrefixReport
    path: Path
    """The longest path in the tree found for its tokens so far; see `Path.left`."""

    block_table: np.ndarray = field(init=False)
    """Page ids by block index, int32 [M, kv_pages_per_block]; columns as `CacheSpec.columns`.
    Tables are never changed in place: a change assigns a new array."""
    local_tables: list[np.ndarray] = field(default_factory=list)
    """Tables in the order of `CacheSpec.local_groups`, int32 [M, pages_per_block], with page 0 (the
    null page) where no later token sees the block. Local KV is written from position p on."""
    local_first: list[int] = field(default_factory=list)
    """Index, by local group, of the first held block."""
    capacity_tokens: int = 0
    """Tokens for which the block table has room (whole blocks)."""
    local_end: int = NO_LOCAL_END
    """Tokens for which the local tables have room (whole blocks)."""
    own_blocks: list[int] | None = None
    """Lengths of the block table and of each local table without the blocks after them, which are
    lent (`PrefixCache.lend`). It is None if nothing is lent."""
    done: int = field(init=False)
    """Tokens computed so far (p at first; the last `num_tokens_done` given to `commit`)."""

    copies: list[PageCopy] = field(default_factory=list)
    """Copies to run before this lease's first forward, followed by
    `PrefixCache.restored(lease)`."""
    checkpoint_pages: np.ndarray | None = None
    """State and last hidden state to restore, int32 [checkpoint_pages]. If it is None, the slot
    starts from zeros (p == 0, or a model without recurrent state)."""
    wanted: dict[int, Kind] = field(default_factory=dict)
    """Ascending positions in (p, L] whose state this prefill should save, with their kinds; see
    `PrefixCache.positions_to_save`."""
    next_interval: int = NO_INTERVAL
    """The next position in the answer whose state should be saved; > done."""
    origin: Origin = NO_ORIGIN
    """The known prefix that its prompt continues."""
    lost_fork: int = 0
    """A position in (p, q] whose state was lost and is worth saving again, or 0."""
    unwatched: dict[int, Kind] = field(default_factory=dict)
    """Positions to watch once their tokens are in the tree, with their kinds."""
    refused: set[int] = field(default_factory=set)
    """Positions whose state was wanted, but found no room."""
    pins: list[np.ndarray] = field(default_factory=list)
    """Pages held only until `restored`: sources of copies, and the checkpoint's pages."""
    reservations: list[Reservation] = field(default_factory=list)
    """Reservations that are neither published nor abandoned yet."""
    local_released: int = NO_LOCAL_END
    """First token of the local KV that its reservations have released, as long as some are left."""
    next_flush: int = 0
    """`commit` does nothing for single tokens below this position."""
    answered: bool = False
    """Whether its request is complete."""
    released: bool = False

    def __post_init__(self):
        self.done = self.skipped_tokens

    def check_live(self) -> None:
        """Raise ValueError for a released lease."""
        if self.released:
            raise ValueError("this lease was released before")

    @property
    def prompt_tokens(self) -> int:
        """L: length of the prompt given to `acquire`."""
        return self.report.prompt_tokens

    @property
    def saves_more(self) -> bool:
        """Whether a state of its prompt, or a reserved one, is still to be saved."""
        return bool(self.reservations) or next(reversed(self.wanted), 0) > self.done

    @property
    def local_start(self) -> int:
        """First block of local KV that it holds, or `NO_LOCAL_END` without local groups."""
        return min(self.local_first, default=NO_LOCAL_END)


@dataclass(eq=False)
class Reservation:
    """Pages for one checkpoint that is being computed; invisible until it is published."""

    lease: Lease
    position: int
    """Number of tokens before the state."""
    kind: Kind
    """Its role in the request."""
    pages: np.ndarray
    """Targets of the state and the last hidden state, int32 [checkpoint_pages]."""
    local_pages: list[np.ndarray]
    """The lease's own pages by local group, int32 [blocks, pages_per_block]."""

    def check_pending(self) -> None:
        """Raise ValueError for a published or abandoned reservation."""
        if self not in self.lease.reservations:
            raise ValueError("this reservation was published or abandoned before")
