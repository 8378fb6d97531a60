"""Ours: a replay through this project's `PrefixCache`, called as by its engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.protocol import Policy
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.tools.replay.protocol import WINDOW_STEP_TOKENS, Attempts, Engine


@dataclass(eq=False)
class Running:
    lease: object | None
    """The lease; None if the pool can never hold this request, which runs outside the cache."""
    skipped_tokens: int


class Ours(Engine):
    """One `PrefixCache`; `cache` is public for its counters.

    Args:
        policy: None takes this project's default.
    """

    def __init__(self, spec: CacheSpec, budget_bytes: float, policy: Policy | None = None):
        # The null page is not part of the budget.
        num_pages = int(budget_bytes // spec.page_bytes) + 1
        self.cache = PrefixCache(spec, num_pages, policy=policy)
        # Only in local groups does a longer forward cost memory.
        self._chunk = WINDOW_STEP_TOKENS if spec.local_groups else None
        self._attempts = Attempts()

    def holds(self, num_tokens: int) -> bool:
        """Return whether a prompt of this length can run, as the engine checks it."""
        return self._longest_forward(num_tokens) > 0

    def _longest_forward(self, num_tokens: int) -> int:
        return self.cache.longest_forward(num_tokens, self._chunk or num_tokens)

    def begin(self, prompt: np.ndarray, message_starts: Sequence[int] = ()) -> Running | None:
        cache, n = self.cache, len(prompt)
        if not self.holds(n):
            return Running(None, 0)
        lease = cache.acquire(
            prompt,
            capacity_tokens=n,
            chunk_tokens=self._longest_forward(n),
            messages=message_starts,
        )
        if lease is None:
            return None
        cache.restored(lease)
        if not self._compute(lease, prompt, n):
            cache.release(lease)
            self._attempts.refused(prompt, lease.skipped_tokens)
            return None
        return Running(lease, self._attempts.admitted(prompt, lease.skipped_tokens))

    def finish(self, handle: Running, tokens: np.ndarray) -> None:
        if (lease := handle.lease) is None:
            return
        # Without room for all of the answer the request ends as if cancelled.
        if self._compute(lease, tokens, len(tokens)):
            self.cache.commit(lease, tokens, len(tokens), answered=True)
            if reservation := self.cache.reserve_checkpoint(lease, len(tokens)):
                self.cache.publish_checkpoint(reservation)
        self.cache.release(lease)

    def _compute(self, lease, tokens: np.ndarray, end: int) -> bool:
        """Run forwards up to `end`, and save the wanted states. Return whether there was room."""
        cache, chunk = self.cache, self._longest_forward(end) or end
        while lease.done < end:
            start = lease.done
            stop = min(end, start + chunk)
            if not cache.extend(lease, stop, chunk_tokens=stop - start):
                return False
            reservations = [
                reservation
                for position in cache.positions_to_save(lease, stop)
                if (reservation := cache.reserve_checkpoint(lease, position)) is not None
            ]
            cache.commit(lease, tokens, stop)
            for reservation in reservations:
                cache.publish_checkpoint(reservation)
        return True
