"""Single flight: a waiting request lets a running prefill compute what both have in common."""

from collections.abc import Callable, Sequence

from megatron_hybrid.cache.index.tree import Kind, common_prefix
from megatron_hybrid.cache.policy.placement import worth_waiting
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.requests.request import Request, RequestStatus


def waits_for_prefill(
    cache: PrefixCache,
    request: Request,
    running: Sequence[Request],
    start_of: Callable[[Request], int],
) -> bool:
    """Return whether a running prefill will soon make a deeper position restorable than the present
    ones, so that the request need not compute the same tokens.

    Args:
        cache: of the requests.
        request: the one that waits.
        running: all running requests.
        start_of: gives the first token of a running request that no launched step computes.
    """
    if cache.mode != "restore" or not request.starts_from_cache:
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
            resume = cache.match(tokens, request.salt).skipped_tokens
        position = _position_in_flight(cache, other, common, resume, start_of(other))
        if worth_waiting(resume, other.num_computed, position):
            request.waits_for = other, position
            return True
    return False


def _position_in_flight(
    cache: PrefixCache, other: Request, common: int, resume: int, start: int
) -> int:
    """Find the deepest position <= `common` that the running prefill `other` makes restorable.

    If the junction lies after the states that `other` will save, ask it to save one there: the
    junction is known before the prefill reaches it. start: its first token that is not launched.
    """
    if not cache.spec.needs_state:
        return common
    saved = cache.positions_to_save(other.lease, common)
    wanted = other.lease.wanted
    deepest = max((p for p in saved if wanted.get(p) is not Kind.OPPORTUNISTIC), default=0)
    gain = common - max(deepest, resume, other.num_computed)
    # Below one block of gain the copy of a state costs more than computing the tokens.
    if gain >= cache.spec.block_size_tokens and common > start:
        cache.want(other.lease, common)
        deepest = common
    return deepest
