"""Offload: the tiers below the pool (host memory, a disk), and the copies between them.

Down: items evicted from the pool are offered to the first tier; items that it refuses or evicts are
offered to the next one. A tier keeps an item that is worth more than the records evicted for it.
Up: see `fetch.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from megatron_hybrid.cache.eviction import CacheListener
from megatron_hybrid.cache.explain import Explanation
from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Kind
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.values import rebuild_work
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.tree_view import tier_in_pool
from megatron_hybrid.distributed.ranks import ONE_RANK, Ranks
from megatron_hybrid.offload.fetch import Fetches
from megatron_hybrid.offload.prefix_keys import RecentKeys
from megatron_hybrid.offload.tier import LOST, Record, Tier, least_capacity_bytes
from megatron_hybrid.utils.interrupts import defer_sigint
from megatron_hybrid.utils.out_of_memory import optional_decision

if TYPE_CHECKING:
    from megatron_hybrid.offload.disk_store import DiskStore
    from megatron_hybrid.offload.page_mover import HostPages, PageMover

_TIER_COUNTS = (
    "host_records_evicted",
    "host_without_memory",
    "disk_records_evicted",
    "disk_without_memory",
    "disk_records_unwritten",
)


class HostStore:
    """The bytes of the host tier's records. Dropped pages are freed after their last read."""

    def __init__(self):
        self._pages: dict[bytes, HostPages] = {}  # without those that are lost

    def accepts(self) -> bool:
        return True

    def put(self, record: Record, data: HostPages) -> None:
        self._pages[record.key] = data

    def take_lost(self) -> list[Record]:
        return []

    def get(self, record: Record) -> Future[HostPages | None]:
        future: Future[HostPages | None] = Future()
        future.set_result(self._pages.get(record.key))
        return future

    def pages(self, record: Record) -> HostPages | object:
        """Return a record's pages, or LOST."""
        return self._pages.get(record.key, LOST)

    def drop(self, record: Record) -> None:
        self._pages.pop(record.key, None)


class Offload(CacheListener):
    """Moves cached states and blocks between the pool and the tiers.

    Args:
        cache: the pool's bookkeeping.
        mover: of the pool's bytes.
        host_bytes: capacity of the host tier, or 0 for none.
        disk: an opened folder, if there is to be a disk tier.
        disk_bytes: capacity of the disk tier.
        ranks: of the engine. All have the same records in the same order. Facts that only one rank
            sees are exchanged once per step (`poll`).
    """

    def __init__(
        self,
        cache: PrefixCache,
        mover: PageMover,
        host_bytes: int,
        disk: DiskStore | None,
        disk_bytes: int,
        ranks: Ranks = ONE_RANK,
    ):
        self.cache = cache
        self.spec = cache.spec
        self.tiers: list[Tier] = []
        self._mover = mover
        self._keys = RecentKeys(self.spec.block_size_tokens)
        self._ranks = ranks
        self.fetches = Fetches(cache, self.tiers, self._keys, mover)
        self._closed_counts = dict.fromkeys(_TIER_COUNTS, 0)
        self._disk_bytes = disk_bytes
        self._disk_accepts = True  # on all ranks, before this step
        if disk is not None:
            self.tiers.append(disk_tier(disk, self.spec, disk_bytes, ranks))
            if ranks.size > 1:
                self.tiers[0].accepts = lambda: self._disk_accepts
        if host_bytes:
            host = Tier("host", self.spec, host_bytes, HostStore(), ranks.size > 1)
            for lower in self.tiers:
                host.on_evict = partial(self._offer_of_host, lower)
            self.tiers.insert(0, host)
        self._offered: dict[bytes, Checkpoint] = {}  # by the keys of states in tiers
        for tier in self.tiers:  # without a reference to self, which ends with its last one
            tier.on_state = partial(_note_state, cache, self.tiers, self._offered)
        if self.tiers:
            cache.watch(self)
        # The store's threads keep the store and the lock of its folder alive, so release them even
        # if the engine is not closed.
        self._close_disk = weakref.finalize(self, disk.close_from_anywhere) if disk else None

    @property
    def disk(self) -> Tier | None:
        return self.tiers[-1] if self.tiers and self.tiers[-1].name == "disk" else None

    def tier_of(self, checkpoint: Checkpoint) -> str:
        """Return where a state is: "pool", a tier's name, or "evicted"."""
        if checkpoint.pages is None:
            for tier in self.tiers:
                if checkpoint.tier_key in tier:
                    return tier.name
        return tier_in_pool(checkpoint)

    def explain(
        self, tokens: np.ndarray, salt: str, recompute_reason: str | None, chunk_tokens: int
    ) -> Explanation:
        """Return the result of `PrefixCache.explain`, and which part of the prompt a tier has."""
        cache, reason = self.cache, recompute_reason
        explanation = cache.explain(
            tokens, salt, recompute_reason=reason, chunk_tokens=chunk_tokens
        )
        if reason is not None:
            return explanation
        match = cache.match(tokens, salt)  # as a request looks it up, whatever has room
        found = self.fetches.find(tokens, salt, match.skipped_tokens)
        if found is None:
            return explanation
        tier, record = found
        position = record.position
        if not cache.can_resume(position, len(tokens), chunk_tokens):
            explanation = replace(explanation, lacks_room=True)
        if not record.is_state:  # the last token is computed for its logits
            position = min(position, len(tokens) - 1)
        return replace(explanation, below=(tier.name, position))

    def counters(self) -> dict[str, int]:
        """Return counters since the start, and the present contents of the tiers."""
        if self._ranks.size == 1:  # several ranks can poll only together
            with defer_sigint():  # `poll` looks at futures
                self.poll()
        disk = self.disk
        held = {
            "disk_write_bytes": 0 if disk is None else disk.store.waiting_bytes,
            "disk_read_bytes": self.fetches.read_bytes,
        }
        for name in ("host", "disk"):
            tier = next((tier for tier in self.tiers if tier.name == name), None)
            held[f"{name}_bytes"] = tier.used_bytes if tier else 0
            held[f"{name}_states"] = tier.num_states if tier else 0
            held[f"{name}_kv_blocks"] = tier.num_blocks if tier else 0
        return {**self.fetches.counts, **held, **self._tier_counts()}

    def _tier_counts(self) -> dict[str, int]:
        """Return counters of the tiers since the start, also after `close`."""
        counts = dict(self._closed_counts)
        for tier in self.tiers:
            counts[f"{tier.name}_records_evicted"] = tier.num_evicted
            counts[f"{tier.name}_without_memory"] = tier.num_without_memory
        if self.disk is not None:
            counts["disk_records_unwritten"] = self.disk.store.num_unwritten
        return counts

    def clear(self) -> None:
        """Remove all records of all tiers."""
        if self.disk is not None:
            self.disk.store.check_process()  # before anything is forgotten
        self.fetches.give_up_all()
        for tier in self.tiers:
            tier.clear()
        if self.disk is not None:
            self.disk.capacity_bytes = self._disk_bytes  # less while the disk was full

    def close(self) -> None:
        """Finish pending writes to the disk; afterwards nothing is kept or fetched."""
        self.fetches.give_up_all()
        if self.disk is not None:
            self.disk.store.close()
            self._close_disk.detach()
        self._closed_counts = self._tier_counts()
        if self.tiers:
            self.cache.unwatch(self)
        self.tiers.clear()

    def poll(self, said: int = 0) -> int:
        """Process events from outside the steps: records lost for lack of memory or disk space, and
        progress of fetches. Call it before each step, on all ranks. Return the largest `said` of
        all ranks, a number that the caller adds to the exchange."""
        disk, is_full, accepts = self.disk, False, True
        lost = [tier.take_lost() + self.fetches.damaged(tier) for tier in self.tiers]
        if disk is not None:
            # Handle a full disk after the last pending write: these may fail, too.
            is_full = not disk.store.waiting_bytes and disk.store.was_full()
            accepts = self._ranks.size == 1 or disk.store.accepts()
        facts = [said, any(lost), is_full, not accepts, *self.fetches.facts()]
        said, any_lost, is_full, is_closed, *fetches = self._ranks.maximum(list(map(int, facts)))
        self.fetches.settle(fetches)
        self._disk_accepts = not is_closed
        if any_lost:
            for of_rank in self._ranks.gather(lost):
                for tier, keys in zip(self.tiers, of_rank):
                    for key in keys:
                        tier.remove_key(key)
        if is_full:
            # From now on a new record must be worth more than the evicted ones, as in any full
            # tier.
            disk.capacity_bytes = min(disk.capacity_bytes, disk.used_bytes)
        return said

    # ---- down ----

    def on_evict_state(self, checkpoint: Checkpoint) -> None:
        """Offer a state evicted from the pool."""
        if self.spec.needs_state and checkpoint.kind is not Kind.OPPORTUNISTIC:
            with self._optional():
                self._offer_state(checkpoint, self.tiers)

    def on_evict_blocks(self, edge: Edge, start: int) -> None:
        """Offer KV evicted from the pool, in pure attention."""
        with self._optional():
            self._offer_blocks(edge, edge.held_end, self.tiers)

    def _optional(self) -> AbstractContextManager[None]:
        """Return a context to keep an item in a tier, in which a lack of memory is only counted."""
        return optional_decision(lambda error: self.tiers[0].note_lack_of_memory(error))

    def _offer_state(self, checkpoint: Checkpoint, tiers: list[Tier]) -> None:
        """Offer a stored state, with the KV before it, to tiers until one keeps it."""
        size, position = self.spec.block_size_tokens, checkpoint.position
        if position < size:
            return  # it is faster to compute less than a block
        salt, tokens, rows = self.cache.contents.prefix(checkpoint.edge, position)
        keys = self._keys.of(tokens, salt)
        full = position // size
        pages = np.concatenate([*checkpoint.page_lists(), rows[full:].ravel()])
        source = partial(self._copy, rows[:full], pages)
        key = checkpoint.tier_key = keys.state(position)
        self._offered[key] = checkpoint
        state = {
            "state": key,
            "position": position,
            "saved_work": rebuild_work(checkpoint.previous(), position, self.spec),
            "uses": checkpoint.uses + 1,
        }
        try:
            for tier in tiers:
                if tier.keep(keys.blocks(full), source, **state):
                    break
        finally:
            _note_state(self.cache, self.tiers, self._offered, key)

    def _offer_blocks(self, edge: Edge, end: int, tiers: list[Tier]) -> None:
        """Offer the full KV blocks of the prefix that ends at position `end` of an edge to tiers
        until one keeps them."""
        size = self.spec.block_size_tokens
        end = end // size * size
        if not end:
            return
        salt, tokens, rows = self.cache.contents.prefix(edge, end)
        keys, source = self._keys.of(tokens, salt), partial(self._copy, rows, None)
        for tier in tiers:
            if tier.keep(keys.blocks(end // size), source):
                break

    def _copy(
        self, rows: np.ndarray, state_pages: np.ndarray | None, wanted: list[int]
    ) -> list[HostPages]:
        """Copy blocks from the pool, by index, and the state after the last one."""
        return self._mover.to_host([state_pages if i == len(rows) else rows[i] for i in wanted])

    def _offer_of_host(self, lower: Tier, record: Record) -> None:
        """Offer a record evicted from the host tier to a lower tier."""
        self._keep_in(lower, record, self.tiers[0].store.pages)

    def _offer_of_disk(self, other: Tier, record: Record) -> None:
        """Offer a record of the disk tier to the disk tier of another folder, unless it is
        damaged."""
        missing = [part for part in record.parts() if part.key not in other]
        reads = {part: self.disk.store.get(part) for part in missing}
        pages = {part: read.result() for part, read in reads.items()}
        if None not in pages.values():
            self._keep_in(other, record, pages.get)

    def _keep_in(
        self, tier: Tier, record: Record, pages_of: Callable[[Record], HostPages | object]
    ) -> None:
        parts = record.parts()
        tier.keep(
            [block.key for block in record.chain()],
            lambda wanted: [pages_of(parts[index]) for index in wanted],
            state=record.key if record.is_state else None,
            position=record.position,
            saved_work=record.saved_work,
            uses=record.uses,
        )

    # ---- everything ----

    def save_to(self, tier: Tier, let_in: Callable[[], None]) -> None:
        """Copy everything cached to a disk tier while there is room: first from the pool, the most
        valuable first, then from host memory, then from the engine's own disk tier. Call it inside
        `defer_sigint`, whose `let_in` is called between two records.

        Raises:
            OSError: writing failed, or reading from the engine's own disk tier failed.
        """
        with self._ranks.raise_on_all("recovering the cache folder"):
            tier.store.recover()
        self.poll()
        self._disk_accepts = True  # `flush` makes room
        if tier is self.disk:  # the disk may have space again
            with self._ranks.raise_on_all("asking for the disk's space"):
                free = tier.store.free_bytes()
            room = tier.used_bytes + self._ranks.minimum(free)
            tier.capacity_bytes = max(tier.capacity_bytes, min(self._disk_bytes, room))
        offers = []
        if self.spec.needs_state:
            for checkpoint in self.cache.contents.stored_checkpoints():
                offers.append(partial(self._offer_state, checkpoint, [tier]))
        else:
            for edge in self.cache.contents.held_leaves():
                offers.append(partial(self._offer_blocks, edge, edge.held_end, [tier]))
        for other in self.tiers:
            if other is not tier:
                offer = self._offer_of_disk if other is self.disk else self._offer_of_host
                for record in other.records():
                    if record.is_state or not (self.spec.needs_state or record.num_children):
                        offers.append(partial(offer, tier, record))
        failed = None
        for offer in offers:
            let_in()
            if not tier.store.accepts() and failed is None:
                try:
                    tier.store.flush(let_in)
                except OSError as error:
                    if self._ranks.size == 1:
                        raise
                    failed = error  # all ranks must add the same records: these will be lost
            offer()
        if failed is not None:
            raise failed
        tier.store.flush(let_in)


def _note_state(
    cache: PrefixCache, tiers: list[Tier], offered: dict[bytes, Checkpoint], key: bytes
) -> None:
    """Note that a state may be in another tier than before, or in none."""
    if (checkpoint := offered.get(key)) is not None:
        cache.contents.note_change(checkpoint)
        if not any(key in tier for tier in tiers):
            del offered[key]


def check_capacities(spec: CacheSpec, host_cache_bytes: int, disk_cache_bytes: int | None) -> None:
    """Raise ValueError if a tier is too small for a block and its state. 0 and None are no tier."""
    least = least_capacity_bytes(spec)
    for name, capacity, source in (
        ("host_cache_bytes", host_cache_bytes, "host_cache_bytes"),
        ("disk_cache_bytes", disk_cache_bytes, "cache_dir"),
    ):
        if capacity and capacity < least:
            raise ValueError(
                f"{name}={capacity} holds nothing that could be resumed: a block of "
                f"{spec.block_size_tokens} tokens and its state have {least} bytes; raise it, or "
                f"leave out {source}"
            )


def disk_tier(
    store: DiskStore,
    spec: CacheSpec,
    capacity_bytes: int,
    ranks: Ranks = ONE_RANK,
    *,
    shrinks: bool = True,
) -> Tier:
    """Return a tier with the records that the folders of all ranks have. If they exceed
    `capacity_bytes`, the least valuable are evicted, or without `shrinks`, the capacity is the size
    of the records."""
    try:
        with ranks.raise_on_all("reading the cache folder"):
            found = store.load()
        found = _on_all_ranks(found, store, ranks)
        if not shrinks:
            held = sum(record.num_bytes for record, _ in found)
            capacity_bytes = max(capacity_bytes, held)
        tier = Tier("disk", spec, capacity_bytes, store, ranks.size > 1)
        tier.load(found)
        store.shrink(capacity_bytes)
    except BaseException:
        store.close()  # else the folder would stay locked
        raise
    return tier


def _on_all_ranks(
    found: list[tuple[Record, bytes | None]], store: DiskStore, ranks: Ranks
) -> list[tuple[Record, bytes | None]]:
    """Return the records that the folders of all ranks have, with order and worth from the first
    rank, and drop the others. Folders may differ after a crash."""
    if ranks.size == 1:
        return found
    first, *others = ranks.gather(
        {record.key: (record.uses, record.saved_work, record.cost_bytes) for record, _ in found}
    )
    common = set(first).intersection(*others)
    own = {record.key: (record, parent) for record, parent in found}
    for key, (record, _) in own.items():
        if key not in common:
            store.drop(record)
    kept = []
    for key, worth in first.items():
        if key in common:
            record = own[key][0]
            record.uses, record.saved_work, record.cost_bytes = worth
            kept.append(own[key])
    return kept
