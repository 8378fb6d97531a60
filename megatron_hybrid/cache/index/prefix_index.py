"""PrefixIndex: a token-exact radix tree per salt; edges grow, split, join and shrink.

The tree does not know leases and never fails for lack of room: the caller of `insert` supplies the
pages, and only the evictor drops them. Edges and the invariant of a path: tree.py.

Each change first allocates memory, then counts pages, then changes edges. So a MemoryError is
raised before any edge has changed: the tree stays valid, and its pages can be recounted
(`num_holders`).
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from megatron_hybrid.cache.index.journal import Journal
from megatron_hybrid.cache.index.tree import (
    NO_ORIGIN,
    Checkpoint,
    Edge,
    Kind,
    Origin,
    Path,
    Root,
    common_prefix,
)
from megatron_hybrid.cache.pages.allocator import PageAllocator, with_room
from megatron_hybrid.cache.pages.spec import CacheSpec

TOKENS_PER_PAGE = 1024
"""Most known tokens per page of the pool (4 KiB of host memory), or `MIN_KNOWN_TOKENS`, without
full attention: there cached tokens cost no pages."""
KNOWN_TOKENS = 1.4
"""Most tokens that the tree knows, per token whose KV fits in the pool (4 bytes each): evicted
prefixes still show where prompts part. Each sequence counts as `SEQUENCE_TOKENS` more."""
MIN_KNOWN_TOKENS = 1 << 24
"""Least value of `known_limit` (64 MiB). With a small pool sessions pause for longer than their
tokens would stay known, and the policy learns nothing from a session that it no longer
recognises."""
SEQUENCE_TOKENS = 512
"""Size of an edge without KV at its end, with its watched positions and without its tokens; in
tokens (2 KiB)."""
MAX_WATCHED = 32
"""Most ghost entries of one edge; the least recently used is dropped first."""


def known_limit(spec: CacheSpec, num_pages: int) -> int:
    """Return the most tokens that the tree may know, held or not, for a pool of num_pages pages."""
    known = TOKENS_PER_PAGE * num_pages
    if spec.kv_pages_per_block:
        fits = num_pages // spec.kv_pages_per_block * spec.block_size_tokens
        known = int(KNOWN_TOKENS * fits)
    return max(MIN_KNOWN_TOKENS, known)


class PrefixIndex:
    """One tree per salt.

    Args:
        block_size_tokens: B.
        pages_per_block: columns of a page row, 0 without full attention.
        allocator: counts the pages that edges and checkpoints hold (`cache`, `uncache`).
    """

    def __init__(self, block_size_tokens: int, pages_per_block: int, allocator: PageAllocator):
        self._block_size = block_size_tokens
        self._pages_per_block = pages_per_block
        self._allocator = allocator
        self.on_tail: Callable[[Edge], object] = lambda edge: None
        """Callback for each edge that may have become a leaf with an evictable tail."""
        self.journal: Journal[Edge] = Journal()
        """Edges by their last change, of their checkpoints too."""
        self._roots: dict[str, Root] = {}
        self._forgettable: OrderedDict[Edge, None] = OrderedDict()  # leaves, oldest first
        self._cuts = 0  # how often an edge lost its end, which may invalidate older paths
        self.tick = 0
        """The present, in look-ups and commits: `Edge.last_access`."""
        self.num_tokens = 0
        self.num_held_tokens = 0
        self.num_checkpoints = 0

    # ---- reading ----

    def walk(self, salt: str, tokens: np.ndarray, seen: Path | None = None) -> Path:
        """Return the path of the longest prefix of tokens (int32) in the tree. seen: as in
        `reach`."""
        last, known = self.reach(salt, tokens, seen)
        edges, depth = last.from_root() if last else [], 0
        for edge in edges:
            depth = edge.held_end
            if depth < edge.end:
                break
        depth = min(known, depth)
        return Path(self._roots.get(salt), edges, depth, known, self._cuts)

    def reach(
        self, salt: str, tokens: np.ndarray, seen: Path | None = None
    ) -> tuple[Edge | None, int]:
        """Return the edge that spans the last known one of the leading tokens (int32), and the
        number of known tokens. The edge is the root if no token is known, and None if the salt has
        no root.

        seen: an earlier path of a prefix or an extension of tokens; its valid part is not compared
        again.
        """
        edge, known, n = self._roots.get(salt), 0, len(tokens)
        if seen is not None and seen.cuts == self._cuts:
            edge, known = seen.left(n) or (edge, 0)
        while edge is not None and known < n:
            if known == edge.end:
                child = edge.children.get(int(tokens[known]))
                if child is None:
                    break
                edge = child
            known += common_prefix(edge.tokens[known - edge.start :], tokens[known:])
            if known < edge.end:
                break
        return edge, known

    def known_after(
        self, salt: str, tokens: np.ndarray, most: int, seen: Path | None = None
    ) -> np.ndarray:
        """Return up to `most` tokens (int32) that are known after all of `tokens` (int32 [L]).
        Where paths part, they follow the edge used last. seen: as in `reach`."""
        edge, known = self.reach(salt, tokens, seen)
        if edge is None or known < len(tokens):
            return tokens[:0]
        parts, found = [edge.tokens[known - edge.start :][:most]], edge.end - known
        while found < most and edge.children:
            edge = max(edge.children.values(), key=lambda child: child.last_access)
            parts.append(edge.tokens[: most - found])
            found += edge.end - edge.start
        return np.concatenate(parts)

    def held_edge(self, path: Path, position: int) -> Edge | None:
        """Return the edge that spans a position on an earlier path, if KV is held up to there. It
        is None if KV is not held, or if only a look-up can find out."""
        if path.cuts != self._cuts:
            return None
        edge, known = path.left(position) or (None, 0)
        return edge if known == position and edge.held_end >= position else None

    def prefix(self, edge: Edge, position: int) -> tuple[str, np.ndarray, Path]:
        """Return salt, tokens (int32 [position]) and path of the prefix that ends at a held
        position of an edge."""
        edges = edge.from_root()
        root = edges[0].parent
        tokens = np.concatenate([edge.tokens for edge in edges])[:position]
        return root.salt, tokens, Path(root, edges, position, position)

    def edges(self) -> Iterator[Edge]:
        """Yield every edge except the roots, parents first."""
        stack = list(self._roots.values())
        while stack:
            edge = stack.pop()
            if edge.parent is not None:
                yield edge
            stack.extend(edge.children.values())

    def checkpoints(self) -> Iterator[Checkpoint]:
        """Yield every checkpoint, stored or not."""
        for edge in self.edges():
            yield from edge.checkpoints.values()

    def note(self, edge: Edge) -> None:
        """Note that an edge or one of its checkpoints has changed."""
        if edge.parent is not None:
            self.journal.note(edge)

    # ---- growing ----

    def insert(
        self, salt: str, tokens: np.ndarray, pages: np.ndarray, seen: Path | None = None
    ) -> Path:
        """Make the tree hold all of tokens (int32 [n]). Return their path. seen: as for `walk`.

        pages: int32 [ceil(n / B), kv_pages_per_block], all rows of tokens < n valid. The tree
        references only pages that it lacks; the caller keeps the others.
        """
        path = self.walk(salt, tokens, seen)
        n = len(tokens)
        if path.depth == n:
            return path
        if path.root is None:
            path.root = self._roots[salt] = Root(salt, tokens[:0].copy(), pages[:0].copy())
        last = path.edges[-1] if path.edges else path.root
        if path.known < last.end:
            last = path.edges[-1] = self._split(last, path.known)
        for edge in path.edges:
            if edge.held_end < edge.end:
                self._restore_kv(edge, pages)
        if path.known < n:
            self._extend(path, tokens, pages)
        path.depth = path.known = n
        self.touch(path)
        self.on_tail(path.edges[-1])
        return path

    def touch(self, path: Path) -> None:
        """Mark the known tokens of a path as used now.

        An edge has one last use. So the last edge is split where the match ends, and consecutive
        edges without a fork between them are joined.
        """
        edges = path.edges
        if edges and path.known < edges[-1].end:
            edges[-1] = self._split(edges[-1], path.known)
        self.tick += 1
        for edge in edges:
            edge.last_access = self.tick
            self.journal.note(edge)
        if edges and edges[-1] in self._forgettable:
            self._forgettable.move_to_end(edges[-1])
        run: list[Edge] = []  # edges, each the only child of its predecessor
        for edge in edges:
            run.append(edge)
            if len(edge.children) != 1 or edge is edges[-1]:
                self._join(run)
                run = []
        path.edges = [edge for edge in edges if edge.parent is not None]

    def _extend(self, path: Path, tokens: np.ndarray, pages: np.ndarray) -> None:
        known, n = path.known, len(tokens)
        last = path.edges[-1] if path.edges else path.root
        first = known // self._block_size
        if last.parent is not None and not last.children:
            self._grow(last, tokens[known:], pages[first:], first)
        else:
            path.edges.append(self._new_edge(last, tokens[known:], pages[first:]))
        self.num_tokens += n - known
        self.num_held_tokens += n - known
        self._update_forgettable(path.edges[-1])

    def _new_edge(self, parent: Edge, tokens: np.ndarray, pages: np.ndarray) -> Edge:
        edge = Edge(parent, parent.end, tokens.copy(), pages.copy())
        edge.first_block = edge.start // self._block_size
        self._allocator.cache(pages)
        parent.children[int(tokens[0])] = edge
        parent.num_held_children += 1
        self._forgettable.pop(parent, None)
        self.note(edge)
        return edge

    def _grow(self, leaf: Edge, tokens: np.ndarray, pages: np.ndarray, first: int) -> None:
        """Append to a leaf whose tokens are all held."""
        used = leaf.end - leaf.start
        leaf._tokens = with_room(leaf._tokens, used, used + len(tokens))
        self._put_rows(leaf, pages, first)
        leaf._tokens[used : used + len(tokens)] = tokens
        leaf.end += len(tokens)
        leaf.held_end = leaf.end
        self.note(leaf)

    def _restore_kv(self, edge: Edge, pages: np.ndarray) -> None:
        """Add pages for the known tokens of an edge without KV; pages: of the whole path."""
        first, end = edge.held_end // self._block_size, -(-edge.end // self._block_size)
        self._put_rows(edge, pages[first:end], first)
        self.num_held_tokens += edge.end - edge.held_end
        edge.parent.num_held_children += edge.held_end == edge.start
        edge.held_end = edge.end
        self._update_forgettable(edge)
        self.note(edge)

    def _put_rows(self, edge: Edge, pages: np.ndarray, first: int) -> None:
        """Append rows from block `first` on. If the last block was partial, the first row of
        `pages` has all of its tokens and more, and replaces its row."""
        row = first - edge.first_block
        replaced = edge.pages(self._block_size)[row:]
        edge._pages = with_room(edge._pages, row + len(replaced), row + len(pages))
        if replaced.tolist() == pages[: len(replaced)].tolist():  # one row at most
            self._allocator.cache(pages[len(replaced) :])
        else:
            self._allocator.cache(pages)
            self._allocator.uncache(replaced)
        edge._pages[row : row + len(pages)] = pages

    def _split(self, edge: Edge, at: int) -> Edge:
        """Split an edge at start < at < end. `edge` becomes the lower part; return the upper
        part."""
        size = self._block_size
        cut = at - edge.start
        rows, tokens = edge.pages(size), edge.tokens
        upper = Edge(edge.parent, edge.start, tokens[:cut].copy(), rows[:0])
        upper.first_block = edge.first_block
        upper.last_access = edge.last_access
        upper.held_end = min(edge.held_end, at)
        upper.num_stored = edge.num_stored
        upper._pages = rows[: upper.num_rows(size)].copy()
        kept_tokens, first_block = tokens[cut:].copy(), at // size
        kept = rows[first_block - edge.first_block if edge.held_end > at else len(rows) :].copy()
        shared = len(upper._pages) + len(kept) - len(rows)
        if shared > 0:  # both parts hold the page of a block with tokens of both
            self._allocator.cache(kept[:shared])
        edge._tokens, edge._pages, edge.first_block = kept_tokens, kept, first_block
        edge.start, edge.held_end, edge.parent = at, max(edge.held_end, at), upper
        upper.parent.children[int(tokens[0])] = upper
        upper.children[int(tokens[cut])] = edge
        upper.num_held_children = int(edge.held_end > at)
        upper.checkpoints = {p: c for p, c in edge.checkpoints.items() if p <= at}
        edge.checkpoints = {p: c for p, c in edge.checkpoints.items() if p > at}
        num_above = bisect_right(edge.stored, at)
        upper.stored, edge.stored = edge.stored[:num_above], edge.stored[num_above:]
        edge.num_stored -= len(upper.stored)
        for checkpoint in upper.checkpoints.values():
            checkpoint.edge = upper
        self.note(upper)
        self.note(edge)
        # KV after a checkpoint but inside its block becomes a tail by the split.
        self.on_tail(edge)
        self.on_tail(upper)
        return upper

    def watch(
        self, edge: Edge, position: int, kind: Kind, now: int, origin: Origin = NO_ORIGIN
    ) -> Checkpoint:
        """Return the checkpoint at a position on this edge, or add one without a state."""
        checkpoint = edge.checkpoints.get(position)
        if checkpoint is None:
            self._trim_watched(edge, MAX_WATCHED - 1)
            checkpoint = edge.checkpoints[position] = Checkpoint(edge, position, kind, now, origin)
        return checkpoint

    def _unwatch(self, checkpoint: Checkpoint) -> None:
        self.note(checkpoint.edge)
        del checkpoint.edge.checkpoints[checkpoint.position]
        checkpoint.edge = None

    def _trim_watched(self, edge: Edge, limit: int = MAX_WATCHED) -> None:
        """Drop ghost entries beyond the limit, the least recently used first. This scans the whole
        edge, so an edge with many checkpoints is trimmed only when several are beyond the limit."""
        more = len(edge.checkpoints) - len(edge.stored) - limit
        if more > len(edge.checkpoints) // 64:
            watched = [c for c in edge.checkpoints.values() if c.pages is None]
            watched.sort(key=lambda c: (c.last_use, c.position))
            for checkpoint in watched[:more]:
                self._unwatch(checkpoint)

    def store(
        self, checkpoint: Checkpoint, pages: np.ndarray, local_pages: Sequence[np.ndarray]
    ) -> None:
        """Store the state of a checkpoint that has none."""
        for held in (pages, *local_pages):
            self._allocator.cache(held)
        checkpoint.pages, checkpoint.local_pages = pages, local_pages
        insort(checkpoint.edge.stored, checkpoint.position)
        self.note(checkpoint.edge)
        self._count_stored(checkpoint.edge, 1)
        self._update_forgettable(checkpoint.edge)

    # ---- shrinking ----

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Release a stored state's pages; the checkpoint stays as a ghost entry, unless it was
        opportunistic."""
        for pages in checkpoint.page_lists():
            self._allocator.uncache(pages)
        checkpoint.pages, checkpoint.local_pages = None, ()
        edge = checkpoint.edge
        del edge.stored[bisect_left(edge.stored, checkpoint.position)]
        checkpoint.was_stored = True
        self.note(edge)
        self._count_stored(edge, -1)
        if checkpoint.kind is Kind.OPPORTUNISTIC:
            self._unwatch(checkpoint)
        self._trim_watched(edge)
        self.on_tail(edge)
        self._update_forgettable(edge)

    def _count_stored(self, edge: Edge, more: int) -> None:
        self.num_checkpoints += more
        while edge is not None:
            edge.num_stored += more
            edge = edge.parent

    def drop_kv(self, edge: Edge, new_end: int) -> None:
        """Release the KV of a held leaf beyond new_end, where no state is, or all of its KV if
        new_end is not beyond its start. The tokens stay known."""
        new_end = max(new_end, edge.start)
        rows = edge.pages(self._block_size)
        end = -(-new_end // self._block_size) if new_end > edge.start else edge.first_block
        kept = rows[: end - edge.first_block].copy()
        self._allocator.uncache(rows[len(kept) :])
        edge._pages = kept
        self.num_held_tokens -= edge.held_end - new_end
        edge.held_end = new_end
        edge.parent.num_held_children -= new_end == edge.start
        self.note(edge)
        self._update_forgettable(edge)
        self.on_tail(edge)
        if edge.parent.parent is not None:
            self.on_tail(edge.parent)

    def _update_forgettable(self, edge: Edge) -> None:
        """Update whether the end of an edge may be forgotten."""
        if edge.parent is None or edge.children or self._needed_end(edge) == edge.end:
            self._forgettable.pop(edge, None)
        elif edge not in self._forgettable:
            self._forgettable[edge] = None

    def _needed_end(self, edge: Edge) -> int:
        """Return the position after which a leaf's tokens are not needed: the end of its KV, or
        without full attention its last state."""
        if self._pages_per_block:
            return edge.held_end
        deepest = edge.deepest_checkpoint(edge.end)
        return deepest.position if deepest else edge.start

    def forget(self, limit: int) -> int:
        """Forget known tokens, the least recently used first, until at most `limit` are left or all
        that are left are needed. Each sequence counts as `SEQUENCE_TOKENS` more. Return the number
        of forgotten tokens."""
        before = self.num_tokens
        while self._forgettable and (
            self.num_tokens + SEQUENCE_TOKENS * len(self._forgettable) > limit
        ):
            leaf, _ = self._forgettable.popitem(last=False)
            self._forget_tail(leaf)
        return before - self.num_tokens

    def _forget_tail(self, leaf: Edge) -> None:
        new_end = self._needed_end(leaf)
        tokens = leaf.tokens[: new_end - leaf.start].copy()
        pages, (first,) = leaf._pages, leaf.tokens[:1].tolist()
        if not self._pages_per_block:
            pages = pages[: -(-new_end // self._block_size) - leaf.first_block].copy()
        for checkpoint in [c for p, c in leaf.checkpoints.items() if p > new_end]:
            self._unwatch(checkpoint)
        self.num_tokens -= leaf.end - new_end
        if not self._pages_per_block:
            self.num_held_tokens -= leaf.held_end - new_end
        if new_end > leaf.start:
            leaf._tokens, leaf._pages = tokens, pages
            leaf.end = leaf.held_end = new_end
            self.note(leaf)
            self._cuts += 1
            return
        parent = leaf.parent
        del parent.children[first]
        parent.num_held_children -= leaf.held_end > leaf.start
        leaf.parent, leaf._tokens, leaf._pages = None, tokens, leaf._pages[:0]
        leaf.end = leaf.held_end = leaf.start
        self.journal.remove(leaf, leaf.number)
        if parent.parent is None:
            if not parent.children:
                del self._roots[parent.salt]
            return
        if len(parent.children) == 1:
            (child,) = parent.children.values()
            if child.last_access == parent.last_access:
                self._join([parent, child])
        self._update_forgettable(parent)
        self.on_tail(parent)

    def _join(self, run: list[Edge]) -> None:
        """Join edges, each the only child of its predecessor, into the last one."""
        *joined, last = run
        if not joined:
            return
        first, size = run[0], self._block_size
        held = [edge for edge in run if edge.held_end > edge.start]
        rows, twice_held = [edge.pages(size) for edge in held or run[:1]], []
        for i, (edge, deeper) in enumerate(pairwise(held)):
            # If two edges hold one block, the deeper edge's page is valid.
            rows[i], twice = np.split(rows[i], [deeper.first_block - edge.first_block])
            twice_held.append(twice)
        pages, tokens = np.concatenate(rows), np.concatenate([edge.tokens for edge in run])
        nothing = tokens[:0].copy()  # a view would keep all tokens alive
        for twice in twice_held:  # several of these may have the same page
            self._allocator.uncache(twice)
        last._pages, last._tokens = pages, tokens
        last.held_end = held[-1].held_end if held else first.start
        last.start, last.first_block, last.parent = first.start, first.first_block, first.parent
        last.num_stored = first.num_stored
        last.parent.children[int(tokens[0])] = last
        for edge in joined:
            for checkpoint in edge.checkpoints.values():
                checkpoint.edge = last
        last.checkpoints = {p: c for edge in run for p, c in edge.checkpoints.items()}
        last.stored = [position for edge in run for position in edge.stored]
        self._trim_watched(last)
        for edge in joined:
            edge.parent, edge.children, edge.checkpoints, edge.stored = None, {}, {}, []
            edge._tokens, edge._pages = nothing, edge._pages[:0]
            edge.end = edge.held_end = edge.start
            self._forgettable.pop(edge, None)
            self.journal.remove(edge, edge.number)
        self.note(last)
        self._update_forgettable(last)
        self.on_tail(last)

    def recover(self) -> None:
        """Join the edges that a failed change left split, drop a root that it left empty, and
        report all tails again."""
        self._roots = {salt: root for salt, root in self._roots.items() if root.children}
        for edge in list(self.edges()):
            run = [edge]
            while len(run[-1].children) == 1:
                (child,) = run[-1].children.values()
                if child.last_access < run[-1].last_access:
                    break
                run.append(child)
            if edge.parent is not None:
                self._join(run)
                self._update_forgettable(run[-1])
                self.on_tail(run[-1])

    def clear(self) -> None:
        """Forget everything. After a MemoryError everything is forgotten, but the pages are not
        recounted."""
        for edge in list(self.edges()):
            for checkpoint in edge.checkpoints.values():
                checkpoint.edge = checkpoint.pages = None
            edge.parent = None
        self._roots.clear()
        self.journal.clear()
        self._forgettable.clear()
        self.num_tokens = self.num_held_tokens = self.num_checkpoints = 0
        self._allocator.recount(self._allocator.ref_counts, self.num_holders())

    def num_holders(self) -> np.ndarray:
        """Return the number of edges and stored states that hold each page, int32 [num_pages]."""
        counts = np.zeros_like(self._allocator.cached_counts)
        for edge in self.edges():
            np.add.at(counts, edge.pages(self._block_size).ravel(), 1)
            for position in edge.stored:
                for held in edge.checkpoints[position].page_lists():
                    np.add.at(counts, held, 1)
        return counts

    def check_integrity(self) -> None:
        """Raise RuntimeError if the tree is inconsistent."""
        num_tokens = num_held = num_checkpoints = 0
        for edge in self.edges():
            num_tokens += edge.end - edge.start
            num_held += edge.held_end - edge.start
            stored = [c for c in edge.checkpoints.values() if c.pages is not None]
            num_checkpoints += len(stored)
            pages = edge.pages(self._block_size)
            forgettable = not edge.children and self._needed_end(edge) < edge.end
            problems = {
                "is empty": edge.end <= edge.start,
                "has the wrong number of tokens": len(edge.tokens) != edge.end - edge.start,
                "holds KV beyond its ends": not edge.start <= edge.held_end <= edge.end,
                "has the wrong number of pages": (
                    pages.shape != (edge.num_rows(self._block_size), self._pages_per_block)
                ),
                "starts at the wrong block": edge.first_block != edge.start // self._block_size,
                "does not start at its parent's end": edge.start != edge.parent.end,
                "holds KV that its parent lacks": (
                    edge.held_end > edge.start and edge.parent.held_end < edge.parent.end
                ),
                "is filed under another token": (
                    [edge.parent.children.get(token) for token in edge.tokens[:1].tolist()]
                    != [edge]
                ),
                "should be one with its only child": any(
                    len(edge.children) == 1 and child.last_access >= edge.last_access
                    for child in edge.children.values()
                ),
                "has a checkpoint that lies elsewhere": any(
                    c.edge is not edge or c.position != p or not edge.start < p <= edge.end
                    for p, c in edge.checkpoints.items()
                ),
                "miscounts its children with KV": edge.num_held_children
                != sum(child.held_end != child.start for child in edge.children.values()),
                "lists other states than it has": (
                    sorted(c.position for c in stored) != edge.stored
                ),
                "has a state beyond its KV": any(c.position > edge.held_end for c in stored),
                "miscounts the states beneath it": edge.num_stored
                != len(stored) + sum(child.num_stored for child in edge.children.values()),
                "may be forgotten, or not, and that is not noted": (
                    forgettable != (edge in self._forgettable)
                ),
            }
            for problem, found in problems.items():
                if found:
                    raise RuntimeError(f"the edge at ({edge.start}, {edge.end}] {problem}")
        counted = (num_tokens, num_held, num_checkpoints)
        if counted != (self.num_tokens, self.num_held_tokens, self.num_checkpoints):
            raise RuntimeError(
                f"the tree has {num_tokens} tokens, {num_held} held, and {num_checkpoints} "
                f"checkpoints, counted {self.num_tokens}, {self.num_held_tokens} and "
                f"{self.num_checkpoints}"
            )
