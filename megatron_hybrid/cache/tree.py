"""The parts of the prefix index: edges with KV blocks along them, checkpoints, and paths.

An edge spans the positions (start, end] of its path: it holds the tokens there, and one row of
pages for each block that has at least one of them. A split inside a block leaves the page of that
block with both edges, so the invariant holds for every position m on a path: the path has a page
for each block index below ceil(m / B), with valid rows for all tokens < m (of two edges that hold
the same block index, the deeper one's page is the one that counts).
"""

from __future__ import annotations

import numpy as np

FINGERPRINT_TOKENS = 16
"""Tokens remembered of a dropped tail."""
MAX_TRACES = 32
"""Traces of dropped things that one edge keeps of each kind; the oldest go first."""


class Checkpoint:
    """A published state after `position` tokens, and what the eviction policy knows of it."""

    __slots__ = ("clock", "edge", "last_access", "local_pages", "pages", "position", "queued")

    def __init__(self, position: int, pages: np.ndarray, local_pages: list[np.ndarray]):
        self.edge: Edge | None = None  # None: dropped
        self.position = position
        self.pages = pages
        self.local_pages = local_pages
        self.last_access = 0
        self.clock = 0.0
        self.queued: tuple | None = None

    def page_lists(self) -> list[np.ndarray]:
        """All that it holds, one flat array per kind (a page is in one of them only)."""
        return [self.pages, *(pages.ravel() for pages in self.local_pages)]


class Edge:
    """Tokens, block pages and checkpoints between two branching points (a root has none)."""

    __slots__ = (
        "_pages",
        "_tokens",
        "checkpoints",
        "children",
        "clock",
        "end",
        "evicted_states",
        "evicted_tails",
        "first_block",
        "last_access",
        "parent",
        "queued",
        "start",
    )

    def __init__(self, parent: Edge | None, start: int, tokens: np.ndarray, pages: np.ndarray):
        self.parent = parent  # None: a root, or dropped
        self.children: dict[int, Edge] = {}
        self.start = start
        self.end = start + len(tokens)
        self.first_block = 0
        self.checkpoints: dict[int, Checkpoint] = {}
        self.evicted_states: dict[int, None] = {}
        # (position, next tokens as bytes) of dropped tails, oldest first
        self.evicted_tails: dict[tuple[int, bytes], None] = {}
        self.last_access = 0
        self.clock = 0.0
        self.queued: tuple | None = None
        self._tokens = tokens
        self._pages = pages

    @property
    def tokens(self) -> np.ndarray:
        """int32 [end - start]."""
        return self._tokens[: self.end - self.start]

    def pages(self, block_size: int) -> np.ndarray:
        """int32 [blocks, kv_pages_per_block]: rows of blocks first_block .. ceil(end / B) - 1."""
        return self._pages[: -(-self.end // block_size) - self.first_block]

    def deepest_checkpoint(self, limit: int) -> Checkpoint | None:
        """The last checkpoint on this edge at a position <= limit."""
        position = max((p for p in self.checkpoints if p <= limit), default=None)
        return None if position is None else self.checkpoints[position]


class Path:
    """How far a token sequence is in the tree. Valid until the tree changes."""

    __slots__ = ("block_size", "depth", "edges", "root")

    def __init__(self, root: Edge | None, edges: list[Edge], depth: int, block_size: int):
        self.root = root
        self.edges = edges
        self.depth = depth  # tokens matched
        self.block_size = block_size

    def pages(self, num_blocks: int) -> np.ndarray:
        """int32 [num_blocks, kv_pages_per_block] of the leading blocks; num_blocks <= the blocks
        that the matched tokens touch."""
        rows = []
        for edge, deeper in zip(self.edges, [*self.edges[1:], None]):
            end = num_blocks if deeper is None else min(num_blocks, deeper.first_block)
            rows.append(edge._pages[: max(0, end - edge.first_block)])
        return np.concatenate(rows)

    def deepest_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint at a matched position."""
        for edge in reversed(self.edges):
            if edge.checkpoints:
                checkpoint = edge.deepest_checkpoint(self.depth)
                if checkpoint is not None:
                    return checkpoint
        return None

    def state_was_evicted(self, above: int) -> bool:
        """Whether a checkpoint in (above, depth] was dropped to make room."""
        return any(above < p <= self.depth for edge in self.edges for p in edge.evicted_states)

    def tail_was_evicted(self, tokens: np.ndarray) -> bool:
        """Whether the tree once went on with the next of `tokens` after the matched ones."""
        last = self.edges[-1] if self.edges else self.root
        if last is None or not last.evicted_tails or self.depth >= len(tokens):
            return False
        following = fingerprint(tokens[self.depth :])
        return any(
            position == self.depth and (following.startswith(tail) or tail.startswith(following))
            for position, tail in last.evicted_tails
        )


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading positions where two int32 arrays agree."""
    n = min(len(a), len(b))
    if not n:
        return 0
    differ = a[:n] != b[:n]
    first = int(differ.argmax())
    return first if differ[first] else n


def fingerprint(tokens: np.ndarray) -> bytes:
    """The first few tokens as bytes, to recognise a tail that was dropped."""
    return tokens[:FINGERPRINT_TOKENS].tobytes()


def remember(traces: dict, key) -> None:
    """Add a key to an ordered set of at most MAX_TRACES; the oldest goes first."""
    traces.pop(key, None)
    traces[key] = None
    if len(traces) > MAX_TRACES:
        del traces[next(iter(traces))]
