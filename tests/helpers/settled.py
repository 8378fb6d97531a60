"""A prefix cache whose choice of positions is easy to foresee."""

from megatron_hybrid.cache.policy.placement import NO_INTERVAL
from megatron_hybrid.cache.prefix_cache import PrefixCache


def settled(cache: PrefixCache) -> PrefixCache:
    """Let a cache save states at the ends of prompts and answers, at junctions and at declared
    positions only: as it does where prompts go on from the ends of others and states are large."""
    cache.policy.interval_tokens = cache.policy.opportunistic_tokens = NO_INTERVAL
    for _ in range(256):
        cache.policy.reuse.distances.observe(0)
    return cache
