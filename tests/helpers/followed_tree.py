"""FollowedTree: who asks for what has changed in a tree, and keeps the rest."""

from collections.abc import Callable

from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.tree_view import EdgeView, TreeChanges, tier_in_pool, view_edge


class FollowedTree:
    """Edges by their numbers."""

    def __init__(self):
        self.edges: dict[int, EdgeView] = {}
        self.version = None

    def ask(self, changes: Callable[..., TreeChanges], limit: int) -> TreeChanges:
        """Take over what `CacheContents.changes` or the engine's tells. Returns the last part."""
        while True:
            told = changes(self.version, limit)
            if told.is_whole:
                self.edges.clear()
            for number in told.removed:
                self.edges.pop(number, None)
            self.edges.update((edge.number, edge) for edge in told.edges)
            self.version = told.version
            assert len(told.edges) <= limit
            if told.is_last:
                assert len(self.edges) == told.num_edges
                return told

    def check(self, cache: PrefixCache, tier_of: Callable = tier_in_pool) -> None:
        """It is the same as one that is drawn up anew."""
        assert self.edges == {edge.number: edge for edge in drawn(cache, tier_of)}


def drawn(cache: PrefixCache, tier_of: Callable = tier_in_pool) -> list[EdgeView]:
    """The edges of a cache, whatever was noted of changes."""
    edges = cache.index.edges()
    return [view_edge(edge, cache.spec.page_bytes, tier_of, 0) for edge in edges]
