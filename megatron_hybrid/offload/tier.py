"""Tier: the records of one memory below the pool (host memory, a disk), and their eviction.

A record is the KV of one full block, or a state with the KV of its own partial block. Its parent is
the block before it, so a tier is a forest. All blocks before a record are in the tier, so it can be
used without the pool.

Records without children are evicted by Greedy-Dual-Size-Frequency (Cherkasova 1998): priority =
clock + uses x saved work / freed bytes. The clock is the priority of the last evicted record; it
also advances with each refused record. Priorities are static, so an eviction is a heap operation.
The bytes are in the tier's store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_hybrid.cache.lazy_heap import Key, LazyHeap
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.offload.prefix_keys import PrefixKeys
from megatron_hybrid.utils.out_of_memory import optional_work

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""Pause after a failed read or write."""
LOST = object()
"""In place of bytes that were lost for lack of memory."""


@dataclass(eq=False, repr=False, slots=True)
class Record:
    """One block or one state."""

    key: bytes
    parent: Record | None
    """The block before it, or None for the first block."""
    position: int
    """Tokens up to its end."""
    num_bytes: int
    is_state: bool
    saved_work: float = 0.0
    """Work to redo without it (`CacheSpec.work`)."""
    cost_bytes: int = field(init=False)
    """Bytes of the record and of the blocks that were added with it."""
    uses: int = 1
    priority: float = 0.0
    num_children: int = 0
    states_at: dict[int, int] = field(default_factory=dict)
    """Position -> number of child states there."""
    pins: int = 0
    queued: Key | None = None

    def __post_init__(self):
        self.cost_bytes = self.num_bytes

    def chain(self) -> list[Record]:
        """Return the blocks from the first one to this record, itself included if it is a block."""
        found = []
        record = self.parent if self.is_state else self
        while record is not None:
            found.append(record)
            record = record.parent
        return found[::-1]

    def parts(self) -> list[Record]:
        """Return the blocks before this record, then itself."""
        return [*self.chain(), self] if self.is_state else self.chain()


class RecordStore(Protocol):
    """The bytes of a tier. The type of `data` is the store's own."""

    def accepts(self) -> bool:
        """Return whether the store takes more records now, which a slow writer may not."""

    def put(self, record: Record, data: Any) -> None:
        """Keep a record's bytes."""

    def take_lost(self) -> list[Record]:
        """Return the records whose bytes were lost since the last call."""

    def get(self, record: Record) -> Any:
        """Return a record's bytes, or a future of them."""

    def drop(self, record: Record) -> None:
        """Drop a record's bytes."""


class Tier:
    """The records of one memory.

    Args:
        name: "host" or "disk", for messages and counters.
        spec: of the pool.
        capacity_bytes: most bytes of all records together.
        store: holds the bytes of the records.
        keeps_lost: whether to add records even without memory for their bytes, until all ranks
            know the records of `take_lost`, as each rank must have the same records.
    """

    def __init__(
        self,
        name: str,
        spec: CacheSpec,
        capacity_bytes: int,
        store: RecordStore,
        keeps_lost: bool = False,
    ):
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.store = store
        self.used_bytes = 0
        self.num_states = self.num_evicted = 0
        self.num_without_memory = 0
        """Number of copies that failed for lack of memory."""
        self.accepts = store.accepts
        """Returns whether the tier takes more records now."""
        self.on_evict: Callable[[Record], object] = lambda record: None
        """Callback for each record before its eviction."""
        self.on_state: Callable[[bytes], object] = lambda key: None
        """Callback for the key of each state that comes or goes."""
        self._spec = spec
        self._block_bytes = spec.kv_pages_per_block * spec.page_bytes
        self._keeps_lost = keeps_lost
        self._records: dict[bytes, Record] = {}
        self._lost: list[Record] = []  # since the last `take_lost`, those added without bytes
        self._clock = 0.0
        self._queue = LazyHeap(self._key)

    # ---- reading ----

    def __contains__(self, key: bytes) -> bool:
        return key in self._records

    @property
    def num_records(self) -> int:
        return len(self._records)

    @property
    def num_blocks(self) -> int:
        return self.num_records - self.num_states

    def records(self) -> list[Record]:
        """Return all records, in order of arrival."""
        return list(self._records.values())

    def find(self, keys: PrefixKeys) -> Record | None:
        """Return the deepest record from which a prompt with these keys can resume: a state, or in
        pure attention a block. It is None if there is none."""
        found = None
        for index in range(keys.num_tokens // self._spec.block_size_tokens):
            record = self._records.get(keys.block(index))
            if record is None:
                break
            if not self._spec.needs_state:
                found = record
            # Any number of prompts that differ only in their last block may share a parent.
            for position in sorted(record.states_at, reverse=True):
                if position > keys.num_tokens:
                    continue
                state = self._records.get(keys.state(position))
                if state is not None:
                    found = state
                    break
        return found

    # ---- changing ----

    def keep(
        self,
        blocks: list[bytes],
        source: Callable[[list[int]], list[Any]],
        *,
        state: bytes | None = None,
        position: int = 0,
        saved_work: float = 0.0,
        uses: int = 1,
    ) -> bool:
        """Keep a state, or blocks of KV, if they are worth more than the records evicted for them.

        Args:
            blocks: keys of all full blocks up to there; present blocks are not copied again.
            source: gives the bytes of these blocks, by index; the next index is the state's.
            state: key of the state after `position` tokens; without it only blocks are kept.
            saved_work: work to redo without the state (`CacheSpec.work`).
            uses: of the state, including this one.
        Returns:
            Whether all of it is now in the tier. It is also False if the source lacks memory for
            its copies (`optional_work`), which must not fail a request.
        """
        known = 0
        while known < len(blocks) and blocks[known] in self._records:
            known += 1
        if known == len(blocks) and (state is None or state in self._records):
            self.count_use(self._records[state or blocks[-1]])
            return True
        if not self.accepts():
            return False
        spec = self._spec
        missing = list(range(known, len(blocks)))
        wanted = missing if state is None else [*missing, len(blocks)]
        cost = len(missing) * self._block_bytes
        if state is None:
            size = spec.block_size_tokens
            saved_work = spec.work(known * size, len(blocks) * size)
        else:
            cost += state_record_pages(spec, position) * spec.page_bytes
        if known * self._block_bytes + cost > self.capacity_bytes:
            return False  # too large even alone with the blocks before it
        joint = last = self._records[blocks[known - 1]] if known else None
        if joint is not None:
            joint.pins += 1
        try:
            value = uses * saved_work / max(1, cost)
            if not self._make_room(cost, value):
                # As if it had been added and evicted: else unused records would stay forever.
                self._clock += value * cost / self.capacity_bytes
                return False
            data = None
            with optional_work(self.note_lack_of_memory):
                data = source(wanted)
            if data is None:
                if not self._keeps_lost:
                    return False
                data = [LOST] * len(wanted)
            added: list[Record] = []
            try:
                for index, block_data in zip(missing, data):
                    end = (index + 1) * spec.block_size_tokens
                    last = Record(blocks[index], last, end, self._block_bytes, is_state=False)
                    last.saved_work = spec.work(index * spec.block_size_tokens, end)
                    self.add(last, block_data)
                    added.append(last)
                if state is not None:
                    num_bytes = cost - len(missing) * self._block_bytes
                    record = Record(state, last, position, num_bytes, is_state=True)
                    record.saved_work, record.cost_bytes, record.uses = saved_work, cost, uses
                    self.add(record, data[-1])
            except BaseException:  # blocks without a state after them would never be evicted
                for each in reversed(added):
                    self._forget(each)
                raise
            return True
        finally:
            if joint is not None:
                self.unpin(joint)

    def add(self, record: Record, data: Any = None) -> None:
        """Add a record. data: its bytes, or LOST, or None if the store already has them."""
        if data is LOST:
            self._lost.append(record)
        elif data is not None:
            self.store.put(record, data)
        self._records[record.key] = record
        self.used_bytes += record.num_bytes
        if record.parent is not None:
            record.parent.num_children += 1
            if record.is_state:
                states_at = record.parent.states_at
                states_at[record.position] = states_at.get(record.position, 0) + 1
        self.num_states += record.is_state
        self._prioritise(record)
        self._queue.add(record)
        if record.is_state:
            self.on_state(record.key)

    def load(self, found: list[tuple[Record, bytes | None]]) -> None:
        """Add records whose bytes the store has, each with its parent's key, parents first. Drop
        descendants of missing records, and blocks that no state needs; then evict the least
        valuable until the rest fits."""
        for record, parent in found:
            if parent is not None and parent not in self._records:
                self.store.drop(record)
                continue
            record.parent = self._records.get(parent)
            self.add(record)
        if self._spec.needs_state:
            for record in self.records():
                if not record.is_state and not record.num_children:
                    self.remove(record)
        self._make_room(0, float("inf"))

    def count_use(self, record: Record) -> None:
        """Count a prompt that resumes from this record."""
        record.uses += 1
        for each in [record] if self._spec.needs_state else record.chain():
            self._prioritise(each)

    def remove(self, record: Record) -> None:
        """Remove a record, its descendants, and the blocks before it that no other state needs. Do
        nothing if it was already removed, even if a new record has its key."""
        if not self._holds(record):
            return
        doomed = {id(record)}
        removed = [record]
        if record.num_children:  # a damaged record; children come after their parents
            for other in self._records.values():
                if id(other.parent) in doomed:
                    doomed.add(id(other))
                    removed.append(other)
        for each in reversed(removed):
            self._forget(each)
        parent = record.parent
        while parent is not None and not parent.num_children and not parent.pins:
            if not self._spec.needs_state:
                self._queue.add(parent)
                break
            self._forget(parent)
            parent = parent.parent

    def take_lost(self) -> list[bytes]:
        """Return keys of the present records whose bytes were lost since the last call."""
        lost, self._lost = [*self._lost, *self.store.take_lost()], []
        return [record.key for record in lost if self._holds(record)]

    def remove_key(self, key: bytes) -> None:
        """Call `remove` for the record with this key, if there is one."""
        if (record := self._records.get(key)) is not None:
            self.remove(record)

    def clear(self) -> None:
        for record in reversed(self.records()):
            self._forget(record)
        self._queue.clear()

    def pin(self, record: Record) -> None:
        """Pin a record, and so the blocks before it, until `unpin`."""
        record.pins += 1

    def unpin(self, record: Record) -> None:
        """Unpin a record. If its last child was evicted meanwhile, it becomes evictable."""
        record.pins -= 1
        if record.pins or record.num_children or not self._holds(record):
            return
        if record.is_state or not self._spec.needs_state:
            self._queue.add(record)
        else:
            self.remove(record)

    # ---- within ----

    def note_lack_of_memory(self, error: Exception) -> None:
        """Count an item evicted from the tier above that is not kept here, as there was no memory
        to copy it."""
        self.num_without_memory += 1
        if self.num_without_memory == 1:
            logger.warning(
                "no memory to copy items evicted from the pool (%s): they are not kept in the %s "
                "tier. Lower host_cache_bytes or cache_bytes. Further failures are only counted "
                "(%s_without_memory)",
                error,
                self.name,
                self.name,
            )

    def _holds(self, record: Record) -> bool:
        return self._records.get(record.key) is record

    def _key(self, record: Record) -> Key | None:
        if record.num_children or record.pins or not self._holds(record):
            return None
        if self._spec.needs_state and not record.is_state:
            return None  # evicted with the last state after it
        return 0, record.priority, record.position

    def _prioritise(self, record: Record) -> None:
        saved = record.saved_work / max(1, record.cost_bytes)
        record.priority = self._clock + record.uses * saved

    def _make_room(self, num_bytes: int, value: float) -> bool:
        """Make room for num_bytes bytes if each record to evict is worth less per byte than
        `value`, else evict none."""
        missing = self.used_bytes + num_bytes - self.capacity_bytes
        going: list[Record] = []
        clock = self._clock
        while missing > 0:
            least = self._queue.least()
            if least is None or least[1] > clock + value:
                break
            clock = max(clock, least[1])
            record = self._queue.pop()
            going.append(record)
            missing -= self._uncount(record)
        for record in reversed(going):
            self._recount(record)
        try:
            while going and missing <= 0:
                self.on_evict(going[0])
                self.num_evicted += 1
                self.remove(going.pop(0))
        finally:  # also if `on_evict` raises
            for record in going:
                self._queue.add(record)
        if missing > 0:
            return False
        self._clock = clock
        return True

    def _uncount(self, record: Record) -> int:
        """Uncount a record in its ancestors. Return the bytes that its eviction frees."""
        freed, parent = record.num_bytes, record.parent
        while parent is not None:
            parent.num_children -= 1
            if parent.num_children or parent.pins:
                break
            if not self._spec.needs_state:
                self._queue.add(parent)
                break
            freed += parent.num_bytes
            parent = parent.parent
        return freed

    def _recount(self, record: Record) -> None:
        """Undo the last `_uncount`."""
        parent = record.parent
        while parent is not None:
            parent.num_children += 1
            if parent.num_children > 1 or parent.pins or not self._spec.needs_state:
                break
            parent = parent.parent

    def _forget(self, record: Record) -> None:
        del self._records[record.key]
        self.store.drop(record)
        self.used_bytes -= record.num_bytes
        self.num_states -= record.is_state
        if record.parent is not None:
            record.parent.num_children -= 1
            if record.is_state:
                states_at = record.parent.states_at
                states_at[record.position] -= 1
                if not states_at[record.position]:
                    del states_at[record.position]
        if record.is_state:
            self.on_state(record.key)


def state_record_pages(spec: CacheSpec, position: int) -> int:
    """Count the pages of a state's record: the state, its local blocks, and the KV of its partial
    block."""
    pages = spec.checkpoint_pages
    for group in spec.local_groups:
        blocks = spec.local_blocks(group, position)
        pages += (blocks.stop - blocks.start) * spec.pages_per_block[group]
    if position % spec.block_size_tokens:
        pages += spec.kv_pages_per_block
    return pages


def least_capacity_bytes(spec: CacheSpec) -> int:
    """Return the least useful capacity of a tier: one block, and the state at its end."""
    pages = spec.kv_pages_per_block
    if spec.needs_state:
        pages += state_record_pages(spec, spec.block_size_tokens)
    return pages * spec.page_bytes
