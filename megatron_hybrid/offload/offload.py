"""Offload: the memories below the pool, host memory and a disk, and the ways between them.

Down: what the pool evicts is offered to the first tier, what that one refuses or evicts to the
next; each takes it if it is worth more than what it would have to drop. Up: a waiting request whose
prompt goes on deeper in a tier than in the pool has that part read, while others run, and brought
into the pool when it can start; it comes back as if a request had computed it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from megatron_hybrid.cache.index.tree import Checkpoint, Edge
from megatron_hybrid.cache.pages.lease import Lease, Reservation
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.values import rebuild_work
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.errors import is_lack_of_memory, optional_work
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.interrupts import interrupts_wait
from megatron_hybrid.offload.disk_store import DiskStore
from megatron_hybrid.offload.host_store import HostStore
from megatron_hybrid.offload.page_mover import Arrival, HostPages, PageMover
from megatron_hybrid.offload.prefix_keys import RecentKeys
from megatron_hybrid.offload.tier import (
    RETRY_SECONDS,
    Record,
    Source,
    Tier,
    least_capacity_bytes,
    state_record_pages,
)
from megatron_hybrid.ranks import agree_on_all, agree_on_one

MAX_READ_BYTES = 1 << 30
"""Most bytes read from the disk and not yet in the pool, save for the first request in line."""
MAX_WAIT_SECONDS = 0.005
"""Time that a step without work waits for a read; then its caller may add requests or cancel."""
_TIER_COUNTS = (
    "host_records_evicted",
    "host_without_memory",
    "disk_records_evicted",
    "disk_without_memory",
    "disk_records_unwritten",
)


@dataclass
class OffloadStats:
    """Counters since the engine was made."""

    fetches: int = 0
    fetched_tokens: int = 0
    """Prompt tokens that need no computing because a tier had them."""
    fetches_failed: int = 0
    """Found, and then damaged or not to be read."""


@dataclass(eq=False)
class Fetch:
    """Part of a prompt on its way from a tier into the pool."""

    tokens: np.ndarray  # int32 [p]
    salt: str
    tier: Tier
    record: Record
    first_block: int  # the blocks before it were in the pool
    chain: list[Record]
    skipped_before: int  # tokens that the pool alone would have skipped
    wanted: list[Record]  # the chain's blocks from first_block on, then the state
    reads: list[Future] | None = None  # their pages; None: it has yet to begin
    read_bytes: int = 0  # host memory that these take
    num_waiting: int = 0  # requests
    lease: Lease | None = None
    reservation: Reservation | None = None
    arrival: Arrival | None = None
    lacks_room: bool = False  # all is read, and what runs holds the pool
    is_over: bool = False
    has_failed: bool = False  # damaged or given up: nothing of it came

    @property
    def position(self) -> int:
        """p: where a prefill could start when it is there."""
        return self.record.position

    @property
    def is_read(self) -> bool:
        return self.reads is not None and all(read.done() for read in self.reads)


class Offload:
    """Moves what is cached between the pool and the tiers.

    Args:
        cache, pool: the pool's bookkeeping and its bytes, uint8 [num_pages, page_bytes].
        host_bytes: of the host tier; 0: there is none.
        disk: an opened folder; None: there is no disk tier.
        disk_bytes: of the disk tier.
    """

    def __init__(
        self, cache: PrefixCache, pool, host_bytes: int, disk: DiskStore | None, disk_bytes: int
    ):
        self.cache = cache
        self.spec = cache.spec
        self.stats = OffloadStats()
        self.tiers: list[Tier] = []
        self._mover = PageMover(pool)
        self._keys = RecentKeys(self.spec.block_size_tokens)
        self._fetches: dict[bytes, Fetch] = {}  # by the record's key
        self._unreadable_until: dict[bytes, float] = {}  # by the key of what was to be fetched
        self._read_bytes = 0
        self._closed_counts = dict.fromkeys(_TIER_COUNTS, 0)
        self._disk_bytes = disk_bytes
        if disk is not None:
            self.tiers.append(disk_tier(disk, self.spec, disk_bytes))
        if host_bytes:
            leaves = partial(self._host_to, self.tiers[-1]) if self.tiers else lambda record: None
            host = Tier("host", self.spec, host_bytes, HostStore(), leaves)
            self.tiers.insert(0, host)
        if self.tiers:
            cache.watch_evictions(self)
        # The store's threads keep it alive, and with it the lock of its folder, which an engine
        # that nobody closes must let go as well.
        self._let_go = weakref.finalize(self, disk.close_from_anywhere) if disk else None

    @property
    def disk(self) -> Tier | None:
        """The disk tier."""
        return self.tiers[-1] if self.tiers and self.tiers[-1].name == "disk" else None

    def counters(self) -> dict[str, int]:
        """Counters since the start, and what the tiers hold now."""
        self._forget_unwritten()
        disk = self.disk
        held = {
            "disk_write_bytes": 0 if disk is None else disk.store.waiting_bytes,
            "disk_read_bytes": self._read_bytes,
        }
        for name in ("host", "disk"):
            tier = next((tier for tier in self.tiers if tier.name == name), None)
            held[f"{name}_bytes"] = tier.used_bytes if tier else 0
            held[f"{name}_states"] = tier.num_states if tier else 0
            held[f"{name}_kv_blocks"] = tier.num_blocks if tier else 0
        return {**asdict(self.stats), **held, **self._tier_counts()}

    def _tier_counts(self) -> dict[str, int]:
        """What only grows in the tiers, since the start; also after `close`."""
        counts = dict(self._closed_counts)
        for tier in self.tiers:
            counts[f"{tier.name}_records_evicted"] = tier.num_evicted
            counts[f"{tier.name}_without_memory"] = tier.num_without_memory
        if self.disk is not None:
            counts["disk_records_unwritten"] = self.disk.store.num_unwritten
        return counts

    def clear(self) -> None:
        """Forgets all that the tiers hold."""
        if self.disk is not None:
            self.disk.store.check_process()  # before anything is forgotten
        self._give_up_fetches()
        for tier in self.tiers:
            tier.clear()
        if self.disk is not None:
            self.disk.capacity_bytes = self._disk_bytes  # it may have been full

    def close(self) -> None:
        """Writes what is on its way to the disk; nothing is kept or fetched from now on."""
        self._give_up_fetches()
        if self.disk is not None:
            self.disk.store.close()
            self._let_go.detach()
        self._closed_counts = self._tier_counts()
        self.tiers.clear()
        self.cache.watch_evictions(None)

    def _give_up_fetches(self) -> None:
        for fetch in list(self._fetches.values()):
            self._give_up(fetch)

    def _forget_unwritten(self) -> None:
        disk = self.disk
        if disk is None:
            return
        is_settled = not disk.store.waiting_bytes  # asked first: what waits may fail, too
        for record in disk.store.take_unwritten():
            disk.remove(record)
        if is_settled and disk.store.was_full():
            # From now on a record must be worth more than what goes for it, as with any full tier.
            disk.capacity_bytes = min(disk.capacity_bytes, disk.used_bytes)

    # ---- down ----

    def on_evict_state(self, checkpoint: Checkpoint) -> None:
        """The pool evicts a state (`eviction.EvictionListener`)."""
        if self.spec.needs_state:
            with self._optional():
                self._offer_state(checkpoint, self.tiers)

    def on_evict_blocks(self, edge: Edge, end: int) -> None:
        """The pool evicts KV that resumes by itself (`eviction.EvictionListener`)."""
        with self._optional():
            self._offer_blocks(edge, end, self.tiers)

    def _optional(self) -> AbstractContextManager[None]:
        """Around what keeps something in a tier: without memory it is not kept, and counted."""
        return optional_work(lambda error: self.tiers[0].lacks_memory(error))

    def _offer_state(self, checkpoint: Checkpoint, tiers: list[Tier]) -> None:
        """Offers a stored state, with the KV before it, to tiers, until one takes it."""
        size, position = self.spec.block_size_tokens, checkpoint.position
        if position < size:
            return  # less than a block is sooner computed
        salt, tokens, rows = self.cache.prefix(checkpoint.edge, position)
        keys = self._keys.of(tokens, salt)
        full = position // size
        source = PoolSource(
            self._mover, rows, np.concatenate([*checkpoint.page_lists(), rows[full:].ravel()])
        )
        state = {
            "state": keys.state(position),
            "position": position,
            "saved_work": rebuild_work(checkpoint, checkpoint.below(), self.spec),
            "uses": checkpoint.uses + 1,
        }
        for tier in tiers:
            if tier.keep(keys.blocks(full), source, **state):
                break

    def _offer_blocks(self, edge: Edge, end: int, tiers: list[Tier]) -> None:
        """Offers the KV of the full blocks of the first `end` tokens on the way to and along an
        edge to tiers, until one takes it."""
        size = self.spec.block_size_tokens
        end = end // size * size
        if not end:
            return
        salt, tokens, rows = self.cache.prefix(edge, end)
        keys, source = self._keys.of(tokens, salt), PoolSource(self._mover, rows, rows[:0])
        for tier in tiers:
            if tier.keep(keys.blocks(end // size), source):
                break

    def _host_to(self, lower: Tier, record: Record) -> None:
        """The host tier evicts a record."""
        self._keep_in(lower, record, HostSource(self.tiers[0].store, record.chain(), record))

    def _disk_to(self, other: Tier, record: Record) -> None:
        """Offers a record of the disk tier to that of another folder; not what is damaged."""
        store = self.disk.store
        chain = [*record.chain(), record] if record.is_state else record.chain()
        reads = [None if each.key in other else store.get(each) for each in chain]
        pages = [read and read.result() for read in reads]
        if all(part is not None for read, part in zip(reads, pages) if read):
            self._keep_in(other, record, ReadSource(pages))

    def _keep_in(self, tier: Tier, record: Record, source: Source) -> None:
        tier.keep(
            [block.key for block in record.chain()],
            source,
            state=record.key if record.is_state else None,
            position=record.position,
            saved_work=record.saved_work,
            uses=record.uses,
        )

    # ---- up ----

    def find(self, tokens: np.ndarray, salt: str, skipped: int) -> tuple[Tier, Record] | None:
        """What a prompt can go on from that is deeper than `skipped` tokens, by a block at least;
        of two equal ones that in the faster memory."""
        size = self.spec.block_size_tokens
        keys = self._keys.of(tokens, salt)
        best = None
        for tier in self.tiers:
            record = tier.find(keys)
            if record is not None and record.position >= skipped + size:
                best, skipped = (tier, record), record.position - size + 1
        return best

    def start(self, tokens: np.ndarray, salt: str) -> Fetch | None:
        """Begins to fetch what a tier holds of a prompt beyond the pool. None: nothing to fetch."""
        tier = found = None
        with suppress(MemoryError):  # then the prompt is computed
            match, size = self.cache.match(tokens, salt), self.spec.block_size_tokens
            deeper = self.find(tokens, salt, match.skipped_tokens)
            if deeper is not None:
                prefix = tokens[: deeper[1].position].copy()
                tier, found = deeper
        if found is not None and self._unreadable_until.get(found.key, 0.0) > time.monotonic():
            found = None
        # The ranks' disks may differ: without agreement nobody fetches.
        position = found.position if found is not None else 0
        if not agree_on_one(position) or found is None:
            return None
        fetch = self._fetches.get(found.key)
        if fetch is None:
            chain = found.chain()
            first = min(match.shared_tokens // size, len(chain))
            wanted = chain[first:] + ([found] if found.is_state else [])
            tier.pin(found)
            fetch = Fetch(
                prefix,
                salt,
                tier,
                found,
                first,
                chain,
                match.skipped_tokens,
                wanted,
            )
            self._fetches[found.key] = fetch
        fetch.num_waiting += 1
        return fetch

    def leave(self, fetch: Fetch) -> None:
        """A request that waited for a fetch is cancelled; the last one ends it."""
        fetch.num_waiting -= 1
        if not fetch.num_waiting and not fetch.is_over:
            self._give_up(fetch)

    def read(self, fetch: Fetch, *, is_first: bool) -> None:
        """Begins to read what a fetch wants, if that is not too much with what is read already.
        is_first: a request waits for it that is the first in line; others must not keep it waiting.
        """
        if fetch.reads is None:
            num_bytes = self._read_bytes + self._bytes_to_read(fetch, fetch.wanted)
            if is_first or num_bytes <= MAX_READ_BYTES:
                with self._may_fail(fetch):
                    self._read(fetch, fetch.wanted)

    def bring(self, fetch: Fetch, capacity_tokens: int, chunk_tokens: int) -> None:
        """A request that waits for a fetch can start next: brings what is read into the pool, once
        there is room for the whole request (arguments as in `PrefixCache.acquire`)."""
        if fetch.lease is None and agree_on_all(fetch.is_read):
            with self._may_fail(fetch):
                self._to_pool(fetch, capacity_tokens, chunk_tokens)
            self._publish_if_there(fetch)

    def poll(self) -> None:
        """Publishes what has arrived in the pool. Call it before requests start."""
        self._forget_unwritten()
        for fetch in list(self._fetches.values()):
            self._publish_if_there(fetch)

    def _publish_if_there(self, fetch: Fetch) -> None:
        if fetch.arrival is not None and agree_on_all(fetch.arrival.is_done()):
            self._publish(fetch)

    @property
    def is_busy(self) -> bool:
        return bool(self._fetches)

    def wait(self) -> None:
        """Waits until a fetch can go on, but not long."""
        for fetch in self._fetches.values():
            if fetch.reads is not None and not fetch.is_read:
                wait(fetch.reads, MAX_WAIT_SECONDS)
                return
        for fetch in self._fetches.values():
            if fetch.arrival is not None:
                fetch.arrival.wait()
                return

    def _read(self, fetch: Fetch, records: list[Record]) -> None:
        """Begins to read these, the first of what a fetch wants."""
        fetch.reads = [fetch.tier.store.get(record) for record in records] + (fetch.reads or [])
        num_bytes = self._bytes_to_read(fetch, records)
        fetch.read_bytes += num_bytes
        self._read_bytes += num_bytes

    def _bytes_to_read(self, fetch: Fetch, records: list[Record]) -> int:
        if fetch.tier is not self.disk:
            return 0  # host memory holds its own anyway
        return sum(record.num_bytes for record in records)

    def _to_pool(self, fetch: Fetch, capacity_tokens: int, chunk_tokens: int) -> None:
        """All is in host memory: starts the way into the pool, if there is room."""
        failed = any(read.exception() for read in fetch.reads)
        pages = [None if read.exception() else read.result() for read in fetch.reads]
        if not agree_on_all(all(part is not None for part in pages)):
            damaged = [
                record
                for record, read in zip(fetch.wanted, fetch.reads)
                if not read.exception() and read.result() is None
            ]
            if damaged:
                fetch.tier.remove(damaged[0])  # and what follows it
            self._fail(fetch, later=failed)  # what is there may be read later
            return
        size, position = self.spec.block_size_tokens, fetch.position
        lease = self.cache.adopt(
            fetch.tokens,
            fetch.salt,
            capacity_tokens=capacity_tokens,
            chunk_tokens=chunk_tokens,
        )
        fetch.lacks_room = lease is None
        if lease is None:
            return  # again later
        shared = lease.shared_tokens // size
        if shared < fetch.first_block:  # the pool has evicted some of what it had: read that too
            self.cache.release(lease)
            more = fetch.chain[shared : fetch.first_block]
            fetch.wanted[:0], fetch.first_block = more, shared
            self._read(fetch, more)
            self.bring(fetch, capacity_tokens, chunk_tokens)
            return
        targets = list(lease.block_table[shared : len(fetch.chain)])
        sources = pages[shared - fetch.first_block : len(fetch.chain) - fetch.first_block]
        fetch.lease = lease
        if fetch.record.is_state:
            own, local, partial_block = self._split_state(pages[-1], position)
            fetch.reservation = self.cache.reserve_checkpoint(lease, position, wanted=True)
            if fetch.reservation is not None:
                targets.append(fetch.reservation.pages)
                sources.append(own)
            for group, table, part in zip(self.spec.local_groups, lease.local_tables, local):
                targets.append(table[self.spec.local_blocks(group, position)].ravel())
                sources.append(part)
            if position % size:
                targets.append(lease.block_table[position // size])
                sources.append(partial_block)
        fetch.arrival = self._mover.to_pool(targets, sources)

    @contextmanager
    def _may_fail(self, fetch: Fetch) -> Iterator[None]:
        """Around what a fetch needs: if it raises, the fetch has failed; for want of memory nothing
        else has."""
        try:
            yield
        except Exception as error:
            if not fetch.is_over:
                self._fail(fetch)
            if not is_lack_of_memory(error):
                raise

    def _fail(self, fetch: Fetch, *, later: bool = True) -> None:
        """Ends a fetch of which nothing comes: its prompt is computed. later: not to be tried again
        for a while."""
        lease, fetch.lease = fetch.lease, None
        fetch.has_failed = True
        self._end(fetch)
        self.stats.fetches_failed += 1
        if later:
            self._leave_alone(fetch.record)
        if lease is not None:
            self.cache.release(lease)

    def _leave_alone(self, record: Record) -> None:
        now = time.monotonic()
        still = {key: until for key, until in self._unreadable_until.items() if until > now}
        self._unreadable_until = {**still, record.key: now + RETRY_SECONDS}

    def _split_state(
        self, pages: HostPages, position: int
    ) -> tuple[HostPages, list[HostPages], HostPages]:
        """The parts of a state's record: the state, local blocks by group, the partial block."""
        spec = self.spec
        sizes = [spec.checkpoint_pages]
        for group in spec.local_groups:
            blocks = spec.local_blocks(group, position)
            sizes.append((blocks.stop - blocks.start) * spec.pages_per_block[group])
        sizes.append(state_record_pages(spec, position) - sum(sizes))
        own, *local, rest = (HostPages(part, pages.arrived) for part in pages.data.split(sizes))
        return own, local, rest

    def _publish(self, fetch: Fetch) -> None:
        """All is in the pool: from now on it is found there."""
        with self._may_fail(fetch):
            self.cache.commit(fetch.lease, fetch.tokens, fetch.position, flush=True)
            if fetch.reservation is not None:
                self.cache.publish_checkpoint(fetch.reservation)
        if fetch.is_over:
            return
        self.cache.release(fetch.lease)
        fetch.tier.used(fetch.record)
        self.stats.fetches += 1
        self._end(fetch)

    def _give_up(self, fetch: Fetch) -> None:
        """Ends a fetch that nobody wants. What is on its way into the pool arrives."""
        if fetch.arrival is not None:
            fetch.arrival.wait()
            self._publish(fetch)
            return
        try:
            for read in fetch.reads or []:
                read.cancel()
        finally:
            fetch.has_failed = True
            self._end(fetch)

    def _end(self, fetch: Fetch) -> None:
        fetch.is_over = True
        self._read_bytes -= fetch.read_bytes
        fetch.reads, fetch.arrival = [], None  # the request may be held for long, not their bytes
        fetch.tier.unpin(fetch.record)
        del self._fetches[fetch.record.key]

    def count(self, fetch: Fetch, skipped_tokens: int) -> int:
        """A request that waited for a fetch was admitted; tokens that it skips thanks to it."""
        if fetch.has_failed:
            return 0
        tokens = max(0, min(skipped_tokens, fetch.position) - fetch.skipped_before)
        self.stats.fetched_tokens += tokens
        return tokens

    # ---- all of it ----

    def save_to(self, tier: Tier) -> None:
        """Copies all that is cached to a disk tier, as long as there is room: what is in the pool,
        the most valuable first, then in host memory, then on the own disk. Ctrl-C comes between two
        of them.

        Raises:
            OSError: writing failed, or reading the own disk.
        """
        tier.store.recover()
        with interrupts_wait():
            self._forget_unwritten()
            if tier is self.disk:  # there may be space again
                room = tier.used_bytes + tier.store.free_bytes()
                tier.capacity_bytes = max(tier.capacity_bytes, min(self._disk_bytes, room))
        offers = []
        if self.spec.needs_state:
            for checkpoint in self.cache.stored_checkpoints():
                offers.append(partial(self._offer_state, checkpoint, [tier]))
        else:
            for edge in self.cache.held_leaves():
                offers.append(partial(self._offer_blocks, edge, edge.held_end, [tier]))
        for other in self.tiers:
            if other is not tier:
                offer = self._disk_to if other is self.disk else self._host_to
                for record in other.records():
                    if record.is_state or not (self.spec.needs_state or record.num_children):
                        offers.append(partial(offer, tier, record))
        for offer in offers:
            if not tier.store.accepts():
                tier.store.flush()
            with interrupts_wait():
                offer()
        tier.store.flush()


class PoolSource:
    """Bytes of a state and its blocks in the pool (`tier.Source`)."""

    def __init__(self, mover: PageMover, rows: np.ndarray, state_pages: np.ndarray):
        self._mover, self._rows, self._state_pages = mover, rows, state_pages

    def blocks(self, indices: list[int]) -> Iterable[HostPages]:
        return self._mover.to_host(list(self._rows[indices]))

    def state(self) -> HostPages:
        return self._mover.to_host([self._state_pages.ravel()])[0]


class HostSource:
    """Bytes of a record of the host tier, and of the blocks before it (`tier.Source`)."""

    def __init__(self, store: HostStore, chain: list[Record], record: Record):
        self._store, self._chain, self._record = store, chain, record

    def blocks(self, indices: list[int]) -> Iterable[HostPages]:
        return [self._store.pages(self._chain[index]) for index in indices]

    def state(self) -> HostPages:
        return self._store.pages(self._record)


class ReadSource:
    """Bytes of a record that were read, behind those of the blocks before it (`tier.Source`)."""

    def __init__(self, pages: list[HostPages | None]):
        self._pages = pages

    def blocks(self, indices: list[int]) -> Iterable[HostPages]:
        return [self._pages[index] for index in indices]

    def state(self) -> HostPages:
        return self._pages[-1]


def check_capacities(config: InferenceConfig, spec: CacheSpec) -> None:
    """Raises ValueError if a tier is too small to be of any use."""
    least = least_capacity_bytes(spec)
    wanted = {"host_cache_bytes": config.host_cache_bytes}
    if config.cache_dir is not None:
        wanted["disk_cache_bytes"] = config.disk_cache_bytes
    for name, capacity in wanted.items():
        if 0 < capacity < least:
            raise ValueError(
                f"{name}={capacity} holds nothing that could be resumed: a block of "
                f"{spec.block_size_tokens} tokens and its state have {least} bytes; raise it, or "
                f"leave out {'cache_dir' if name.startswith('disk') else name}"
            )


def disk_tier(
    store: DiskStore, spec: CacheSpec, capacity_bytes: int, *, shrinks: bool = True
) -> Tier:
    """A tier with what a folder holds. If that is more than `capacity_bytes` the least valuable
    goes, or, without `shrinks`, the tier is as large as what is there."""
    try:
        found = store.load()
        if not shrinks:
            held = sum(record.num_bytes for record, _ in found)
            capacity_bytes = max(capacity_bytes, held)
        tier = Tier("disk", spec, capacity_bytes, store)
        tier.load(found)
        store.shrink(capacity_bytes)
    except BaseException:
        store.close()  # or nobody could open the folder again
        raise
    return tier
