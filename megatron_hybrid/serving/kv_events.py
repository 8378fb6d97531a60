"""BlockEvents: the blocks of all prefixes that a cache can resume, reported as they come and go.

The events are those of vLLM, so routers that know vLLM's know ours. A block is reported as stored
while a prompt through its end can skip it: in models with states, while a state at or after its end
is stored; in pure attention, while its KV is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from megatron_hybrid.cache.eviction import CacheListener
from megatron_hybrid.cache.index.tree import Checkpoint, Edge
from megatron_hybrid.cache.lease import Lease
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.offload.prefix_keys import RecentKeys

Event = dict[str, Any]
"""Names and values of vLLM's classes, that of the class under "type"."""
_MEDIUM = "GPU"  # vLLM's name of the pool, on whatever device that is
_MOST_EVENTS = 1024  # about, of one `take`


class _Block:
    """A reported block. `uses` counts its children and the states whose last whole block it is."""

    __slots__ = ("hash", "key", "parent", "salt", "tokens", "uses")

    def __init__(self, key: bytes, parent: _Block | None, salt: str, tokens: bytes):
        self.key, self.parent, self.tokens, self.uses = key, parent, tokens, 0
        # As in vLLM, the salt is part of the first block, and so of all after it.
        self.salt = salt if parent is None else ""
        self.hash = int.from_bytes(key[:8], "big")
        if parent is not None:
            parent.uses += 1


class BlockEvents(CacheListener):
    """The events of a cache. The engine's thread only queues what has happened; `take`, which one
    other thread calls, hashes and counts.

    Args:
        cache: to follow, with nothing in it.
    Raises:
        ValueError: the cache's mode lets nothing be resumed.
    """

    def __init__(self, cache: PrefixCache):
        check_mode(cache.mode)
        self.has_ended = False
        """Whether `take` has returned the last events."""
        self._cache = cache
        self._size = cache.spec.block_size_tokens
        self._queue: SimpleQueue[tuple] = SimpleQueue()
        self._put: Callable[[tuple], None] = self._queue.put
        self._keys = RecentKeys(self._size)
        self._blocks: dict[bytes, _Block] = {}
        self._last_of: dict[Checkpoint, _Block] = {}  # of each stored state
        self._put((self._clear,))  # a reader of an earlier process forgets that one's blocks

    # ---- in the engine's thread ----

    def on_publish_state(self, lease: Lease, checkpoint: Checkpoint) -> None:
        end = checkpoint.position // self._size * self._size
        if end and self._cache.spec.needs_state:
            self._put((self._store, lease.salt, lease.tokens[:end], checkpoint))

    def on_publish_blocks(self, lease: Lease, start: int, end: int) -> None:
        end = end // self._size * self._size
        if end > start and not self._cache.spec.needs_state:
            self._put((self._store, lease.salt, lease.tokens[:end]))

    def on_evict_state(self, checkpoint: Checkpoint) -> None:
        self._put((self._drop_state, checkpoint))

    def on_evict_blocks(self, edge: Edge, start: int) -> None:
        # Not copied here: known tokens are never overwritten, whatever becomes of their edges.
        edges = edge.from_root()
        parts = [each.tokens for each in edges]
        self._put((self._drop_blocks, edges[0].parent.salt, parts, edge.held_end, start))

    def on_clear(self) -> None:
        self._put((self._clear,))

    # ---- in any thread ----

    def end(self) -> None:
        """Queue the last event, which says that the cache is gone, and ignore all later ones."""
        self._put((self._finish,))
        self._put = lambda job: None

    # ---- in the other thread ----

    def take(self, seconds: float) -> list[Event]:
        """Return what has happened since the last call, in order; wait up to this long for it."""
        events: list[Event] = []
        with suppress(Empty):
            while len(events) < _MOST_EVENTS:
                method, *arguments = self._queue.get(timeout=seconds)
                seconds = 0
                for event in method(*arguments):
                    last = events[-1]["type"] if events else None
                    if last == event["type"] == "BlockRemoved":
                        events[-1]["block_hashes"] += event["block_hashes"]
                    else:
                        events.append(event)
        return events

    def all(self) -> list[Event]:
        """Return the events for a reader that knows none of those that `take` has returned."""
        rows: list[list[_Block]] = []
        for block in self._blocks.values():  # parents first
            if rows and block.parent is rows[-1][-1]:
                rows[-1].append(block)
            else:
                rows.append([block])
        return [{"type": "AllBlocksCleared"}, *map(self._stored, rows)]

    def _store(
        self, salt: str, tokens: np.ndarray, checkpoint: Checkpoint | None = None
    ) -> Iterable[Event]:
        """Add whole blocks, which can be resumed while the state after them is stored."""
        keys = self._keys.of(tokens, salt).blocks(len(tokens) // self._size)
        first, size = len(keys), self._size
        while first and keys[first - 1] not in self._blocks:
            first -= 1
        block = self._blocks[keys[first - 1]] if first else None
        data, new = np.ascontiguousarray(tokens[first * size :], np.int32).tobytes(), []
        for index, key in enumerate(keys[first:]):
            part = data[4 * size * index : 4 * size * (index + 1)]
            block = self._blocks[key] = _Block(key, block, salt, part)
            new.append(block)
        if checkpoint is not None:
            block.uses += 1
            self._last_of[checkpoint] = block
        return [self._stored(new)] if new else []

    def _stored(self, blocks: list[_Block]) -> Event:
        parent = blocks[0].parent
        return {
            "type": "BlockStored",
            "block_hashes": [block.hash for block in blocks],
            "parent_block_hash": None if parent is None else parent.hash,
            "token_ids": np.frombuffer(b"".join(b.tokens for b in blocks), np.int32).tolist(),
            "block_size": self._size,
            "lora_id": None,
            "medium": _MEDIUM,
            "lora_name": None,
            "extra_keys": [[block.salt] if block.salt else None for block in blocks],
        }

    def _drop_state(self, checkpoint: Checkpoint) -> Iterable[Event]:
        block = self._last_of.pop(checkpoint, None)
        if block is None:  # of less than a block, or not needed, or its eviction failed before
            return ()
        block.uses -= 1
        return _removed(self._forget_unused(block))

    def _drop_blocks(
        self, salt: str, parts: list[np.ndarray], end: int, start: int
    ) -> Iterable[Event]:
        """Remove the blocks that end after token `start` of a prefix of `end` tokens."""
        keys = self._keys.of(np.concatenate(parts)[:end], salt).blocks(end // self._size)
        gone = []
        for key in reversed(keys[start // self._size :]):
            if (block := self._blocks.get(key)) is not None and not block.uses:
                gone.append(self._forget(block))
        return _removed(gone)

    def _forget_unused(self, block: _Block | None) -> list[int]:
        """Forget a block and those before it, up to the first that is used. Return their hashes."""
        gone = []
        while block is not None and not block.uses:
            gone.append(self._forget(block))
            block = block.parent
        return gone

    def _forget(self, block: _Block) -> int:
        del self._blocks[block.key]
        if block.parent is not None:
            block.parent.uses -= 1
        return block.hash

    def _clear(self) -> Iterable[Event]:
        self._blocks.clear()
        self._last_of.clear()
        return [{"type": "AllBlocksCleared"}]

    def _finish(self) -> Iterable[Event]:
        self.has_ended = True
        return self._clear()


def check_mode(mode: str) -> None:
    """Raise ValueError for a mode of the cache in which nothing can be resumed."""
    if mode != "restore":
        raise ValueError(
            f"prefix_caching is {mode!r}: nothing can be resumed, so there are no KV events; use "
            "'restore' (--mode restore)"
        )


def _removed(hashes: list[int]) -> list[Event]:
    if not hashes:
        return []
    return [{"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM}]
