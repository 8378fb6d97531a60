"""Fetches: copies of parts of prompts from a tier into the pool.

This file decides, from the cache's bookkeeping alone, what to fetch, when to read it, when the pool
has room for it, and when it becomes visible. The tier's store reads the bytes (`RecordStore.get`);
a `PageMover` writes them into the pool when the planned step runs. This file has no tensors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING

import numpy as np

from megatron_hybrid.cache.lease import Lease, Reservation
from megatron_hybrid.cache.pages.allocator import NULL_PAGE
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.offload.prefix_keys import RecentKeys
from megatron_hybrid.offload.tier import RETRY_SECONDS, Record, Tier
from megatron_hybrid.utils.out_of_memory import (
    is_lack_of_memory,
    note_decided_by_memory,
    optional_decision,
)

if TYPE_CHECKING:
    from megatron_hybrid.offload.page_mover import Arrival, HostPages, PageMover

MAX_READ_BYTES = 1 << 30
"""Most bytes read from the disk and not yet in the pool; the first request in the queue may exceed
it."""
MAX_WAIT_SECONDS = 0.005
"""Longest wait of a step without work for a read before it returns."""


class FetchState(Enum):
    """Progress of a fetch."""

    FOUND = auto()
    """A tier has it; reading has not begun."""
    READING = auto()
    """Being read into host memory, or already there."""
    LACKS_ROOM = auto()
    """Host memory has it; the pool is full of pinned pages."""
    PLANNED = auto()
    """Has pages of the pool; the step that loads it has not run."""
    LOADING = auto()
    """Being copied from host memory into the pages of its lease."""
    DONE = auto()
    """The pool has it, visible to all requests."""
    FAILED = auto()
    """Damaged, unreadable or cancelled: nothing of it is in the pool."""


class Progress(IntEnum):
    """Whether a fetch can continue, or why not. The largest value of all ranks counts."""

    READY = 0
    """It can continue: it is read, or it has arrived."""
    PENDING = 1
    """It is being read, or copied into the pool."""
    UNREADABLE = 2
    """A record cannot be read now."""
    DAMAGED = 3
    """A record is damaged, or was never written."""


@dataclass(eq=False)
class Fetch:
    """A copy of a part of a prompt from a tier into the pool."""

    tokens: np.ndarray  # int32 [p]
    salt: str
    tier: Tier
    record: Record
    first_block: int  # the blocks before it were in the pool
    chain: list[Record]
    skipped_before: int  # tokens that would be skipped without the fetch
    wanted: list[Record]  # the chain's blocks from first_block on, then the state
    state: FetchState = FetchState.FOUND
    num_waiting: int = 0  # requests
    reads: list[Future[HostPages | None]] = field(default_factory=list)  # of `wanted`
    read_bytes: int = 0  # host memory that these take
    lease: Lease | None = None
    reservation: Reservation | None = None
    arrival: Arrival | None = None

    @property
    def position(self) -> int:
        """p: start of the prefill after the fetch."""
        return self.record.position

    def progress(self) -> Progress:
        """Return the progress of the fetch on this rank."""
        if self.state is FetchState.LOADING:
            return Progress.READY if self.arrival.is_done() else Progress.PENDING
        if self.state not in (FetchState.READING, FetchState.LACKS_ROOM):
            return Progress.PENDING
        if not all(read.done() for read in self.reads):
            return Progress.PENDING
        if any(read.exception() for read in self.reads):
            return Progress.UNREADABLE
        return Progress.DAMAGED if self.damaged() else Progress.READY

    def damaged(self) -> list[Record]:
        """Return a list of the first record that is known to be damaged, or an empty one."""
        for record, read in zip(self.wanted, self.reads):
            if read.done() and not read.exception() and read.result() is None:
                return [record]
        return []

    @property
    def lacks_room(self) -> bool:
        return self.state is FetchState.LACKS_ROOM

    @property
    def is_coming(self) -> bool:
        """Whether it has pages of the pool."""
        return self.state in (FetchState.PLANNED, FetchState.LOADING)

    @property
    def has_failed(self) -> bool:
        return self.state is FetchState.FAILED

    @property
    def is_over(self) -> bool:
        return self.state in (FetchState.DONE, FetchState.FAILED)


class Fetches:
    """All running fetches.

    For each waiting request, in order, call `start`, `read`, and when the request can start,
    `bring`; then `poll`. The step runs the loads of `take_loads` with `load`; if it fails, call
    `abort`. When a request is admitted, call `count`; when it is cancelled, `leave`.

    Args:
        cache: the pool's bookkeeping.
        tiers: the fastest first; this list may change.
        keys: of recent prefixes.
        mover: writes into the pool.
    """

    def __init__(self, cache: PrefixCache, tiers: list[Tier], keys: RecentKeys, mover: PageMover):
        self.tiers = tiers
        self.counts = dict.fromkeys(("fetches", "fetched_tokens", "fetches_failed"), 0)
        """Counters since the engine was made."""
        self.read_bytes = 0
        """Bytes of host memory that were read and are not in the pool yet."""
        self._cache = cache
        self._spec = cache.spec
        self._keys = keys
        self._mover = mover
        self._agreed: dict[bytes, int] = {}  # progress by the record's key
        self._now = 0.0
        self._fetches: dict[bytes, Fetch] = {}  # by the record's key
        self._planned: dict[bytes, list[np.ndarray]] = {}
        self._unreadable_until: dict[bytes, float] = {}  # by the record's key

    # ---- agreement of ranks ----

    def facts(self) -> list[int]:
        """Return the time in ms, and the progress of each fetch, on this rank."""
        progress = (fetch.progress() for fetch in self._fetches.values())
        return [int(time.monotonic() * 1000), *progress]

    def settle(self, facts: Sequence[int]) -> None:
        """Set time and progress of fetches, until the next step, to the largest of all ranks."""
        now, *progress = facts
        self._now = now / 1000
        self._agreed = dict(zip(self._fetches, progress))

    def damaged(self, tier: Tier) -> list[bytes]:
        """Return the keys of records of a tier that this rank read and found damaged."""
        fetches = [fetch for fetch in self._fetches.values() if fetch.tier is tier]
        return [record.key for fetch in fetches for record in fetch.damaged()]

    def _progress(self, fetch: Fetch) -> Progress:
        if fetch.tier.name == "host" and fetch.state is not FetchState.LOADING:
            # Ready at once on all ranks: if bytes are lost on one of them, the load fails there.
            is_read = all(read.done() for read in fetch.reads)
            return Progress.READY if is_read else Progress.PENDING
        return Progress(self._agreed.get(fetch.record.key, Progress.PENDING))

    # ---- decisions ----

    @property
    def is_busy(self) -> bool:
        return bool(self._fetches)

    def find(self, tokens: np.ndarray, salt: str, skipped: int) -> tuple[Tier, Record] | None:
        """Return the deepest record of a prompt that is at least a block deeper than `skipped`
        tokens, and its tier. Of equal records, it is the one in the faster tier."""
        size = self._spec.block_size_tokens
        keys = self._keys.of(tokens, salt)
        best = None
        for tier in self.tiers:
            record = tier.find(keys)
            if record is not None and record.position >= skipped + size:
                best, skipped = (tier, record), record.position - size + 1
        return best

    def start(self, tokens: np.ndarray, salt: str) -> Fetch | None:
        """Return the fetch of the part of a prompt that a tier has and the pool lacks, or None if
        there is no such part."""
        tier = found = None
        with optional_decision(lambda error: None):  # without memory, the prompt is computed
            match, size = self._cache.match(tokens, salt), self._spec.block_size_tokens
            deeper = self.find(tokens, salt, match.skipped_tokens)
            if deeper is not None:
                prefix = tokens[: deeper[1].position].copy()
                tier, found = deeper
        if found is None or self._unreadable_until.get(found.key, 0.0) > self._now:
            return None
        fetch = self._fetches.get(found.key)
        if fetch is None:
            chain = found.chain()
            first = min(match.shared_tokens // size, len(chain))
            wanted = chain[first:] + ([found] if found.is_state else [])
            tier.pin(found)
            skipped = match.skipped_tokens
            fetch = Fetch(prefix, salt, tier, found, first, chain, skipped, wanted)
            self._fetches[found.key] = fetch
        fetch.num_waiting += 1
        return fetch

    def leave(self, fetch: Fetch) -> None:
        """Note that a request waiting for a fetch was cancelled. The last one cancels the fetch."""
        fetch.num_waiting -= 1
        if not fetch.num_waiting and not fetch.is_over:
            self._give_up(fetch)

    def count(self, fetch: Fetch, skipped_tokens: int) -> int:
        """Count an admitted request that waited for a fetch. Return the number of tokens that it
        skips because of the fetch."""
        if fetch.has_failed:
            return 0
        tokens = max(0, min(skipped_tokens, fetch.position) - fetch.skipped_before)
        self.counts["fetched_tokens"] += tokens
        return tokens

    def read(self, fetch: Fetch, *, is_first: bool) -> None:
        """Start reading the records of a fetch, within `MAX_READ_BYTES`. is_first: whether the
        first request in the queue waits for it, so that the limit does not apply."""
        if fetch.state is not FetchState.FOUND:
            return
        num_bytes = self.read_bytes + _bytes_to_read(fetch, fetch.wanted)
        if is_first or num_bytes <= MAX_READ_BYTES:
            with self._may_fail(fetch):
                self._read(fetch, fetch.wanted)

    def bring(self, fetch: Fetch, capacity_tokens: int, chunk_tokens: int) -> None:
        """Plan the load of a read fetch once there is room for the whole request that waits for it,
        and publish the fetch when it has arrived. Call it when that request could start, with
        arguments as for `PrefixCache.acquire`."""
        if fetch.is_coming:
            self._publish_if_there(fetch)
            return
        is_begun = fetch.state in (FetchState.READING, FetchState.LACKS_ROOM)
        progress = self._progress(fetch)
        if not is_begun or progress is Progress.PENDING:
            return
        with self._may_fail(fetch):
            if progress is not Progress.READY:
                # Unreadable records may be readable later; `Offload.poll` removes damaged ones.
                self._fail(fetch, retries_later=progress is Progress.UNREADABLE)
            elif self._adopt(fetch, capacity_tokens, chunk_tokens):
                self._planned[fetch.record.key] = self._targets(fetch)
                fetch.state = FetchState.PLANNED
        if fetch.state is FetchState.READING:  # blocks that the pool evicted meanwhile
            self.bring(fetch, capacity_tokens, chunk_tokens)

    def take_loads(self) -> dict[bytes, list[np.ndarray]]:
        """Return the loads of the planned step: pages for each record, by key."""
        loads, self._planned = self._planned, {}
        return loads

    def load(self, key: bytes, targets: list[np.ndarray]) -> None:
        """Start to copy a read fetch into pages of the pool, int32 [n] for each record. If this
        raises, no copy is running."""
        fetch = self._fetches[key]
        pages = [read.result() for read in fetch.reads]
        # Meanwhile the pool may have got the first blocks from other requests.
        fetch.arrival = self._mover.to_pool(targets, pages[len(pages) - len(targets) :])
        fetch.state = FetchState.LOADING

    def fail(self, key: bytes) -> None:
        """End a fetch that could not be loaded for lack of memory."""
        self._fail(self._fetches[key])

    def abort(self) -> None:
        """End the fetches that a failed step has not begun to load."""
        for fetch in list(self._fetches.values()):
            if fetch.state is FetchState.PLANNED:
                self._fail(fetch)

    def poll(self) -> bool:
        """Publish the fetches that have arrived in the pool, which makes them evictable. Return
        whether there were any."""
        fetches = list(self._fetches.values())
        return any([self._publish_if_there(fetch) for fetch in fetches])

    def wait(self) -> None:
        """Wait until a fetch can continue, at most `MAX_WAIT_SECONDS` for a read."""
        for fetch in self._fetches.values():
            if fetch.state is FetchState.READING and fetch.progress() is Progress.PENDING:
                wait(fetch.reads, MAX_WAIT_SECONDS)
                return
        for fetch in self._fetches.values():
            if fetch.arrival is not None:
                fetch.arrival.wait()
                return

    def give_up_all(self) -> None:
        """Cancel all fetches; running copies into the pool are completed."""
        for fetch in list(self._fetches.values()):
            self._give_up(fetch)

    def _adopt(self, fetch: Fetch, capacity_tokens: int, chunk_tokens: int) -> bool:
        """Lease pages of the pool for a read fetch. Return False if there is no room, or if more
        must be read."""
        size, position = self._spec.block_size_tokens, fetch.position
        lease = self._cache.adopt(
            fetch.tokens, fetch.salt, capacity_tokens=capacity_tokens, chunk_tokens=chunk_tokens
        )
        if lease is None:
            fetch.state = FetchState.LACKS_ROOM  # the next `bring` tries again
            return False
        shared = lease.shared_tokens // size
        if shared < fetch.first_block:  # the pool evicted some of its blocks: read these, too
            self._cache.release(lease)
            more = fetch.chain[shared : fetch.first_block]
            fetch.wanted[:0], fetch.first_block = more, shared
            self._read(fetch, more)
            return False
        fetch.lease = lease
        if fetch.record.is_state:
            fetch.reservation = self._cache.reserve_checkpoint(lease, position, wanted=True)
        return True

    def _targets(self, fetch: Fetch) -> list[np.ndarray]:
        """Return pages of the pool for each wanted record that the pool lacks, int32 [n]."""
        spec, lease, position = self._spec, fetch.lease, fetch.position
        shared = lease.shared_tokens // spec.block_size_tokens
        targets = list(lease.block_table[shared : len(fetch.chain)])
        if fetch.record.is_state:  # the state, local blocks by group, the partial block
            own = np.full(spec.checkpoint_pages, NULL_PAGE, dtype=np.int32)
            parts = [own if fetch.reservation is None else fetch.reservation.pages]
            for group, table in zip(spec.local_groups, lease.local_tables):
                parts.append(table[spec.local_blocks(group, position)].ravel())
            if position % spec.block_size_tokens:
                parts.append(lease.block_table[position // spec.block_size_tokens])
            targets.append(np.concatenate(parts))
        return targets

    def _publish_if_there(self, fetch: Fetch) -> bool:
        is_loading = fetch.state is FetchState.LOADING
        if not is_loading or self._progress(fetch) is not Progress.READY:
            return False
        self._publish(fetch)
        return True

    def _publish(self, fetch: Fetch) -> None:
        """Make a fetch visible that has arrived in the pool."""
        with self._may_fail(fetch):
            self._cache.commit(fetch.lease, fetch.tokens, fetch.position, flush=True)
            if fetch.reservation is not None:
                self._cache.publish_checkpoint(fetch.reservation)
        if fetch.is_over:
            return
        fetch.tier.count_use(fetch.record)
        self.counts["fetches"] += 1
        self._end(fetch, FetchState.DONE)

    @contextmanager
    def _may_fail(self, fetch: Fetch) -> Iterator[None]:
        """Make a context for an operation of a fetch. An exception fails the fetch; lack of memory
        is suppressed."""
        try:
            yield
        except Exception as error:
            if not fetch.is_over:
                self._fail(fetch)
            if not is_lack_of_memory(error):
                raise
            note_decided_by_memory()

    def _fail(self, fetch: Fetch, *, retries_later: bool = True) -> None:
        """End a failed fetch; its prompt is computed. retries_later: whether to start no new fetch
        of its record for `RETRY_SECONDS`."""
        self._end(fetch, FetchState.FAILED)
        self.counts["fetches_failed"] += 1
        if retries_later:
            now = self._now
            still = {key: until for key, until in self._unreadable_until.items() if until > now}
            self._unreadable_until = {**still, fetch.record.key: now + RETRY_SECONDS}

    def _give_up(self, fetch: Fetch) -> None:
        """Cancel a fetch for which no request waits; a running copy into the pool is completed."""
        if fetch.state is FetchState.LOADING:
            fetch.arrival.wait()
            self._publish(fetch)
            return
        try:
            for read in fetch.reads:
                read.cancel()
        finally:
            self._end(fetch, FetchState.FAILED)

    def _end(self, fetch: Fetch, state: FetchState) -> None:
        fetch.state = state
        self.read_bytes -= fetch.read_bytes
        if fetch.arrival is not None:
            fetch.arrival.wait()  # a fetch that failed on another rank may still be copied here
        fetch.reads, fetch.arrival = [], None  # free the bytes: requests may outlive the fetch
        fetch.tier.unpin(fetch.record)
        del self._fetches[fetch.record.key]
        self._planned.pop(fetch.record.key, None)
        lease, fetch.lease = fetch.lease, None
        if lease is not None:
            self._cache.release(lease)

    # ---- moving bytes ----

    def _read(self, fetch: Fetch, records: list[Record]) -> None:
        """Start reading `records`, which precede the other records of a fetch."""
        fetch.reads = [fetch.tier.store.get(record) for record in records] + fetch.reads
        fetch.state = FetchState.READING
        self._agreed.pop(fetch.record.key, None)
        num_bytes = _bytes_to_read(fetch, records)
        fetch.read_bytes += num_bytes
        self.read_bytes += num_bytes


def _bytes_to_read(fetch: Fetch, records: list[Record]) -> int:
    if fetch.tier.name == "host":
        return 0  # already in host memory
    return sum(record.num_bytes for record in records)
