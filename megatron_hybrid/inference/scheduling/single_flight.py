"""SingleFlight: waiting requests let a running prefill compute what they have in common with it."""

from collections.abc import Callable, Sequence

from megatron_hybrid.cache.index.tree import Kind, common_prefix
from megatron_hybrid.cache.policy.placement import worth_waiting
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.requests.request import Request, RequestStatus


class SingleFlight:
    """Decides whether a request waits for a running prefill.

    Args:
        cache: of the requests.
    """

    def __init__(self, cache: PrefixCache):
        self._cache = cache

    def waits(
        self, request: Request, running: Sequence[Request], start_of: Callable[[Request], int]
    ) -> bool:
        """Return whether a running prefill will soon make a deeper position restorable than the
        present ones, so that the request need not compute the same tokens.

        Args:
            request: that waits.
            running: all that run.
            start_of: the first token of a running one that no launched step computes.
        """
        if self._cache.mode != "restore" or not request.starts_from_cache:
            return False
        if request.waits_for is not None:
            other, position = request.waits_for
            if other.status is RequestStatus.PREFILL and other.num_computed < position:
                return True
            request.waits_for = None
        tokens = request.tokens[: request.num_tokens]
        resume = None
        for other in running:
            if other.status is not RequestStatus.PREFILL or other.salt != request.salt:
                continue
            common = request.common_with.get(other.request_id)
            if common is None:
                common = common_prefix(tokens, other.tokens[: other.num_tokens])
                request.common_with[other.request_id] = common
            if common <= other.num_computed:
                continue  # its next states are beyond the common prefix
            if resume is None:
                resume = self._cache.match(tokens, request.salt).skipped_tokens
            position = self._position_in_flight(other, common, resume, start_of(other))
            if worth_waiting(resume, other.num_computed, position):
                request.waits_for = other, position
                return True
        return False

    def _position_in_flight(self, other: Request, common: int, resume: int, start: int) -> int:
        """Deepest position <= `common` that the running prefill `other` will make restorable.

        If the junction lies after the states that `other` will save, ask it to save one there: the
        junction is known before the prefill reaches it. start: its first token that is not
        launched.
        """
        if not self._cache.spec.needs_state:
            return common
        saved = self._cache.positions_to_save(other.lease, common)
        wanted = other.lease.wanted
        deepest = max((p for p in saved if wanted.get(p) is not Kind.OPPORTUNISTIC), default=0)
        gain = common - max(deepest, resume, other.num_computed)
        # Below one block of gain the copy of a state costs more than computing the tokens.
        if gain >= self._cache.spec.block_size_tokens and common > start:
            self._cache.want(other.lease, common)
            deepest = common
        return deepest
