"""LeasePages: the pages of a lease, from the first reference to the last.

A lease first gets the matched pages (`attach`) and references them (`hold`), then gets room to
write (`open`, `grow`). Local blocks that no later token sees are released (`roll`), and at the end
all pages (`release`). Callers check `has_room` before anything changes.
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import mul

import numpy as np

from megatron_hybrid.cache.eviction import Evictor
from megatron_hybrid.cache.lease import Lease, PageCopy
from megatron_hybrid.cache.pages.allocator import NULL_PAGE


class LeasePages:
    """Tables, pins and copies of leases."""

    def __init__(self, evictor: Evictor):
        self._evictor, self._spec, self._allocator = evictor, evictor.spec, evictor.allocator

    def attach(
        self,
        lease: Lease,
        rows: np.ndarray | None,
        local_rows: Sequence[np.ndarray] = (),
        checkpoint_pages: np.ndarray | None = None,
    ) -> None:
        """Enter the pages that a new lease resumes from. Their counts do not change.

        rows: pages of the blocks of [0, q). local_rows: per local group those of
        `CacheSpec.local_blocks` at p; by default the caller supplies their bytes. Full blocks enter
        the lease's tables; a partial last block is pinned, to be copied.
        """
        spec, size = self._spec, self._spec.block_size_tokens
        if rows is None:
            rows = np.empty((0, spec.kv_pages_per_block), dtype=np.int32)
        full = lease.shared_tokens // size
        lease.block_table = rows[:full]
        lease.pins = [rows[full:]]
        full = lease.done // size
        for i, group in enumerate(spec.local_groups):
            first = spec.first_local_block(group, lease.done)
            table = np.full((first, spec.pages_per_block[group]), NULL_PAGE, dtype=np.int32)
            shared = local_rows[i] if local_rows else table[:0]
            lease.local_tables.append(np.concatenate([table, shared[: full - first]]))
            lease.local_first.append(first)
            lease.pins.append(shared[full - first :])
        if checkpoint_pages is not None:
            lease.pins.append(checkpoint_pages)
        self._note_room(lease)

    def local_rows(self, lease: Lease, position: int) -> list[np.ndarray]:
        """Return, per local group, the lease's blocks that a checkpoint at this position needs,
        int32 [blocks, pages_per_block]."""
        return [
            table[self._spec.local_blocks(group, position)]
            for group, table in zip(self._spec.local_groups, lease.local_tables)
        ]

    def _note_room(self, lease: Lease) -> None:
        """Set the room of a lease by the lengths of its tables."""
        size = self._spec.block_size_tokens
        lease.capacity_tokens = len(lease.block_table) * size
        if lease.local_tables:
            lease.local_end = min(map(len, lease.local_tables)) * size

    def hold(self, lease: Lease) -> None:
        """Reference the pages of `attach`, so that they are not evicted."""
        self._allocator.retain(np.concatenate(list(held_pages(lease))))

    def would_have_room(self, lease: Lease, capacity_tokens: int, end: int) -> bool:
        pages = np.concatenate(list(held_pages(lease)))
        num_unheld = np.count_nonzero(self._allocator.ref_counts[pages] == 0)
        needed = self.num_needed(lease, capacity_tokens, end)
        return self._allocator.can_free(needed + num_unheld)

    def open(self, lease: Lease, capacity_tokens: int, end: int) -> None:
        """Make room for the rest of a lease after `hold`, and list the copies of partial blocks."""
        spec, size = self._spec, self._spec.block_size_tokens
        self.grow(lease, capacity_tokens, end)
        source, *local_sources = lease.pins[: 1 + len(spec.local_groups)]
        if len(source):
            own = lease.block_table[lease.shared_tokens // size]
            for group, columns in spec.columns.items():
                lease.copies.append(
                    PageCopy(group, source[0, columns], own[columns], lease.shared_tokens % size)
                )
        for group, table, source in zip(spec.local_groups, lease.local_tables, local_sources):
            if len(source):
                own = table[lease.done // size]
                lease.copies.append(PageCopy(group, source[0], own, lease.done % size))
        lease.next_flush = (lease.done // size + 1) * size

    def _missing(self, lease: Lease, capacity_tokens: int, end: int) -> tuple[int, list[int]]:
        """Count the blocks that the block table, and each local table, lack for this room."""
        blocks = self._spec.num_blocks(max(capacity_tokens, lease.shared_tokens))
        end = self._spec.num_blocks(end)
        return (
            max(0, blocks - len(lease.block_table)),
            [max(0, end - len(table)) for table in lease.local_tables],
        )

    def num_needed(self, lease: Lease, capacity_tokens: int, end: int) -> int:
        """Count the pages that this room takes beyond those of the lease."""
        return self._num_pages(*self._missing(lease, capacity_tokens, end))

    def most_needed(self, lease: Lease, capacity_tokens: int, chunk_tokens: int | None) -> int:
        """Return the most pages that this room takes at a time beyond those of the lease, over all
        forwards of at most chunk_tokens tokens. A later forward also needs the blocks that its
        first token sees. Blocks released by the lease meanwhile are still held by the state that it
        resumed from."""
        blocks, local_blocks = self._missing(lease, capacity_tokens, capacity_tokens)
        most = (
            self._spec.max_local_blocks(group, chunk_tokens or capacity_tokens)
            for group in self._spec.local_groups
        )
        return self._num_pages(blocks, map(min, local_blocks, most))

    def _num_pages(self, blocks: int, local_blocks: Iterable[int]) -> int:
        """Count the pages of so many blocks of full attention, and of each local group."""
        spec = self._spec
        per_block = (spec.pages_per_block[group] for group in spec.local_groups)
        return blocks * spec.kv_pages_per_block + sum(map(mul, local_blocks, per_block))

    def has_room(self, lease: Lease, capacity_tokens: int, end: int) -> bool:
        """Return whether eviction could make the room."""
        return self._allocator.can_free(self.num_needed(lease, capacity_tokens, end))

    def grow(self, lease: Lease, capacity_tokens: int, end: int) -> None:
        """Append blocks to the tables, after `has_room`."""
        spec = self._spec
        blocks, local_blocks = self._missing(lease, capacity_tokens, end)
        if blocks:
            new = self._allocate(blocks, spec.kv_pages_per_block)
            lease.block_table = np.concatenate([lease.block_table, new])
        for i, (group, missing) in enumerate(zip(spec.local_groups, local_blocks)):
            if missing:
                new = self._allocate(missing, spec.pages_per_block[group])
                lease.local_tables[i] = np.concatenate([lease.local_tables[i], new])
        self._note_room(lease)

    def lend(self, lease: Lease, start: int, end: int) -> int:
        """Append blocks of free pages for tokens up to `end`, or for as many as there are pages.
        Return the end of the room, at least `start`."""
        while end > start and self.num_needed(lease, end, end) > self._allocator.num_free:
            end -= 1
        if end > start:
            if lease.own_blocks is None:
                lease.own_blocks = [len(lease.block_table), *map(len, lease.local_tables)]
            self.grow(lease, end, end)
        return end

    def settle(self, lease: Lease) -> None:
        """Release the lent blocks after the computed tokens. The lease keeps the others."""
        tables, used = [lease.block_table, *lease.local_tables], self._spec.num_blocks(lease.done)
        ends = [max(own, used) for own in lease.own_blocks]
        lent = [table[end:].ravel() for table, end in zip(tables, ends)]
        self._allocator.release(np.concatenate(lent))
        lease.block_table, *lease.local_tables = [table[:end] for table, end in zip(tables, ends)]
        lease.own_blocks = None
        self._note_room(lease)

    def _allocate(self, blocks: int, pages_per_block: int) -> np.ndarray:
        """Allocate int32 [blocks, pages_per_block], evicting by value if needed."""
        needed = blocks * pages_per_block
        if not self._evictor.make_room(needed, force=True):
            raise RuntimeError(f"eviction could not free {needed} pages that were counted as held")
        return self._allocator.allocate(needed).reshape(blocks, pages_per_block)

    def roll(self, lease: Lease) -> int | None:
        """Release the local blocks that no later token sees. Return the first block that the lease
        held before, or None if nothing was released."""
        start, rolled = lease.local_start, False
        for i, group in enumerate(self._spec.local_groups):
            first, held = self._spec.first_local_block(group, lease.done), lease.local_first[i]
            if first > held:
                table = lease.local_tables[i].copy()
                self._allocator.release(table[held:first])
                table[held:first] = NULL_PAGE
                lease.local_tables[i] = table
                lease.local_first[i] = first
                rolled = True
        return start if rolled else None

    def release(self, lease: Lease) -> None:
        """Release all pages of a lease that has no reservations."""
        self._allocator.release(np.concatenate(list(held_pages(lease))))

    def num_holders(self, leases: Iterable[Lease]) -> np.ndarray:
        """Return the number of these leases that hold each page, int16 [num_pages]."""
        counts = np.zeros_like(self._allocator.ref_counts)
        for lease in leases:
            for pages in held_pages(lease):
                np.add.at(counts, pages, 1)
            for reservation in lease.reservations:
                for pages in (reservation.pages, *reservation.local_pages):
                    np.add.at(counts, pages.ravel(), 1)
        return counts


def forward_end(lease: Lease, capacity_tokens: int, chunk_tokens: int | None) -> int:
    """Return the end of the next forward: local KV needs room up to this position."""
    if chunk_tokens is None:
        return max(lease.done, capacity_tokens)
    return max(lease.done, min(capacity_tokens, lease.done + chunk_tokens))


def held_pages(lease: Lease) -> Iterator[np.ndarray]:
    """Yield the flat page lists of a lease, without its reservations."""
    yield lease.block_table.ravel()
    for first, table in zip(lease.local_first, lease.local_tables):
        yield table[first:].ravel()
    for pages in lease.pins:
        yield pages.ravel()
