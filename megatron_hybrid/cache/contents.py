"""CacheContents: what a cache holds, for the tiers below it and for views of it."""

from collections.abc import Callable

import numpy as np

from megatron_hybrid.cache.eviction import Evictor
from megatron_hybrid.cache.index.journal import Version
from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Kind
from megatron_hybrid.cache.tree_view import TreeChanges, tier_in_pool, view_edge


class CacheContents:
    """Reads a cache without side effects."""

    def __init__(self, evictor: Evictor):
        self._evictor, self._spec, self._index = evictor, evictor.spec, evictor.index

    def prefix(self, edge: Edge, position: int) -> tuple[str, np.ndarray, np.ndarray]:
        """Return salt, tokens (int32 [position]) and rows of pages (int32 [ceil(position / B),
        kv_pages_per_block]) of the prefix that ends at a held position of an edge."""
        salt, tokens, path = self._index.prefix(edge, position)
        return salt, tokens, path.pages(self._spec.num_blocks(position))

    def stored_checkpoints(self) -> list[Checkpoint]:
        """Return the stored states that are not opportunistic, the most valuable first."""
        stored = (c for c in self._index.checkpoints() if c.pages is not None)
        found = [c for c in stored if c.kind is not Kind.OPPORTUNISTIC]
        value, refs = self._evictor.policy.state_value, self._evictor.allocator.ref_counts
        return sorted(found, key=lambda checkpoint: -value(checkpoint, refs))

    def held_leaves(self) -> list[Edge]:
        """Return the edges where held KV ends, the most recently used first."""
        found = [edge for edge in self._index.edges() if edge.is_held_leaf()]
        return sorted(found, key=lambda edge: -edge.last_access)

    def changes(
        self,
        since: Version | None,
        limit: int | None = None,
        tier_of: Callable[[Checkpoint], str] = tier_in_pool,
        num_tokens: int = 0,
    ) -> TreeChanges:
        """Return what has changed in the tree since a version (by default all of it), with at most
        `limit` edges (by default any number). It takes as long as the changes need, whatever the
        size of the tree. tier_of, num_tokens: as for `view_edge`."""
        journal = self._index.journal
        is_whole = since is None or not journal.knows(since)
        changed, removed, version = journal.since(None if is_whole else since, limit)
        views = [view_edge(edge, self._spec.page_bytes, tier_of, num_tokens) for edge in changed]
        is_last = version == journal.version
        tick = self._index.tick
        return TreeChanges(is_whole, version, is_last, len(journal), tick, removed, views)

    def note_change(self, checkpoint: Checkpoint) -> None:
        """Note that facts about a checkpoint outside of the cache, as its tier, have changed."""
        if checkpoint.edge is not None:
            self._index.note(checkpoint.edge)

    def edge_number(self, tokens: np.ndarray, salt: str = "") -> int:
        """Return the number of the edge that spans the last known one of the leading tokens
        (int32), or 0 if none is known."""
        edge, known = self._index.reach(salt, tokens)
        return edge.number if known else 0
