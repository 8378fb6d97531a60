"""A model runner without a model: memory whose every row says which tokens it stands for.

The KV row of position t, and the state after t + 1 tokens, is the hash of (salt, tokens[: t + 1]),
as in a causal model, where it is a function of just these. So a row that belongs to another prompt,
to another position, or to nobody any more is seen at once when it is read.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from unittest.mock import patch

import numpy as np

from megatron_hybrid.cache.index.tree import Checkpoint, Edge
from megatron_hybrid.cache.lazy_heap import Key
from megatron_hybrid.cache.lease import Lease, PageCopy, Reservation
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.policy.protocol import Evictable
from megatron_hybrid.cache.prefix_cache import PrefixCache

SPECS = {
    "hybrid": CacheSpec(16, (KVGroup(2, 64),), state_bytes=4000, hidden_bytes=64),
    "pure": CacheSpec(16, (KVGroup(2, 64),), state_bytes=0, hidden_bytes=64),
    "window": CacheSpec(
        16, (KVGroup(2, 64), KVGroup(2, 64, window=24)), state_bytes=4000, hidden_bytes=64
    ),
    "chunk": CacheSpec(16, (KVGroup(2, 64, chunk=24),), state_bytes=0, hidden_bytes=64),
    "state": CacheSpec(16, (), state_bytes=4000, hidden_bytes=64),
}
"""One of each kind of model."""
LARGE_STATES = CacheSpec(16, (KVGroup(2, 64),), state_bytes=20_000, hidden_bytes=128)
GARBAGE = -1
"""What free pages are filled with."""


def prefix_hashes(tokens, salt: str) -> np.ndarray:
    """int64 [len(tokens) + 1]: entry t is the hash of the first t tokens (and the salt)."""
    return _prefix_hashes(tuple(tokens), salt)


@lru_cache(maxsize=10_000)
def _prefix_hashes(tokens: tuple, salt: str) -> np.ndarray:
    value = sum(salt.encode()) * 7919
    hashes = [value]
    for token in tokens:
        value = (value * 1_000_003 + int(token) * 31 + 17) % (2**61 - 1)
        hashes.append(value)
    return np.array(hashes, dtype=np.int64)


@dataclass(eq=False)
class Running:
    """A request that holds a lease."""

    tokens: list[int]
    """Prompt, then what was generated."""
    salt: str
    lease: Lease
    state: int
    """The live slot: what the recurrent layers have seen."""
    saved: list[int] = field(default_factory=list)
    """Positions whose checkpoints this request published."""

    @property
    def done(self) -> int:
        return self.lease.done

    @property
    def prompt_tokens(self) -> int:
        return self.lease.prompt_tokens


@dataclass
class Parked:
    """A preempted request, with what it had computed."""

    running: Running
    done: int


def seen_before(spec: CacheSpec, group: int, position: int) -> np.ndarray:
    """The positions before `position` that the token there sees in a group, from the definition."""
    window, chunk = spec.groups[group].window, spec.groups[group].chunk
    seen = np.arange(position)
    if window is not None:
        seen = seen[seen > position - window]
    if chunk is not None:
        seen = seen[seen // chunk == position // chunk]
    return seen


def known_tokens(cache: PrefixCache, tokens, salt: str = "") -> int:
    """How many leading tokens have KV in the tree."""
    return cache.index.walk(salt, np.array(tokens, dtype=np.int32)).depth


def least_of(cache: PrefixCache) -> tuple[Edge | Checkpoint, Key]:
    """The candidate that would be evicted next, and its key, after all values were renewed."""
    found = []

    def look(evictable: Evictable) -> None:
        evictable.refresh(len(list(evictable.candidates())))
        found.append(evictable.least())

    with patch.object(cache.policy, "victim", look):
        cache.evict(1)
    return found[0]


def stored(edge: Edge) -> list[Checkpoint]:
    """The states on an edge, by position."""
    checkpoints = sorted(edge.checkpoints.items())
    return [checkpoint for _, checkpoint in checkpoints if checkpoint.pages is not None]


class Simulator:
    """Runs requests against a PrefixCache and checks every row that they read."""

    def __init__(self, cache: PrefixCache):
        self.cache = cache
        self.spec = cache.spec
        self.memory = np.full(
            (cache.allocator.num_pages, self.spec.block_size_tokens), GARBAGE, dtype=np.int64
        )

    # ---- one request, step by step ----

    def start(
        self, prompt, salt: str = "", *, chunk: int | None = None, room: int = 0, **options
    ) -> Running | None:
        """Acquire, copy, restore. chunk: tokens per forward; room: tokens beyond the prompt."""
        prompt = [int(token) for token in prompt]
        lease = self.cache.acquire(
            np.array(prompt, dtype=np.int32),
            salt,
            capacity_tokens=len(prompt) + room,
            chunk_tokens=chunk,
            **options,
        )
        if lease is None:
            return None
        running = Running(prompt, salt, lease, state=int(prefix_hashes([], salt)[0]))
        self._restore(running)
        return running

    def _restore(self, running: Running) -> None:
        lease = running.lease
        expected = prefix_hashes(running.tokens, running.salt)
        if lease.copies:
            visible = self.visible()
            for copy in lease.copies:
                self._copy(copy, visible)
        if lease.checkpoint_pages is not None:
            restored = self.memory[lease.checkpoint_pages]
            assert (restored == expected[lease.skipped_tokens]).all(), "another prompt's state"
        running.state = int(expected[lease.skipped_tokens])
        self.cache.restored(lease)

    def _copy(self, copy: PageCopy, visible: np.ndarray) -> None:
        rows = np.arange(copy.num_rows)
        assert len(copy.src_pages) == self.spec.pages_per_block[copy.group]
        for source, target in zip(copy.src_pages, copy.dst_pages, strict=True):
            self._write(np.full(len(rows), target), rows, self.memory[source, rows], visible)

    def forward(self, running: Running, n: int, *, save: bool = True) -> bool:
        """Compute the next n tokens of running.tokens; False when there is no room for them."""
        lease, cache = running.lease, self.cache
        end = lease.done + n
        assert end <= len(running.tokens)
        if not cache.extend(lease, max(end, lease.capacity_tokens), chunk_tokens=n):
            return False
        reservations = []
        if save:
            wanted = cache.positions_to_save(lease, end)
            reservations = [cache.reserve_checkpoint(lease, p) for p in wanted]
        self.compute(running, end)
        cache.commit(lease, np.array(running.tokens, dtype=np.int32), end)
        if cache.mode != "off" and (n > 1 or end % self.spec.block_size_tokens == 0):
            known = known_tokens(cache, running.tokens[:end], running.salt)
            assert known == end, "a chunk or a full block is not visible"
        for reservation in filter(None, reservations):
            self.publish(running, reservation)
        return True

    def compute(self, running: Running, end: int) -> None:
        """The forward itself: write what may be written, then read all that attention reads."""
        lease, spec, size = running.lease, self.spec, self.spec.block_size_tokens
        start = lease.done
        expected = prefix_hashes(running.tokens[:end], running.salt)
        assert running.state == expected[start], "the live slot is at another place"
        visible = self.visible()
        positions = np.arange(max(start, lease.shared_tokens), end)
        for column in range(spec.kv_pages_per_block):
            pages = lease.block_table[positions // size, column]
            self._write(pages, positions % size, expected[positions + 1], visible)
            seen = np.arange(end)
            self._read(lease.block_table[seen // size, column], seen % size, expected[seen + 1])
        positions = np.arange(start, end)
        for group, table in zip(spec.local_groups, lease.local_tables):
            seen = np.concatenate([seen_before(spec, group, start), positions])
            for column in range(spec.pages_per_block[group]):
                pages = table[positions // size, column]
                self._write(pages, positions % size, expected[positions + 1], visible)
                self._read(table[seen // size, column], seen % size, expected[seen + 1])
        running.state = int(expected[end])

    def preempt(self, running: Running) -> Parked:
        """Keep what was computed elsewhere, and let the lease go."""
        lease, size = running.lease, self.spec.block_size_tokens
        expected = prefix_hashes(running.tokens, running.salt)
        tables = [(np.arange(running.done), lease.block_table)]
        for group, table in zip(self.spec.local_groups, lease.local_tables):
            tables.append((seen_before(self.spec, group, running.done), table))
        for rows, table in tables:
            for column in range(table.shape[1]):
                self._read(table[rows // size, column], rows % size, expected[rows + 1])
        done = running.done
        self.finish(running, save=False)
        return Parked(running, done)

    def resume(self, parked: Parked, *, chunk: int | None = None, room: int = 0) -> Running | None:
        """Go on where `preempt` stopped. chunk, room: as for `start`."""
        running, done, size = parked.running, parked.done, self.spec.block_size_tokens
        lease = self.cache.resume(
            running.lease,
            np.array(running.tokens[:done], dtype=np.int32),
            capacity_tokens=done + room,
            chunk_tokens=chunk,
        )
        if lease is None:
            return None
        assert lease.done == done and not lease.copies
        expected, visible = prefix_hashes(running.tokens, running.salt), self.visible()
        tables = [(np.arange(lease.shared_tokens, done), lease.block_table)]
        for group, table in zip(self.spec.local_groups, lease.local_tables):
            tables.append((seen_before(self.spec, group, done), table))
        for rows, table in tables:
            for column in range(table.shape[1]):
                self._write(table[rows // size, column], rows % size, expected[rows + 1], visible)
        running = Running(running.tokens, running.salt, lease, int(expected[done]), running.saved)
        self.cache.commit(lease, np.array(running.tokens, dtype=np.int32), done, flush=True)
        return running

    def publish(self, running: Running, reservation: Reservation) -> bool:
        """Copy the state at the reserved position out, then make it visible."""
        expected = prefix_hashes(running.tokens[: reservation.position], running.salt)[-1]
        pages = np.repeat(reservation.pages, self.spec.block_size_tokens)
        rows = np.tile(np.arange(self.spec.block_size_tokens), len(reservation.pages))
        self._write(pages, rows, np.full(len(rows), expected), self.visible())
        published = self.cache.publish_checkpoint(reservation)
        if published:
            running.saved.append(reservation.position)
        return published

    def fork(self, running: Running) -> Running | None:
        tokens = np.array(running.tokens, dtype=np.int32)
        lease = self.cache.fork(running.lease, tokens, running.done)
        if lease is None:
            return None
        new = Running(list(running.tokens), running.salt, lease, running.state)
        assert lease.checkpoint_pages is None
        self._restore(new)
        return new

    def finish(self, running: Running, *, save: bool = True) -> None:
        """Commit to the last token, save the state there, release."""
        if running.done:
            tokens = np.array(running.tokens, dtype=np.int32)
            self.cache.commit(running.lease, tokens, running.done, flush=True, answered=save)
            if save and (reservation := self.cache.reserve_checkpoint(running.lease, running.done)):
                self.publish(running, reservation)
        self.cache.release(running.lease)

    def cancel(self, running: Running) -> None:
        self.cache.release(running.lease)

    # ---- a whole request ----

    def run(
        self, prompt, answer=(), salt: str = "", *, chunk: int | None = None, **options
    ) -> Running:
        """Prefill in chunks, decode the answer (the last of its tokens is sampled, not computed),
        finish. `chunk` None: one forward."""
        running = self.start(prompt, salt, chunk=chunk, **options)
        assert running is not None, "no room"
        while running.done < len(prompt):
            n = len(prompt) - running.done
            assert self.forward(running, min(n, chunk or n)), "no room"
        for token in answer:
            running.tokens.append(int(token))
            assert self.forward(running, 1), "no room"
        self.finish(running)
        self.check()
        return running

    # ---- memory ----

    def _write(
        self, pages: np.ndarray, rows: np.ndarray, values: np.ndarray, visible: np.ndarray
    ) -> None:
        assert (pages != 0).all(), "write into the null page"
        assert not visible[pages, rows].any(), "a visible row or checkpoint is overwritten"
        self.memory[pages, rows] = values

    def _read(self, pages: np.ndarray, rows: np.ndarray, expected: np.ndarray) -> None:
        got = self.memory[pages, rows]
        wrong = np.flatnonzero(got != expected)
        assert not wrong.size, f"rows {wrong.tolist()} of {len(got)} are not this request's"

    def visible(self) -> np.ndarray:
        """bool [pages, B]: rows that others may read."""
        size = self.spec.block_size_tokens
        visible = np.zeros_like(self.memory, dtype=bool)
        for edge in self.cache.index.edges():
            for block, pages in enumerate(edge.pages(size), start=edge.first_block):
                visible[pages, : edge.held_end - block * size] = True
            for checkpoint in stored(edge):
                visible[checkpoint.pages] = True
                for group, rows in zip(self.spec.local_groups, checkpoint.local_pages):
                    first = self.spec.first_local_block(group, checkpoint.position)
                    for block, pages in enumerate(rows, start=first):
                        visible[pages, : checkpoint.position - block * size] = True
        return visible

    def check(self) -> None:
        """Integrity, and every cached row and checkpoint is what its path says."""
        cache, size = self.cache, self.spec.block_size_tokens
        cache.check_integrity()
        pool = cache.allocator
        free = (pool.ref_counts == 0) & (pool.cached_counts == 0)
        self.memory[1:][free[1:]] = GARBAGE
        for salt, tokens, edge in cached_paths(cache):
            expected = prefix_hashes(tokens, salt)
            for block, pages in enumerate(edge.pages(size), start=edge.first_block):
                rows = np.arange(block * size, min(edge.held_end, (block + 1) * size))
                for page in pages:
                    self._read(np.full(len(rows), page), rows % size, expected[rows + 1])
            for checkpoint in stored(edge):
                position = checkpoint.position
                assert (self.memory[checkpoint.pages] == expected[position]).all()
                for group, blocks in zip(self.spec.local_groups, checkpoint.local_pages):
                    rows = seen_before(self.spec, group, position)
                    first = self.spec.first_local_block(group, position)
                    assert len(blocks) == len(set(rows // size)), "more than the tail is kept"
                    for column in range(blocks.shape[1]):
                        pages = blocks[rows // size - first, column]
                        self._read(pages, rows % size, expected[rows + 1])


def cached_paths(cache: PrefixCache):
    """(salt, all tokens from the root to the edge's end, edge) of every edge in the tree."""
    for edge in cache.index.edges():
        path = edge.from_root()
        tokens = tuple(token for each in path for token in each.tokens.tolist())
        yield path[0].parent.salt, tokens, edge
