"""PrefixCache: the facade between a scheduler and the cache.

It combines the tree (cached prefixes), the allocator (holders of pages) and the evictor (order of
eviction) into atomic operations. docs/how/cache.md shows the life of a request in calls.

Page counts follow from the leases, their reservations and the tree. An operation that raises is
rolled back by a recount (`rolled_back`).
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import wraps

import numpy as np

from megatron_hybrid.cache.admitter import Admitter
from megatron_hybrid.cache.contents import CacheContents
from megatron_hybrid.cache.eviction import CacheListener, Evictor
from megatron_hybrid.cache.explain import Explanation, explain
from megatron_hybrid.cache.index.prefix_index import PrefixIndex, known_limit
from megatron_hybrid.cache.index.tree import Edge, Kind, unless_opportunistic
from megatron_hybrid.cache.lease import NO_LOCAL_END, Lease, Reservation
from megatron_hybrid.cache.matching import PREFIX_CACHING_MODES, Hit, PrefixLookup
from megatron_hybrid.cache.pages.allocator import PageAllocator
from megatron_hybrid.cache.pages.lease_pages import LeasePages, forward_end
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.hybrid import HybridPolicy
from megatron_hybrid.cache.policy.placement import saves_work
from megatron_hybrid.cache.policy.protocol import NewState, Policy
from megatron_hybrid.cache.report import (
    CLEARED,
    NOT_RESERVED,
    RESERVED,
    CacheStats,
    MissReason,
    PrefixReport,
)
from megatron_hybrid.cache.wanted_states import ExpectedRequests, WantedStates


def rolled_back(operation: Callable) -> Callable:
    """Decorate an operation of `PrefixCache`: if it raises, it leaves no new lease and leaks no
    page."""

    @wraps(operation)
    def whole(self, *args, **kwargs):
        if self._is_miscounted:
            self._recover()
        num_leases = len(self._leases)
        try:
            return operation(self, *args, **kwargs)
        except BaseException:
            self._is_miscounted = True
            while len(self._leases) > num_leases:
                self._end(next(reversed(self._leases)))
            with suppress(MemoryError):  # if raised, the next operation recovers
                self._recover()
            raise

    return whole


class PrefixCache:
    """Shares KV blocks and checkpoints between requests.

    Args:
        spec: bytes per token and sequence, windows and chunks.
        num_pages: pages of `spec.page_bytes` in the pool; page 0 is the null page (target of
            suppressed writes, padding of tables) and is never allocated.
        mode: "off" (nothing shared), "memory_only" (KV shared, all tokens computed), "restore".
        policy: decides placement, eviction and admission (default: `HybridPolicy`).
    Raises:
        ValueError: the mode is unknown, or num_pages < 2.
    """

    def __init__(
        self, spec: CacheSpec, num_pages: int, mode: str = "restore", policy: Policy | None = None
    ):
        if mode not in PREFIX_CACHING_MODES:
            modes = ", ".join(PREFIX_CACHING_MODES)
            raise ValueError(f"mode is {mode!r}; it must be one of {modes}")
        self.spec = spec
        self.mode = mode
        self.allocator = PageAllocator(num_pages)
        self.policy = policy or HybridPolicy(spec)
        self.index = PrefixIndex(spec.block_size_tokens, spec.kv_pages_per_block, self.allocator)
        self._stats = CacheStats()
        self._evictor = Evictor(
            spec, self.index, self.allocator, self._stats, self.policy, self._record
        )
        self._pages = LeasePages(self._evictor)
        self._wanted = WantedStates(self._evictor)
        self.contents = CacheContents(self._evictor)
        self._leases: dict[Lease, None] = {}
        self._is_miscounted = False  # an operation failed; pages are not recounted yet
        self._digest = 0
        self._lost_tokens: Counter[MissReason] = Counter()
        self._lookup = PrefixLookup(mode, self._evictor, self._wanted.saving)
        self._admitter = Admitter(mode, self._evictor, self._pages, self._leases)
        self.expected = ExpectedRequests(self._evictor, restores=mode == "restore")
        """Requests that wait for their start."""
        self._known_limit = known_limit(spec, num_pages)

    # ---- before a request runs ----

    def fits(self, capacity_tokens: int, chunk_tokens: int | None = None) -> bool:
        """Return whether a request of capacity_tokens tokens fits in the empty pool.

        chunk_tokens: longest forward of one request (for local groups only; default: all tokens in
        one forward). If it does not fit, the request can never run: refuse it.
        """
        most = self.spec.most_pages(capacity_tokens, chunk_tokens or capacity_tokens)
        return most < self.allocator.num_pages

    def longest_forward(self, capacity_tokens: int, most_tokens: int) -> int:
        """Return the tokens of the longest forwards in which a request of capacity_tokens tokens
        fits in the empty pool: most_tokens, or in models with local groups a half of it, a fourth
        and so on. It is 0 if the request fits in none."""
        while most_tokens and not self.fits(capacity_tokens, most_tokens):
            most_tokens = most_tokens // 2 if self.spec.local_groups else 0
        return most_tokens

    def match(
        self, tokens: np.ndarray, salt: str = "", *, recompute_reason: str | None = None
    ) -> PrefixReport:
        """Return how much of `tokens` (int32 [L]) could be shared and skipped now. It has no side
        effects."""
        tokens = _as_tokens(tokens)
        return self._lookup.look_up(tokens, salt, recompute_reason).report(len(tokens))

    def explain(
        self,
        tokens: np.ndarray,
        salt: str = "",
        *,
        recompute_reason: str | None = None,
        chunk_tokens: int | None = None,
    ) -> Explanation:
        """Return the result of `match` with reasons: known tokens, positions with a state now or
        before, and whether the pool has room for that. chunk_tokens: as for `acquire`. It has no
        side effects."""
        tokens = _as_tokens(tokens)
        hit = self._lookup.look_up(tokens, salt, recompute_reason)
        path, lacks_room = hit.path, False
        elsewhere = self._lookup.known_elsewhere(tokens, salt, path.known)
        lease = self._admitter.lease_on(tokens, salt, hit)
        end = forward_end(lease, len(tokens), chunk_tokens)
        if not self._pages.would_have_room(lease, len(tokens), end):
            lacks_room = bool(self._leases)
            if not lacks_room and path.depth:
                hit = self._lookup.whole_blocks(tokens, salt, hit)
        return explain(path, hit.report(len(tokens)), elsewhere, lacks_room)

    def can_resume(self, position: int, num_tokens: int, chunk_tokens: int | None = None) -> bool:
        """Return whether a prompt of num_tokens tokens fits in the pool together with the state at
        `position` that it resumes from, and the pages of the live leases. chunk_tokens: as for
        `acquire`."""
        pages = self.spec.pages_to_resume(position, num_tokens, chunk_tokens or num_tokens)
        return pages + np.count_nonzero(self.allocator.ref_counts) < self.allocator.num_pages

    @rolled_back
    def acquire(
        self,
        tokens: np.ndarray,
        salt: str = "",
        *,
        capacity_tokens: int,
        chunk_tokens: int | None = None,
        declared: Sequence[int] = (),
        messages: Sequence[int] = (),
        recompute_reason: str | None = None,
        readmitted: bool = False,
    ) -> Lease | None:
        """Match, pin and allocate, atomically.

        Args:
            tokens: int32 [L], L >= 1.
            capacity_tokens: KV of full attention gets room for tokens [0, capacity_tokens).
            chunk_tokens: length of the first forward, which starts at p: local groups get room for
                this forward only (default: up to capacity_tokens).
            declared: positions whose state should be saved.
            messages: positions where messages of a chat start, as likely forks.
            recompute_reason: a `MissReason` value ("prompt_log_probs") that forces p = 0.
            readmitted: the request was admitted before and preempted; it counts once in `stats`.
        Returns:
            The lease, or None if the request cannot start now. Either it does not fit, and nothing
            changed. Or it is held back (`admitter.py`): it would evict more than one more
            concurrent request is worth, and only candidates of a lesser value were evicted. When no
            other lease is live and `fits` is true, it always fits, if needed by evicting the state
            that it would resume from.
        Raises:
            ValueError: tokens are empty, or not one-dimensional integers.
        """
        tokens = _as_tokens(tokens)
        declared, messages = list(declared), list(messages)
        hit = self._lookup.look_up(tokens, salt, recompute_reason)
        known = hit.path.known
        lease = self._admitter.admit(tokens, salt, hit, capacity_tokens, chunk_tokens)
        if lease is None and hit.path.depth and not self._leases:
            # No other lease is live, but the pinned state to restore takes the room.
            hit = self._lookup.whole_blocks(tokens, salt, hit)
            lease = self._admitter.admit(
                tokens, salt, hit, capacity_tokens, chunk_tokens, is_new_request=False
            )
        if lease is None:
            self._stats.refused += 1
            return None
        if self.mode == "restore":
            has_room = self.allocator.num_free >= self.spec.checkpoint_pages
            self._wanted.choose(lease, hit.checkpoint, known, declared, messages, has_room)
        if readmitted:
            return lease
        self._stats.count(lease.report)
        if lease.report.miss_reason is not None:
            lost = max(known, hit.in_flight) - hit.skipped
            self._lost_tokens[lease.report.miss_reason] += lost
        if known >= self.spec.block_size_tokens:
            self._lookup.note_salt(tokens, salt)
        elif recompute_reason is None:
            elsewhere = self._lookup.known_elsewhere(tokens, salt, known)
            self._lost_tokens[MissReason.SALT] += max(0, elsewhere - known)
        return lease

    @rolled_back
    def adopt(
        self,
        tokens: np.ndarray,
        salt: str = "",
        *,
        capacity_tokens: int,
        chunk_tokens: int | None = None,
    ) -> Lease | None:
        """Return a lease that starts after `tokens`, which were computed before or elsewhere. The
        caller supplies their bytes.

        Whole blocks of KV are shared as far as they are cached. Before the first forward or commit
        the caller writes the live slot, the full-attention KV from `lease.shared_tokens` on, and
        the local KV from `CacheSpec.first_local_block` on. Arguments are those of `acquire`. If it
        does not fit now, return None and change nothing. When no other lease is live and `fits` is
        true, it always fits.
        """
        tokens, size = _as_tokens(tokens), self.spec.block_size_tokens
        path = self.index.walk(salt, tokens)
        path = self.index.walk(salt, tokens[: path.depth // size * size], path)
        hit = Hit(path, path.depth, len(tokens), None, None)
        lease = self._admitter.admit(
            tokens, salt, hit, capacity_tokens, chunk_tokens, is_new_request=False
        )
        if lease is None:
            self._stats.refused += 1
        return lease

    @rolled_back
    def resume(
        self,
        before: Lease,
        tokens: np.ndarray,
        *,
        capacity_tokens: int,
        chunk_tokens: int | None = None,
    ) -> Lease | None:
        """Call `adopt` for a request that was preempted after `tokens`. before: its released lease,
        whose report and positions still to save the new lease takes over."""
        if not before.released:
            raise ValueError(
                "the lease of a preempted request must be released before it is resumed"
            )
        lease = self.adopt(
            tokens, before.salt, capacity_tokens=capacity_tokens, chunk_tokens=chunk_tokens
        )
        if lease is not None:
            lease.report, lease.origin = before.report, before.origin
            lease.tokens = before.tokens
            lease.next_interval = before.next_interval
            self._wanted.set(
                lease, {p: kind for p, kind in before.wanted.items() if p > len(tokens)}
            )
        return lease

    @rolled_back
    def fork(
        self,
        lease: Lease,
        tokens: np.ndarray,
        num_tokens: int,
        *,
        capacity_tokens: int | None = None,
    ) -> Lease | None:
        """Return a second lease that continues after the same num_tokens tokens; num_tokens must be
        lease.done.

        Full blocks are shared; the partial last ones are copied (new.copies, then `restored(new)`).
        The caller copies the live slot. capacity_tokens: default num_tokens + 1. If it does not fit
        now, return None and change nothing.
        """
        lease.check_live()
        if num_tokens != lease.done:
            raise ValueError(f"fork at token {num_tokens} of a lease that is at {lease.done}")
        prompt = min(num_tokens, lease.prompt_tokens)
        new = Lease(
            salt=lease.salt,
            tokens=tokens,
            shared_tokens=num_tokens,
            skipped_tokens=num_tokens,
            report=PrefixReport(lease.prompt_tokens, prompt, prompt, None),
            # Not lease.path: during a prefill it may continue beyond these tokens.
            path=self.index.walk(lease.salt, tokens[:num_tokens], lease.path),
            origin=lease.origin,
        )
        blocks = self.spec.num_blocks(num_tokens)
        self._pages.attach(
            new, lease.block_table[:blocks], self._pages.local_rows(lease, num_tokens)
        )
        self._pages.hold(new)
        capacity_tokens = capacity_tokens or num_tokens + 1
        if not self._pages.has_room(new, capacity_tokens, capacity_tokens):
            self._pages.release(new)
            self._stats.refused += 1
            return None
        self._admitter.open(new, capacity_tokens, capacity_tokens)
        self._stats.count(new.report)
        return new

    # ---- while it runs ----

    @rolled_back
    def restored(self, lease: Lease) -> None:
        """Unpin the sources of lease.copies and of lease.checkpoint_pages, whose copies have been
        issued, and empty both fields."""
        lease.check_live()
        if lease.pins:
            self.allocator.release(np.concatenate([pages.ravel() for pages in lease.pins]))
        lease.pins, lease.copies, lease.checkpoint_pages = [], [], None
        if lease.local_tables:  # of a partial block
            with suppress(MemoryError):  # prices then wait for `refresh`
                self._evictor.on_release(lease.path, lease.done - self.spec.local_reach)

    def extend(self, lease: Lease, capacity_tokens: int, chunk_tokens: int | None = None) -> bool:
        """Make room for KV of tokens < capacity_tokens, and in local groups for a forward of
        chunk_tokens from lease.done on (default: up to capacity_tokens). Call it before every
        forward; it is cheap if there is room.

        If it does not fit now, return False and change nothing. When no other lease is live, no
        reservation is pending and `fits` is true, it always fits.
        """
        lease.check_live()
        end = forward_end(lease, capacity_tokens, chunk_tokens)
        if capacity_tokens <= lease.capacity_tokens and end <= lease.local_end:
            return True
        return self._extend(lease, capacity_tokens, end)

    @rolled_back
    def _extend(self, lease: Lease, capacity_tokens: int, end: int) -> bool:
        if not self._pages.has_room(lease, capacity_tokens, end):
            self._stats.refused += 1
            return False
        self._pages.grow(lease, capacity_tokens, end)
        return True

    @rolled_back
    def lend(self, lease: Lease, start: int, end: int) -> int:
        """Make room for tokens [start, end) that may be rejected, from free pages, without
        evictions. Call `settle` before the next operation that needs pages.

        Returns:
            The end of the room, in [start, end]. It also lies before the first position after
            `start` whose state should be saved: whether that evicts is decided when the token
            before is known.
        """
        lease.check_live()
        to_save = (position for position in self.positions_to_save(lease, end) if position > start)
        return self._pages.lend(lease, start, min(end, min(to_save, default=end + 1) - 1))

    def settle(self, lease: Lease) -> None:
        """Take back the blocks of `lend` without computed tokens. It needs no memory."""
        lease.check_live()
        if lease.own_blocks is not None:
            with suppress(MemoryError):  # the next call takes them back
                self._settle(lease)

    @rolled_back
    def _settle(self, lease: Lease) -> None:
        self._pages.settle(lease)

    def commit(
        self,
        lease: Lease,
        tokens: np.ndarray,
        num_tokens_done: int,
        *,
        flush: bool = False,
        answered: bool = False,
    ) -> None:
        """Report a completed forward: the lease's blocks hold the KV of tokens[:num_tokens_done].

        Call it after every step. tokens: int32; its first num_tokens_done elements must not change.
        They become visible to other requests when a block fills, after a forward of more than one
        token, with flush=True (before the lease ends), and when a checkpoint is published. Local
        blocks that no later token sees are then released. answered: True for a complete request;
        implies flush. Lack of memory is no error: tokens then become visible later, or never.
        """
        lease.check_live()
        before, known = lease.done, len(tokens)
        is_known = before <= num_tokens_done <= known
        if not is_known or not lease.capacity_tokens >= num_tokens_done <= lease.local_end:
            room = min(lease.capacity_tokens, lease.local_end)
            raise ValueError(
                f"commit of {num_tokens_done} tokens: {before} were done, {known} are given "
                f"and there is room for {room}; call extend before the forward"
            )
        lease.tokens = tokens
        flush = flush or answered or num_tokens_done - before > 1
        flush = flush or num_tokens_done >= lease.next_flush
        if flush:
            if answered and self.mode == "restore":
                is_prompt = num_tokens_done == lease.prompt_tokens
                end = Kind.PROMPT_END if is_prompt else Kind.ANSWER_END
                lease.unwatched.setdefault(num_tokens_done, end)
            while lease.next_interval <= num_tokens_done:
                lease.unwatched.setdefault(lease.next_interval, Kind.INTERVAL)
                lease.next_interval += self.policy.interval_tokens
        lease.done, lease.answered = num_tokens_done, answered
        if before < lease.report.prompt_tokens:
            self._wanted.note_saving(lease)
        if flush:
            with suppress(MemoryError):
                self._flush(lease, before)

    @rolled_back
    def _flush(self, lease: Lease, before: int) -> None:
        """Make the computed tokens visible. before: `lease.done` before this commit."""
        size = self.spec.block_size_tokens
        if lease.done and self.mode != "off":
            self._publish_tokens(lease, lease.done)
        if lease.local_tables and (start := self._pages.roll(lease)) is not None:
            self._evictor.on_release(lease.path, start * size)
        if before < size <= lease.done:
            self._lookup.note_salt(lease.tokens, lease.salt)
        lease.next_flush = (lease.done // size + 1) * size

    def positions_to_save(self, lease: Lease, end: int) -> list[int]:
        """Return the positions in (lease.done, end] whose state the forward up to `end` should
        save: wanted positions of the prompt, ascending, then its opportunistic ones, then ends of
        intervals in the answer. Call `reserve_checkpoint` in this order, then `publish_checkpoint`
        for each."""
        found = []
        if lease.saves_more:  # so that decode steps do not scan `wanted`
            wanted = [position for position in lease.wanted if lease.done < position <= end]
            found = sorted(wanted, key=lambda p: lease.wanted[p] is Kind.OPPORTUNISTIC)
        if lease.next_interval <= end:
            found += range(lease.next_interval, end + 1, self.policy.interval_tokens)
        return found

    def known_after(self, lease: Lease, tokens: np.ndarray, most: int) -> np.ndarray:
        """Return up to `most` tokens (int32) that are known after all of the lease's `tokens`
        (int32 [L]) under its salt, of several those used last. It has no side effects."""
        return self.index.known_after(lease.salt, tokens, most, lease.path)

    def want(self, lease: Lease, position: int) -> None:
        """Let a state be saved at a later position, too, where another request leaves this one."""
        self._wanted.set(lease, {position: Kind.JUNCTION, **lease.wanted})

    @rolled_back
    def reserve_checkpoint(
        self, lease: Lease, position: int, *, wanted: bool = False
    ) -> Reservation | None:
        """Reserve pages for the state after `position` tokens. Call it before the forward that
        passes `position` (after `extend`), or with position == lease.done for the present state.
        wanted: whether a request waits for the state, so that it may evict any unpinned item.

        Return None if there is no room among candidates of a lesser value (which is counted), the
        mode is not "restore", the state is stored already, or it would save no work. Raise
        ValueError if the position is before lease.done or beyond the room.
        """
        lease.check_live()
        limit = min(lease.capacity_tokens, lease.local_end)
        if not max(1, lease.done) <= position <= limit:
            raise ValueError(
                f"checkpoint at {position} of a lease that is at {lease.done} with room for "
                f"{limit} tokens; reserve it after extend and before the forward that passes it"
            )
        needs_state = self.spec.needs_state
        if self.mode != "restore" or not saves_work(position, lease.prompt_tokens, needs_state):
            return None
        edge, known = self.index.reach(lease.salt, lease.tokens[:position], lease.path)
        previous = edge.deepest_on_path(known) if edge else None
        kind, pages = self._wanted.kind(lease, position), self.spec.checkpoint_pages
        if previous is not None and previous.position == position:
            self._wanted.keep(previous, kind, lease.origin)
            return None
        watched = edge.checkpoints.get(position) if known == position else None
        local_rows = self._pages.local_rows(lease, position)
        if wanted:
            room = self._evictor.make_room_for(pages, math.inf)
        elif kind is Kind.OPPORTUNISTIC:
            room = pages + sum(rows.size for rows in local_rows) <= self.allocator.num_free
        else:
            new = NewState(
                position,
                kind,
                lease.origin,
                pages + sum(rows.size for rows in local_rows),
                lease.shared_tokens,
                watched,
                unless_opportunistic(previous),
            )
            room = self._evictor.make_room_for_state(new)
        if not room:
            self.decline(lease, [position])
            if watched is not None:
                watched.refused = True
            return None
        for rows in local_rows:
            self.allocator.retain(rows)
        reservation = Reservation(lease, position, kind, self.allocator.allocate(pages), local_rows)
        lease.reservations.append(reservation)
        self._wanted.note_saving(lease)
        self._record(RESERVED, position)
        return reservation

    def decline(self, lease: Lease, positions: Sequence[int]) -> None:
        """Count the states at these positions, without opportunistic ones, as not saved for lack of
        room."""
        positions = [p for p in positions if self._wanted.kind(lease, p) is not Kind.OPPORTUNISTIC]
        self._stats.checkpoints_no_room += len(positions)
        lease.report.checkpoints_skipped += len(positions)
        lease.refused.update(positions)
        for position in positions:
            self._record(NOT_RESERVED, position)

    @rolled_back
    def publish_checkpoint(self, reservation: Reservation) -> bool:
        """Make a state visible, after the forward, the copy into reservation.pages, and a `commit`
        that reaches its position. Return False if another request published it first (the pages are
        released). Raise ValueError before that commit, or on the second call."""
        lease, position = reservation.lease, reservation.position
        reservation.check_pending()
        if lease.done < position:
            raise ValueError(f"checkpoint at {position} published at {lease.done}: commit first")
        edge = self._publish_tokens(lease, position)
        checkpoint = self._wanted.watch(lease, edge, position, reservation.kind)
        first = checkpoint.pages is None
        if first:
            self.index.store(checkpoint, reservation.pages, reservation.local_pages)
            self._evictor.on_store(checkpoint)
            for listener in self._evictor.listeners:
                listener.on_publish_state(lease, checkpoint)
            self._stats.checkpoints_saved += 1
            lease.report.checkpoints_saved += 1
        else:
            self._stats.checkpoints_duplicate += 1
        self.abandon(reservation)  # drops its references; those of the index remain
        return first

    def abandon(self, reservation: Reservation) -> None:
        """Release a reservation whose forward did not run. It needs no memory. Raise ValueError on
        the second call."""
        reservation.check_pending()
        reservation.lease.reservations.remove(reservation)
        self._wanted.note_saving(reservation.lease)
        if not self._is_miscounted:  # else the recount omits its pages
            with suppress(MemoryError):
                self._drop_pages(reservation)

    @rolled_back
    def _drop_pages(self, *reservations: Reservation) -> None:
        """Release the pages of reservations."""
        for reservation in reservations:
            for pages in (reservation.pages, *reservation.local_pages):
                self.allocator.release(pages)
            lease, start = reservation.lease, reservation.position - self.spec.local_reach
            lease.local_released = min(lease.local_released, start)
            if reservation.local_pages and not lease.reservations:  # once for those of a forward
                self._evictor.on_release(lease.path, lease.local_released)
                lease.local_released = NO_LOCAL_END

    def release(self, lease: Lease) -> None:
        """Release all pages of a lease. Pending reservations are abandoned, committed tokens stay
        cached. It needs no memory. Raise ValueError on the second call."""
        lease.check_live()
        reservations, lease.reservations = lease.reservations, []
        self._end(lease)
        if lease.answered:
            self.policy.on_finish(lease.done - lease.prompt_tokens)
        if not self._is_miscounted:  # else the recount omits its pages
            with suppress(MemoryError):
                self._release_pages(lease, reservations)

    @rolled_back
    def _release_pages(self, lease: Lease, reservations: list[Reservation]) -> None:
        self._drop_pages(*reservations)
        self._pages.release(lease)
        local_start = lease.local_start * self.spec.block_size_tokens
        self._evictor.on_release(lease.path, local_start)
        self._stats.tokens_forgotten += self.index.forget(self._known_limit)

    def _end(self, lease: Lease) -> None:
        """Remove a lease; the caller releases its pages."""
        del self._leases[lease]
        self._wanted.saving.pop(lease, None)
        lease.released = True

    # ---- tiers and routers ----

    @property
    def num_evicted(self) -> int:
        """Number of evicted states and blocks so far."""
        return self._stats.checkpoints_evicted + self._stats.kv_blocks_evicted

    def watch(self, listener: CacheListener) -> None:
        """Add a listener for everything that is published or evicted from now on."""
        self._evictor.listeners.append(listener)

    def unwatch(self, listener: CacheListener) -> None:
        """Remove a listener. Raise ValueError if it was not added."""
        self._evictor.listeners.remove(listener)

    # ---- the whole cache ----

    @rolled_back
    def evict(self, num_pages: int) -> int:
        """Evict by value until num_pages more pages are free or only pinned items are left. Return
        the number of freed pages."""
        before = self.allocator.num_free
        self._evictor.make_room(before + num_pages)
        return self.allocator.num_free - before

    def clear(self) -> None:
        """Forget everything that is cached. Leases keep their pages."""
        self.expected.clear()
        self._evictor.clear()
        self._lookup.salts.clear()
        for listener in self._evictor.listeners:
            listener.on_clear()
        self._is_miscounted = True
        with suppress(MemoryError):  # if raised, the next operation recounts
            self.index.clear()
            self._recover()
        self._record(CLEARED)

    def stats(self) -> dict[str, int]:
        """Return counters since the start (see `CacheStats`), and the present contents of the pool.
        lost_tokens_<`MissReason`>: prompt tokens computed again although they were known, or being
        computed by another request."""
        pool = self.allocator
        return asdict(self._stats) | {
            "page_bytes": self.spec.page_bytes,
            "pages": pool.num_pages - 1,
            "pages_free": pool.num_free,
            "pages_cached": pool.num_evictable,
            "pages_in_use": pool.num_pages - 1 - pool.num_free - pool.num_evictable,
            "checkpoints": self.index.num_checkpoints,
            "cached_tokens": self.index.num_held_tokens,
            "known_tokens": self.index.num_tokens,
            "leases": len(self._leases),
            **{f"lost_tokens_{reason.value}": self._lost_tokens[reason] for reason in MissReason},
        }

    def digest(self) -> int:
        """Return a hash of all decisions so far, in order; equal on ranks with equal requests."""
        return self._digest

    def check_integrity(self) -> None:
        """Recount the holders of every page, and check the tree. Raise RuntimeError if an invariant
        is broken."""
        if self._is_miscounted:
            self._recover()
        self.allocator.check_integrity()
        self.index.check_integrity()
        for lease in self._leases:
            if lease.saves_more and lease not in self._wanted.saving:
                raise RuntimeError(f"a lease at {lease.done} saves more, and look-ups do not know")
        counts = (
            ("leases hold", self._pages.num_holders(self._leases), self.allocator.ref_counts),
            ("the index holds", self.index.num_holders(), self.allocator.cached_counts),
        )
        for holder, recounted, counted in counts:
            if not np.array_equal(recounted, counted):
                page = int((recounted != counted).argmax())
                raise RuntimeError(
                    f"{holder} page {page} {recounted[page]} times, counted {counted[page]}"
                )

    # ---- internals ----

    def _recover(self) -> None:
        """Recount the holders of all pages after a failed operation, and refill the heaps."""
        self.allocator.recount(self._pages.num_holders(self._leases), self.index.num_holders())
        self.index.recover()
        for checkpoint in self.index.checkpoints():
            if checkpoint.pages is not None:
                self._evictor.add(checkpoint)
        self._is_miscounted = False

    def _publish_tokens(self, lease: Lease, num_tokens: int) -> Edge:
        """Make the lease's first tokens visible in the tree, and watch its positions among them.
        Return the edge that spans the last token."""
        last = self.index.held_edge(lease.path, num_tokens)
        if last is None:
            tokens = np.asarray(lease.tokens[:num_tokens], dtype=np.int32)
            rows = lease.block_table[: self.spec.num_blocks(num_tokens)]
            held = self.index.num_held_tokens
            path = self.index.insert(lease.salt, tokens, rows, lease.path)
            if new := self.index.num_held_tokens - held:
                for listener in self._evictor.listeners:
                    listener.on_publish_blocks(lease, num_tokens - new, num_tokens)
            if path.known >= lease.path.known:
                lease.path = path
            last = path.edges[-1]
        self._wanted.watch_up_to(lease, last, num_tokens)
        return last

    def _record(self, *decision: int) -> None:
        self._digest = hash((self._digest, *decision))


def _as_tokens(tokens: np.ndarray) -> np.ndarray:
    """Return tokens as int32 [L], L >= 1. Raise ValueError if they are not such."""
    array = np.asarray(tokens)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise ValueError(
            f"tokens have shape {array.shape} and type {array.dtype}; a prompt is a "
            f"one-dimensional array of at least one integer"
        )
    if array.dtype == np.int32:
        return array
    narrow = array.astype(np.int32)
    if not np.array_equal(narrow, array):  # after a wrap, two tokens would be equal
        raise ValueError(
            f"tokens reach from {array.min()} to {array.max()}; they must fit in int32"
        )
    return narrow
