"""Admitter: gives a request its lease, if it fits and pays off."""

import numpy as np

from megatron_hybrid.cache.eviction import Evictor
from megatron_hybrid.cache.lease import Lease
from megatron_hybrid.cache.matching import Hit
from megatron_hybrid.cache.pages.lease_pages import LeasePages, forward_end
from megatron_hybrid.cache.policy.placement import next_interval
from megatron_hybrid.cache.report import ADMITTED


class Admitter:
    """Makes leases on the pages of a hit. leases: the live ones."""

    def __init__(self, mode: str, evictor: Evictor, pages: LeasePages, leases: dict[Lease, None]):
        self._mode, self._evictor, self._pages, self._leases = mode, evictor, pages, leases
        self._policy, self._allocator = evictor.policy, evictor.allocator
        self._held_back = 0  # consecutive attempts held back

    def lease_on(self, tokens: np.ndarray, salt: str, hit: Hit) -> Lease:
        """Return a lease with the pages of a hit, which it does not hold yet."""
        lease = Lease(
            salt=salt,
            tokens=tokens,
            shared_tokens=hit.shared,
            skipped_tokens=hit.skipped,
            report=hit.report(len(tokens)),
            path=hit.path,
        )
        rows = hit.path.pages(self._evictor.spec.num_blocks(hit.shared)) if hit.shared else None
        if hit.checkpoint is None:
            self._pages.attach(lease, rows)
        else:
            self._pages.attach(lease, rows, hit.checkpoint.local_pages, hit.checkpoint.pages)
        return lease

    def admit(
        self,
        tokens: np.ndarray,
        salt: str,
        hit: Hit,
        capacity_tokens: int,
        chunk_tokens: int | None,
        is_new_request: bool = True,
    ) -> Lease | None:
        """Return a lease on the pages of a hit, with room for the rest, or None without room.
        is_new_request: whether the policy learns from the request and may hold it back."""
        path, checkpoint = hit.path, hit.checkpoint
        lease = self.lease_on(tokens, salt, hit)
        self._pages.hold(lease)
        end = forward_end(lease, capacity_tokens, chunk_tokens)
        needed = self._pages.num_needed(lease, capacity_tokens, end)
        if not self._allocator.can_free(needed) or (
            is_new_request and not self._pays_off(lease, capacity_tokens, chunk_tokens)
        ):
            self._pages.release(lease)
            return None
        if is_new_request:
            self._held_back = 0
            lease.origin, lease.lost_fork = self._policy.on_request(
                path, checkpoint, lease.prompt_tokens
            )
            self._policy.maintain(self._evictor)
        self._evictor.index.touch(path)  # eviction may change the path
        if checkpoint is not None:
            lease.checkpoint_pages = checkpoint.pages
        self.open(lease, capacity_tokens, end)
        return lease

    def _pays_off(self, lease: Lease, capacity_tokens: int, chunk_tokens: int | None) -> bool:
        """Test admission: make room only from candidates worth less than one more request."""
        running = len(self._leases)
        if self._mode != "restore" or not running:
            return True
        num_pages = self._pages.most_needed(lease, capacity_tokens, chunk_tokens)
        if num_pages <= self._allocator.num_free:
            return True
        # Divided by all pages, not only the missing ones: so candidates evicted over several
        # attempts are together worth no more.
        worth = self._policy.admission_value(running, self._held_back)
        if self._evictor.make_room_for(num_pages, worth / num_pages):
            return True
        self._held_back += 1
        self._evictor.stats.held_back += 1
        return False

    def open(self, lease: Lease, capacity_tokens: int, end: int) -> None:
        """Make a lease live, with room for the remaining tokens."""
        if self._mode == "restore":
            position = max(lease.prompt_tokens, lease.done)
            lease.next_interval = next_interval(position, self._policy.interval_tokens)
        self._pages.open(lease, capacity_tokens, end)
        self._leases[lease] = None
        num_free = self._allocator.num_free
        self._evictor.record(ADMITTED, lease.shared_tokens, lease.skipped_tokens, num_free)
