"""FollowedTree: who asks for what has changed in a tree, and keeps the rest."""

from __future__ import annotations

from collections.abc import Callable

from megatron_hybrid.cache.tree_view import EdgeView, TreeChanges, TreeView


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

    def check(self, whole: TreeView) -> None:
        """It is the same as one that is drawn up anew."""
        rows = zip(whole.numbers, whole.parents, whole.starts, whole.ends, whole.held_ends)
        expected = {row[0]: (*row, last) for row, last in zip(rows, whole.last_uses)}
        assert {number: edge[:6] for number, edge in self.edges.items()} == expected
        states = [state for edge in self.edges.values() for state in edge.states]
        assert sorted(states) == sorted(whole.states)
