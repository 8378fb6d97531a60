"""The parts of the prefix index: edges with KV blocks along them, checkpoints, and paths.

An edge spans the positions (start, end] of its path. It has the tokens there, and KV up to
`held_end`: one row of pages for each block that has at least one of these tokens. After `held_end`
the tokens are only known: their KV was dropped, but the policy still learns from forks and ghost
entries there. KV is held from the root on: an edge that lacks some has no held descendants.

After a split inside a block both edges hold the page of that block. Invariant for every held
position m on a path: the path has a page for each block index < ceil(m / B), with valid rows for
all tokens < m (if two edges hold one block, the deeper edge's page is valid).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import IntEnum
from itertools import count
from typing import NamedTuple

import numpy as np

from megatron_hybrid.cache.pages.allocator import NULL_PAGE


class Kind(IntEnum):
    """The role of a position in the request that computed it."""

    PROMPT_END = 0
    ANSWER_END = 1
    JUNCTION = 2
    """The position where a prompt left a known one, or a position declared by the caller."""
    MESSAGE = 3
    """The start of a message of a chat."""
    TAIL = 4
    """The usual distance before the end of a prompt at which later prompts leave it."""
    INTERVAL = 5
    """One of several positions at equal distances."""
    OPPORTUNISTIC = 6
    """One of a grid of positions whose states are saved only in free pages, and are evicted first.
    Nothing is learnt from them."""


class Origin(NamedTuple):
    """The known prefix that a request continues."""

    resumed_from: Kind | None = None
    """The kind of end that it continues, `PROMPT_END` or `ANSWER_END`, or None for neither."""
    mostly_known: bool = False
    """Whether a request that continues neither had more known tokens than new ones."""


NO_ORIGIN = Origin()
_numbers = count(1)


@dataclass(eq=False, repr=False, slots=True)
class Checkpoint:
    """A watched position: the record of its uses, and the pages of its state while that is stored.
    Without a state it is a ghost entry."""

    edge: Edge | None
    """It is None if the tokens were forgotten."""
    position: int
    kind: Kind
    now: InitVar[int]
    origin: Origin = NO_ORIGIN
    """The known prefix that the first request to reach the position continued."""
    pages: np.ndarray | None = None
    """Pages of the state, or None if it is not stored."""
    local_pages: Sequence[np.ndarray] = ()
    was_stored: bool = False
    tier_key: bytes | None = None
    """The key of its state in the tiers below, if it was offered."""
    refused: bool = False
    """Whether its state was wanted, but found no room."""
    uses: int = 0
    """Requests that it served."""
    waiting: int = 0
    """Requests that it is to serve, and that wait for a slot."""
    born: int = field(init=False)
    """In admitted requests, as `last_use`; see reuse.py."""
    last_use: int = field(init=False)
    queued: tuple | None = None

    def __post_init__(self, now: int):
        self.born = self.last_use = now

    def page_lists(self) -> list[np.ndarray]:
        """Return its pages as flat arrays, one of the state and one per local group, without
        repeats."""
        return [self.pages, *(pages.ravel() for pages in self.local_pages)]

    @property
    def num_pages(self) -> int:
        """Number of pages in `page_lists`; only while it is stored."""
        if not self.local_pages:
            return self.pages.size
        return sum([pages.size for pages in self.local_pages], self.pages.size)

    def is_shadowed(self) -> bool:
        """Return whether a deeper state is stored on a path through it."""
        edge = self.edge
        if edge.num_stored > len(edge.stored):
            return True
        return bool(edge.stored) and edge.stored[-1] > self.position

    def is_fork(self) -> bool:
        """Return whether prompts part at its position."""
        return self.position == self.edge.end and len(self.edge.children) > 1

    def previous(self) -> Checkpoint | None:
        """Return the next stored state towards the root that is not opportunistic."""
        return unless_opportunistic(self.edge.deepest_on_path(self.position - 1))


def unless_opportunistic(checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Return a stored state, or the next one towards the root that is not opportunistic."""
    while checkpoint is not None and checkpoint.kind is Kind.OPPORTUNISTIC:
        checkpoint = checkpoint.edge.deepest_on_path(checkpoint.position - 1)
    return checkpoint


class Edge:
    """Tokens, block pages and checkpoints between two branching points (a root has none)."""

    __slots__ = (
        "_pages",
        "_tokens",
        "checkpoints",
        "children",
        "end",
        "first_block",
        "held_end",
        "last_access",
        "num_held_children",
        "num_stored",
        "number",
        "parent",
        "queued",
        "start",
        "stored",
    )

    def __init__(self, parent: Edge | None, start: int, tokens: np.ndarray, pages: np.ndarray):
        self.number = next(_numbers)
        self.parent = parent  # None for a root or a dropped edge
        self.children: dict[int, Edge] = {}
        self.start = start
        self.end = self.held_end = start + len(tokens)
        self.first_block = 0
        self.checkpoints: dict[int, Checkpoint] = {}  # by position
        self.stored: list[int] = []  # positions of those that have pages, ascending
        self.num_held_children = 0  # those that hold KV
        self.num_stored = 0  # stored checkpoints of this edge and its descendants
        self.last_access = 0
        self.queued: tuple | None = None
        self._tokens = tokens
        self._pages = pages

    @property
    def tokens(self) -> np.ndarray:
        """int32 [end - start]."""
        return self._tokens[: self.end - self.start]

    def num_rows(self, block_size: int) -> int:
        """Return the number of page rows: blocks first_block .. ceil(held_end / B) - 1, or 0 if
        nothing is held."""
        if self.held_end == self.start:
            return 0
        return -(-self.held_end // block_size) - self.first_block

    def pages(self, block_size: int) -> np.ndarray:
        """Return the pages, int32 [num_rows, kv_pages_per_block]."""
        return self._pages[: self.num_rows(block_size)]

    def page_before(self, position: int, block_size: int) -> int:
        """Return a page of the block of the token before a held position, or the null page if
        blocks have no pages."""
        if not self._pages.shape[1]:
            return NULL_PAGE
        return int(self._pages[(position - 1) // block_size - self.first_block, 0])

    def deepest_checkpoint(self, limit: int) -> Checkpoint | None:
        """Return the last stored checkpoint on this edge at a position <= limit."""
        index = bisect_right(self.stored, limit)
        return self.checkpoints[self.stored[index - 1]] if index else None

    def deepest_on_path(self, limit: int) -> Checkpoint | None:
        """Return the last stored checkpoint at a position <= limit, on this edge or an ancestor."""
        found, edge = self.deepest_checkpoint(limit), self
        while found is None and edge.parent is not None:
            edge = edge.parent
            if edge.stored:
                found = edge.checkpoints[edge.stored[-1]]
        return found

    def at(self, position: int) -> Edge:
        """Return the edge that spans a position (1 to `end`): this one or an ancestor."""
        edge = self
        while edge.start >= position:
            edge = edge.parent
        return edge

    def from_root(self) -> list[Edge]:
        """Return the edges from the root to this one, without the root."""
        edges, edge = [], self
        while edge.parent is not None:
            edges.append(edge)
            edge = edge.parent
        return edges[::-1]

    def is_held_leaf(self) -> bool:
        """Return whether it holds KV and no descendant does."""
        return self.held_end > self.start and not self.num_held_children


class Root(Edge):
    """The root of one salt's prefixes."""

    __slots__ = ("salt",)

    def __init__(self, salt: str, tokens: np.ndarray, pages: np.ndarray):
        super().__init__(None, 0, tokens, pages)
        self.salt = salt


@dataclass(eq=False, repr=False, slots=True)
class Path:
    """The part of a token sequence that is in the tree. Valid until the tree changes."""

    root: Edge | None
    edges: list[Edge]
    depth: int
    """Leading tokens whose KV is held."""
    known: int
    """Leading tokens that are known; depth <= known."""
    cuts: int = 0
    """`PrefixIndex._cuts` when the path was found."""

    def left(self, limit: int) -> tuple[Edge, int] | None:
        """Return the edge that spans the last of the first `limit` known tokens of this path after
        the tree changed, and the number of these tokens, or None if a search begins at the root.
        Unless an edge lost its end, tokens before the end of an edge never change: splits and joins
        move its start."""
        edge, known = self.edges[-1] if self.edges else None, min(limit, self.known)
        if edge is None or edge.parent is None or not known:
            return None
        return edge.at(known), known

    def pages(self, num_blocks: int) -> np.ndarray:
        """Return the pages of the leading blocks, int32 [num_blocks, kv_pages_per_block];
        num_blocks <= number of blocks with any of the first `depth` tokens."""
        held = [edge for edge in self.edges if edge.held_end > edge.start]
        rows = []
        for edge, deeper in zip(held, [*held[1:], None]):
            end = num_blocks if deeper is None else min(num_blocks, deeper.first_block)
            rows.append(edge._pages[: max(0, end - edge.first_block)])
        return np.concatenate(rows)

    def deepest_checkpoint(self) -> Checkpoint | None:
        """Return the last stored checkpoint at a known position. KV is held up to it."""
        return self.edges[-1].deepest_on_path(self.known) if self.edges else None

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints at known positions, stored or not."""
        return [
            checkpoint
            for edge in self.edges
            for checkpoint in edge.checkpoints.values()
            if checkpoint.position <= self.known
        ]

    def missed_state(self, above: int) -> Checkpoint | None:
        """Return the last checkpoint in (above, depth] whose state was evicted or refused."""
        missed = (
            checkpoint
            for checkpoint in self.checkpoints()
            if above < checkpoint.position <= self.depth
            and checkpoint.pages is None
            and (checkpoint.was_stored or checkpoint.refused)
        )
        return max(missed, key=lambda checkpoint: checkpoint.position, default=None)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of leading positions where two int32 arrays agree."""
    n = min(len(a), len(b))
    if not n:
        return 0
    differ = a[:n] != b[:n]
    first = int(differ.argmax())
    return first if differ[first] else n
