"""CacheListener: callbacks for what a cache publishes and evicts."""

from megatron_hybrid.cache.index.tree import Checkpoint, Edge
from megatron_hybrid.cache.pages.lease import Lease


class CacheListener:
    """Callbacks to override; by default they do nothing. They must not change the cache."""

    def on_publish_state(self, lease: Lease, checkpoint: Checkpoint) -> None:
        """Handle a stored state of a lease's tokens."""

    def on_publish_blocks(self, lease: Lease, start: int, end: int) -> None:
        """Handle new KV in the tree: it now holds lease.tokens[:end], before only [:start]. The
        pages from the block of `start` on are those of the lease."""

    def on_evict_state(self, checkpoint: Checkpoint) -> None:
        """Handle a stored state before its eviction; its pages still hold the data."""

    def on_evict_blocks(self, edge: Edge, start: int) -> None:
        """In pure attention, handle the KV of an edge after position `start` before its eviction;
        its pages still hold the data."""

    def on_clear(self) -> None:
        """Handle that the cache forgets everything."""
