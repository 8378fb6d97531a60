"""What a lookup in the cache costs."""

import statistics
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.common import Row
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.prefix_cache import PrefixCache

STEPS = 200


def run() -> Iterator[Row]:
    """Median time of `PrefixCache.match` of a prompt that is cached whole."""
    spec = CacheSpec(16, (KVGroup(4, 4096),), state_bytes=1 << 20, hidden_bytes=1 << 13)
    rng = np.random.default_rng(0)
    for length, goal in ((8_192, 200), (131_072, 1000)):
        cache = PrefixCache(spec, num_pages=length // 16 + 64)
        tokens = rng.integers(0, 120_000, length, dtype=np.int32)
        lease = cache.acquire(tokens, capacity_tokens=length)
        cache.commit(lease, tokens, length, answered=True)
        cache.release(lease)
        micros = []
        for _ in range(STEPS):
            began = time.perf_counter()
            match = cache.match(tokens)
            micros.append((time.perf_counter() - began) * 1e6)
        assert match.shared_tokens == length
        yield Row(
            f"match of a cached prompt of {length:,} tokens",
            f"{statistics.median(micros):.0f} us  (p95 {np.percentile(micros, 95):.0f} us)",
            f"<= {goal} us",
        )
