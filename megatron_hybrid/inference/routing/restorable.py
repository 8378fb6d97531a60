"""RestorableIndex: the restorable positions of one replica's cache, as changes of a set of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from megatron_hybrid.cache.index.tree import Checkpoint, Edge
from megatron_hybrid.cache.listener import CacheListener
from megatron_hybrid.cache.pages.lease import Lease
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.routing.prefix_hash import PrefixHash


@dataclass(frozen=True)
class Delta:
    """What changed on a replica since its last delta. Apply the fields in order. Plain data."""

    pages_taken: int
    """Pages of its pool that are not free."""
    cleared: bool
    """All earlier keys are gone."""
    removed: list[int]
    """Keys (`PrefixHash`) of prefixes that can no longer be resumed."""
    added: dict[int, int]
    """Keys of prefixes that can be resumed, with their lengths in tokens."""


class RestorableIndex(CacheListener):
    """Watches a cache that is still empty.

    The restorable positions are those of stored states. In pure attention any token of cached KV
    is one; then the ends of whole blocks stand for them, beside the states within a block.

    A state costs a hash of the tokens that its request has not hashed yet; an eviction costs a
    look-up.
    """

    def __init__(self, cache: PrefixCache):
        self._allocator = cache.allocator
        blocks = cache.mode == "restore" and not cache.spec.needs_state
        self._block_size = cache.spec.block_size_tokens if blocks else None
        self._states: dict[Checkpoint, int] = {}
        self._blocks: dict[int, int] = {}  # by the first page: it tells a whole block's prefix
        self._hashes: WeakKeyDictionary[Lease, PrefixHash] = WeakKeyDictionary()
        self._start_delta(cleared=False)
        cache.watch(self)

    def delta(self) -> Delta:
        """The changes since the last call."""
        pool = self._allocator
        taken = pool.num_pages - 1 - pool.num_free
        delta = Delta(taken, self._cleared, list(self._removed), self._added)
        self._start_delta(cleared=False)
        return delta

    def _start_delta(self, cleared: bool) -> None:
        self._cleared = cleared
        self._removed: dict[int, None] = {}
        self._added: dict[int, int] = {}

    # ---- of the cache ----

    def on_publish_state(self, lease: Lease, checkpoint: Checkpoint) -> None:
        position = checkpoint.position
        if self._block_size is None or position % self._block_size:
            [key] = self._keys(lease, [position])
            self._states[checkpoint] = key
            self._add(key, position)

    def on_publish_blocks(self, lease: Lease, start: int, end: int) -> None:
        size = self._block_size
        if size is None or start // size == end // size:
            return
        blocks = range(start // size, end // size)
        ends = [(block + 1) * size for block in blocks]
        pages = lease.block_table[blocks.start : blocks.stop, 0].tolist()
        for page, key, position in zip(pages, self._keys(lease, ends), ends):
            self._blocks[page] = key
            self._add(key, position)

    def on_evict_state(self, checkpoint: Checkpoint) -> None:
        key = self._states.pop(checkpoint, None)
        if key is not None:
            self._remove(key)

    def on_evict_blocks(self, edge: Edge, start: int) -> None:
        size = self._block_size
        if size is None:
            return
        first = edge.first_block
        rows = edge.pages(size)[start // size - first : edge.held_end // size - first, :1]
        for page in rows.ravel().tolist():
            key = self._blocks.pop(page, None)
            if key is not None:
                self._remove(key)

    def on_clear(self) -> None:
        self._states.clear()
        self._blocks.clear()
        self._start_delta(cleared=True)

    # ---- keys ----

    def _keys(self, lease: Lease, positions: Sequence[int]) -> list[int]:
        """Keys of the lease's tokens up to ascending positions."""
        hashed = self._hashes.get(lease)
        if hashed is None or positions[0] < hashed.position:
            hashed = self._hashes[lease] = PrefixHash(lease.salt)
        return hashed.keys(lease.tokens, positions)

    def _add(self, key: int, position: int) -> None:
        if key in self._removed:
            del self._removed[key]
        else:
            self._added[key] = position

    def _remove(self, key: int) -> None:
        if key in self._added:
            del self._added[key]
        else:
            self._removed[key] = None
