"""TreeFeed: the tree of cached prefixes for pages that ask again and again what has changed."""

import asyncio
import uuid
from collections.abc import Callable
from itertools import islice
from typing import Any

from megatron_hybrid.cache.index.journal import Journal, Version
from megatron_hybrid.cache.tree_view import EdgeView, TreeChanges
from megatron_hybrid.inference.async_engine import AsyncEngine
from megatron_hybrid.serving.http.json_response import to_cpu_thread

MAX_EDGES = 10_000
"""Most edges that are shown, which are those used last."""
_SLICE = 256
"""Edges that the engine examines between two steps at first; a few more each further time."""


class TreeFeed:
    """A copy of an engine's tree. The engine only reports what has changed; all else is done here,
    in a thread next to the event loop.

    Args:
        engine: is asked for changes.
        text_of: returns the text of an edge's first tokens.
        num_tokens: number of these tokens; 0 shows no texts.
    """

    def __init__(self, engine: AsyncEngine, text_of: Callable[..., str], num_tokens: int):
        self._engine, self._text_of, self._num_tokens = engine, text_of, num_tokens
        self._id = uuid.uuid4().hex[:8]
        self._seen: Version | None = None
        self._edges: dict[int, EdgeView] = {}
        self._texts: dict[int, str] = {}
        self._changed: set[int] = set()
        self._uses: dict[int, int] = {}  # numbers of edges, and their last uses, the oldest first
        self._recent: set[int] = set()  # those that are shown
        self._shown: Journal[int] = Journal()
        self._lock = asyncio.Lock()

    async def columns(self, since: str | None) -> dict[str, Any]:
        """Return what has changed since the version of an earlier answer, or the whole tree if
        there was none, or too much has changed since."""
        async with self._lock:
            limit, changes = _SLICE, None
            while changes is None or not changes.is_last:
                changes = await self._engine.cache_changes(self._seen, limit, self._num_tokens)
                self._seen = changes.version
                await to_cpu_thread(lambda told=changes: self._take(told))
                limit += _SLICE // 16
            return await to_cpu_thread(lambda: self._columns(since, changes))

    # In the thread

    def _take(self, changes: TreeChanges) -> None:
        known = (self._edges, self._texts, self._uses)
        if changes.is_whole:
            for each in (*known, self._changed, self._recent, self._shown):
                each.clear()
        for number in changes.removed:
            for each in known:
                each.pop(number, None)
            self._changed.discard(number)
        for edge in changes.edges:
            self._edges[edge.number] = edge
            self._changed.add(edge.number)
            if self._num_tokens:
                self._texts[edge.number] = self._text_of(*edge.first_tokens)

    def _columns(self, since: str | None, changes: TreeChanges) -> dict[str, Any]:
        self._choose()
        seen = self._version(since)
        numbers, removed, version = self._shown.since(seen, None)
        # Parents first: a child begins where its parent ends.
        edges = sorted(
            (self._edges[number] for number in numbers), key=lambda e: (e.start, e.number)
        )
        columns = {
            "version": f"{self._id}-{version.changed}-{version.removed}",
            "since": None if seen is None else since,
            "num_edges": changes.num_edges,
            "tick": changes.tick,
            "removed": removed,
            "numbers": [edge.number for edge in edges],
            "parents": [edge.parent for edge in edges],
            "starts": [edge.start for edge in edges],
            "ends": [edge.end for edge in edges],
            "held_ends": [edge.held_end for edge in edges],
            "last_uses": [edge.last_use for edge in edges],
            "states": [state for edge in edges for state in edge.states],
        }
        if self._num_tokens:
            columns["texts"] = [self._texts[edge.number] for edge in edges]
        return columns

    def _choose(self) -> None:
        """Note which edges are shown and have changed, or have taken the place of others."""
        # Changed edges were used later than all others; parents were used whenever their children
        # were.
        changed = [self._edges[number] for number in self._changed]
        for edge in sorted(changed, key=lambda edge: (edge.last_use, -edge.start)):
            if self._uses.get(edge.number) != edge.last_use:
                self._uses.pop(edge.number, None)
                self._uses[edge.number] = edge.last_use
        recent = set(islice(reversed(self._uses), MAX_EDGES))
        for number in self._recent - recent:
            self._shown.remove(number, number)
        for number in sorted(recent & (self._changed | (recent - self._recent))):
            self._shown.note(number)
        self._recent = recent
        self._changed.clear()

    def _version(self, text: str | None) -> Version | None:
        """Parse the version of an earlier answer; None if it is not this feed's, or too old."""
        own, _, numbers = (text or "").partition("-")
        try:
            version = Version(*map(int, numbers.split("-")))
        except (TypeError, ValueError):
            return None
        return version if own == self._id and self._shown.knows(version) else None
