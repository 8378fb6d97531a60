"""A share of each step's tokens for prompts that long ones would hold back."""

from collections.abc import Iterable, Sequence

from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.requests.request import Request, RequestStatus
from megatron_hybrid.inference.scheduling.plan_builder import PlanBuilder


def short_prompts(
    cache: PrefixCache, share: int, prefills: Sequence[Request], waiting: Iterable[Request]
) -> dict[Request, int]:
    """Choose the prompts that come before a running prefill of more tokens than the share, and
    return the tokens of each: running ones first, as many as fit in the share.

    share: tokens of the step, see `InferenceConfig.short_prompt_share`.
    """
    if all(request.num_tokens - request.num_computed <= share for request in prefills):
        return {}
    found = {}
    for request in (*prefills, *waiting):
        if request.waits_for is None:
            # A prompt that is all cached needs room for a token to start.
            count = max(1, request.num_tokens - _start_of(cache, request))
            if count <= min(share, request.longest_forward):
                found[request] = count
                share -= count
    return found


def _start_of(cache: PrefixCache, request: Request) -> int:
    """Count the tokens of a request that need not be computed, as far as is known by now."""
    if request.lease is not None or request.parked_tokens:
        return request.parked_tokens or request.num_computed
    tokens, reason = request.tokens[: request.num_tokens], request.recompute_reason
    return cache.match(tokens, request.salt, recompute_reason=reason).skipped_tokens


def leave_rest(cache: PrefixCache, builder: PlanBuilder, budget: int) -> None:
    """Give prefills the tokens that were kept for short prompts which could not start, as far as
    there is room without preempting others."""
    for chunk in builder.chunks:
        request, length = chunk.request, chunk.end - chunk.start
        if request.status is not RequestStatus.PREFILL:
            continue
        most = min(length + budget, request.longest_forward)
        end = min(chunk.start + most, request.num_tokens)
        if end > chunk.end and cache.extend(request.lease, end):
            budget -= end - chunk.end
            builder.num_tokens += end - chunk.end
            chunk.end, chunk.draws = end, end == request.num_tokens and not request.done
