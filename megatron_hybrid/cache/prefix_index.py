"""PrefixIndex: a token-exact radix tree per salt, and how it grows, splits, joins and shrinks.

The tree knows no leases and never fails for lack of room: who inserts brings the pages, and only
the eviction policy says what to drop. What an edge is, and the invariant of a path: tree.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from megatron_hybrid.cache.page_allocator import PageAllocator
from megatron_hybrid.cache.tree import (
    MAX_TRACES,
    Checkpoint,
    Edge,
    Path,
    common_prefix,
    fingerprint,
    remember,
)

MAX_EMPTY_ROOTS = 256
"""Salts without an edge whose traces are kept."""


class PrefixIndex:
    """One tree per salt.

    Args:
        block_size_tokens: B.
        pages_per_block: columns of a page row (0: nothing attends to everything).
        allocator: told of every page that an edge or a checkpoint holds (`cache`, `uncache`).
        on_tail: called with each edge that may have become a leaf with a droppable tail.
    """

    def __init__(
        self,
        block_size_tokens: int,
        pages_per_block: int,
        allocator: PageAllocator,
        on_tail: Callable[[Edge], None] = lambda edge: None,
    ):
        self._block_size = block_size_tokens
        self._pages_per_block = pages_per_block
        self._allocator = allocator
        self._on_tail = on_tail
        self._roots: dict[str, Edge] = {}
        self._forget_at = 2 * MAX_EMPTY_ROOTS
        self.num_tokens = 0
        self.num_checkpoints = 0

    # ---- reading ----

    def walk(self, salt: str, tokens: np.ndarray) -> Path:
        """The path of the longest prefix of tokens (int32) that is in the tree."""
        root = edge = self._roots.get(salt)
        edges, depth, n = [], 0, len(tokens)
        while edge is not None and depth < n:
            edge = edge.children.get(int(tokens[depth]))
            if edge is None:
                break
            edges.append(edge)
            same = common_prefix(edge.tokens, tokens[depth:])
            depth += same
            if depth < edge.end:
                break
        return Path(root, edges, depth, self._block_size)

    def edges(self) -> Iterator[Edge]:
        """Every edge that is not a root, parents first."""
        stack = list(self._roots.values())
        while stack:
            edge = stack.pop()
            if edge.parent is not None:
                yield edge
            stack.extend(edge.children.values())

    # ---- growing ----

    def insert(
        self, salt: str, tokens: np.ndarray, pages: np.ndarray, tick: int, clock: float = 0.0
    ) -> None:
        """Make the tree hold all of tokens (int32 [n]).

        pages: int32 [ceil(n / B), kv_pages_per_block], all rows of tokens < n valid. Only those
        for the part that the tree lacks are taken; the others stay the caller's own.
        """
        path = self.walk(salt, tokens)
        n, depth = len(tokens), path.depth
        if depth == n:
            return
        if path.root is None:
            path.root = self._roots[salt] = Edge(None, 0, tokens[:0], pages[:0])
        elif not path.edges:  # keep salts in use behind the ones that are only remembered
            self._roots[salt] = self._roots.pop(salt)
        last = path.edges[-1] if path.edges else path.root
        if depth < last.end:
            last = path.edges[-1] = self._split(last, depth)
        first = depth // self._block_size
        if last.parent is not None and not last.children:
            self._grow(last, tokens[depth:], pages[first:], first)
        else:
            path.edges.append(self._new_edge(last, tokens[depth:], pages[first:]))
        path.depth = n
        self.num_tokens += n - depth
        self.touch(path, tick, clock)
        self._on_tail(path.edges[-1])

    def touch(self, path: Path, tick: int, clock: float) -> None:
        """Mark the matched tokens of a path as used now.

        An edge is one unit of recency: the last one is split where the match ends, and edges that
        have been used together again are joined.
        """
        if path.edges and path.depth < path.edges[-1].end:
            path.edges[-1] = self._split(path.edges[-1], path.depth)
        for edge in path.edges:
            edge.last_access, edge.clock = tick, clock
        for edge in path.edges[:-1]:
            if len(edge.children) == 1:
                self._merge(edge)
        path.edges = [edge for edge in path.edges if edge.parent is not None]

    def _new_edge(self, parent: Edge, tokens: np.ndarray, pages: np.ndarray) -> Edge:
        edge = Edge(parent, parent.end, tokens.copy(), pages.copy())
        edge.first_block = edge.start // self._block_size
        parent.children[int(tokens[0])] = edge
        self._allocator.cache(pages)
        return edge

    def _grow(self, leaf: Edge, tokens: np.ndarray, pages: np.ndarray, first: int) -> None:
        """Append to a leaf. Where its last block was partial, `pages` starts with a page that has
        all of its rows and more: it takes the partial page's place."""
        row, used = first - leaf.first_block, leaf.end - leaf.start
        replaced = leaf.pages(self._block_size)[row:]
        if not np.array_equal(replaced, pages[: len(replaced)]):
            self._allocator.cache(pages)
            self._allocator.uncache(replaced)
        else:
            self._allocator.cache(pages[len(replaced) :])
        leaf._tokens = with_room(leaf._tokens, used, used + len(tokens))
        leaf._tokens[used : used + len(tokens)] = tokens
        leaf._pages = with_room(leaf._pages, row, row + len(pages))
        leaf._pages[row : row + len(pages)] = pages
        leaf.end += len(tokens)

    def _split(self, edge: Edge, at: int) -> Edge:
        """Cut an edge at start < at < end; `edge` becomes the lower part, the upper is returned."""
        size = self._block_size
        cut = at - edge.start
        row = at // size - edge.first_block
        upper_rows = -(-at // size) - edge.first_block
        upper = Edge(
            edge.parent, edge.start, edge.tokens[:cut].copy(), edge._pages[:upper_rows].copy()
        )
        upper.first_block = edge.first_block
        upper.last_access, upper.clock = edge.last_access, edge.clock
        if upper_rows > row:
            self._allocator.cache(edge._pages[row:upper_rows])
        edge._tokens, edge._pages = edge.tokens[cut:].copy(), edge.pages(size)[row:].copy()
        edge.start, edge.first_block, edge.parent = at, at // size, upper
        upper.parent.children[int(upper._tokens[0])] = upper
        upper.children[int(edge._tokens[0])] = edge
        for name in ("checkpoints", "evicted_states"):
            marks = getattr(edge, name)
            setattr(upper, name, {p: mark for p, mark in marks.items() if p <= at})
            setattr(edge, name, {p: mark for p, mark in marks.items() if p > at})
        for checkpoint in upper.checkpoints.values():
            checkpoint.edge = upper
        upper.evicted_tails = {tail: None for tail in edge.evicted_tails if tail[0] <= at}
        edge.evicted_tails = {tail: None for tail in edge.evicted_tails if tail[0] > at}
        # What follows a checkpoint inside its block is no tail before the cut, and one after it.
        self._on_tail(edge)
        return upper

    def add_checkpoint(self, edge: Edge, checkpoint: Checkpoint) -> None:
        """Publish a checkpoint at a position on this edge that has none."""
        if checkpoint.position in edge.checkpoints:
            raise RuntimeError(f"there is a checkpoint at position {checkpoint.position} already")
        checkpoint.edge = edge
        edge.checkpoints[checkpoint.position] = checkpoint
        edge.evicted_states.pop(checkpoint.position, None)
        for pages in checkpoint.page_lists():
            self._allocator.cache(pages)
        self.num_checkpoints += 1

    # ---- shrinking ----

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Forget a state; its position stays behind as a trace."""
        edge = checkpoint.edge
        self._detach(checkpoint)
        remember(edge.evicted_states, checkpoint.position)
        self._on_tail(edge)

    def _detach(self, checkpoint: Checkpoint) -> None:
        del checkpoint.edge.checkpoints[checkpoint.position]
        checkpoint.edge = None
        for pages in checkpoint.page_lists():
            self._allocator.uncache(pages)
        self.num_checkpoints -= 1

    def drop_tail(self, leaf: Edge, new_end: int) -> None:
        """Forget what a leaf holds beyond new_end, checkpoints there too; all of it when new_end
        is not beyond its start. The next tokens stay behind as a trace."""
        if leaf.children:
            raise RuntimeError("drop_tail of an edge with children")
        new_end = max(new_end, leaf.start)
        for checkpoint in [c for p, c in leaf.checkpoints.items() if p > new_end]:
            self._detach(checkpoint)
        self.num_tokens -= leaf.end - new_end
        kept = leaf if new_end > leaf.start else leaf.parent
        rows = -(-new_end // self._block_size) - leaf.first_block if kept is leaf else 0
        trace = (new_end, fingerprint(leaf.tokens[new_end - leaf.start :]))
        self._allocator.uncache(leaf.pages(self._block_size)[rows:])
        if kept is leaf:
            leaf.end = new_end
            if 2 * (new_end - leaf.start) < len(leaf._tokens):  # give the memory back
                leaf._tokens, leaf._pages = leaf.tokens.copy(), leaf._pages[:rows].copy()
            leaf.evicted_states = {p: None for p in leaf.evicted_states if p <= new_end}
            leaf.evicted_tails = {t: None for t in leaf.evicted_tails if t[0] <= new_end}
        else:
            del kept.children[int(leaf._tokens[0])]
            leaf.parent, leaf._tokens, leaf._pages = None, leaf._tokens[:0], leaf._pages[:0]
        remember(kept.evicted_tails, trace)
        if kept.parent is None:
            if not kept.children:
                self._forget_old_roots()
            return
        if len(kept.children) == 1:
            (child,) = kept.children.values()
            if child.last_access == kept.last_access:
                self._merge(kept)
        self._on_tail(kept)

    def _merge(self, edge: Edge) -> None:
        """Join an edge with its only child, which takes its place."""
        (child,) = edge.children.values()
        rows = child.first_block - edge.first_block
        self._allocator.uncache(edge.pages(self._block_size)[rows:])
        child._tokens = np.concatenate([edge.tokens, child.tokens])
        child._pages = np.concatenate([edge._pages[:rows], child.pages(self._block_size)])
        child.start, child.first_block, child.parent = edge.start, edge.first_block, edge.parent
        child.parent.children[int(child._tokens[0])] = child
        child.clock = edge.clock
        for checkpoint in edge.checkpoints.values():
            checkpoint.edge = child
        child.checkpoints.update(edge.checkpoints)
        for name in ("evicted_states", "evicted_tails"):
            traces = {**getattr(edge, name), **getattr(child, name)}
            setattr(child, name, dict(list(traces.items())[-MAX_TRACES:]))
        edge.parent, edge.children, edge.checkpoints = None, {}, {}
        edge._tokens, edge._pages = edge._tokens[:0], edge._pages[:0]

    def _forget_old_roots(self) -> None:
        """Now and then, when the salts have doubled: it looks at all of them."""
        if len(self._roots) >= self._forget_at:
            empty = [salt for salt, root in self._roots.items() if not root.children]
            for salt in empty[:-MAX_EMPTY_ROOTS]:
                del self._roots[salt]
            self._forget_at = 2 * (len(self._roots) + MAX_EMPTY_ROOTS)

    def clear(self) -> None:
        """Forget everything, traces too."""
        for edge in self.edges():
            self._allocator.uncache(edge.pages(self._block_size))
            for checkpoint in edge.checkpoints.values():
                checkpoint.edge = None
                for pages in checkpoint.page_lists():
                    self._allocator.uncache(pages)
        for edge in list(self.edges()):
            edge.parent = None
        self._roots.clear()
        self.num_tokens = self.num_checkpoints = 0

    def check_integrity(self) -> np.ndarray:
        """Raises RuntimeError on a broken tree; returns int32 [num_pages], each page's holders."""
        counts = np.zeros_like(self._allocator.cached_counts)
        num_tokens = num_checkpoints = 0
        for edge in self.edges():
            num_tokens += edge.end - edge.start
            num_checkpoints += len(edge.checkpoints)
            pages = edge.pages(self._block_size)
            blocks = -(-edge.end // self._block_size) - edge.first_block
            problems = {
                "is empty": edge.end <= edge.start,
                "has the wrong number of tokens": len(edge.tokens) != edge.end - edge.start,
                "has the wrong number of pages": pages.shape != (blocks, self._pages_per_block),
                "starts at the wrong block": edge.first_block != edge.start // self._block_size,
                "does not start at its parent's end": edge.start != edge.parent.end,
                "is filed under another token": (
                    edge.parent.children.get(int(edge.tokens[0])) is not edge
                ),
                "should be one with its only child": any(
                    len(edge.children) == 1 and child.last_access >= edge.last_access
                    for child in edge.children.values()
                ),
                "has a checkpoint that lies elsewhere": any(
                    c.edge is not edge or c.position != p or not edge.start < p <= edge.end
                    for p, c in edge.checkpoints.items()
                ),
            }
            for problem, found in problems.items():
                if found:
                    raise RuntimeError(f"the edge at ({edge.start}, {edge.end}] {problem}")
            np.add.at(counts, pages.ravel(), 1)
            for checkpoint in edge.checkpoints.values():
                for held in checkpoint.page_lists():
                    np.add.at(counts, held, 1)
        if (num_tokens, num_checkpoints) != (self.num_tokens, self.num_checkpoints):
            raise RuntimeError(
                f"the tree has {num_tokens} tokens and {num_checkpoints} checkpoints, counted "
                f"{self.num_tokens} and {self.num_checkpoints}"
            )
        return counts


def with_room(array: np.ndarray, used: int, needed: int) -> np.ndarray:
    """The array, or one at least twice as long with its first `used` rows, if it is too short."""
    if needed <= len(array):
        return array
    grown = np.empty((max(needed, 2 * len(array)), *array.shape[1:]), dtype=array.dtype)
    grown[:used] = array[:used]
    return grown
