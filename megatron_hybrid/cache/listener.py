"""CacheListener: is told what a cache makes restorable and what it evicts."""

from __future__ import annotations

from megatron_hybrid.cache.index.tree import Checkpoint, Edge
from megatron_hybrid.cache.pages.lease import Lease


class CacheListener:
    """Override what is of interest; by default nothing happens. It must not change the cache."""

    def on_publish_state(self, lease: Lease, checkpoint: Checkpoint) -> None:
        """A state of a lease's tokens is stored."""

    def on_publish_blocks(self, lease: Lease, start: int, end: int) -> None:
        """The tree holds the KV of lease.tokens[:end], until now that of [:start] only. Its pages
        from the block of `start` on are those of the lease."""

    def on_evict_state(self, checkpoint: Checkpoint) -> None:
        """A stored state is about to be evicted; its pages still hold the data."""

    def on_evict_blocks(self, edge: Edge, start: int) -> None:
        """In pure attention: the KV of an edge behind position `start` is about to be evicted; its
        pages still hold the data."""

    def on_clear(self) -> None:
        """All that was cached is forgotten."""
