"""First token of a prompt that left the pool: out of host memory, off a disk, computed again."""

import statistics
import tempfile
from collections.abc import Iterator

import numpy as np

from benchmarks.common import Row, benchmark_model, first_token, median_ratio
from megatron_hybrid import DynamicInferenceEngine, InferenceConfig

LENGTH, ROUNDS = 2000, 9
ALL_PAGES = 1 << 30


def run() -> Iterator[Row]:
    model = benchmark_model()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        tiers = {"host memory": {"host_cache_bytes": 1 << 30}, "disk": {"cache_dir": folder}}
        for name, fields in tiers.items():
            config = InferenceConfig(
                cache_bytes=256 << 20, max_requests=4, max_sequence_length=4096, **fields
            )
            engine = DynamicInferenceEngine(model, None, config)
            prompts = rng.integers(0, model.config.vocab_size, (ROUNDS + 1, LENGTH)).tolist()
            _, *rounds = (cold_fetched_pooled(engine, prompt) for prompt in prompts)
            cold, fetched, pooled = zip(*rounds)
            yield Row(
                f"first token of {LENGTH} tokens from {name} / computed",
                f"{median_ratio(fetched, cold):.1%}  ({statistics.median(fetched) * 1e3:.1f} / "
                f"{statistics.median(cold) * 1e3:.0f} ms; from the pool "
                f"{statistics.median(pooled) * 1e3:.1f} ms)",
            )
            engine.close()


def cold_fetched_pooled(
    engine: DynamicInferenceEngine, prompt: list[int]
) -> tuple[float, float, float]:
    """Seconds to the first token: computed, fetched from below the pool, from the pool."""
    cold = first_token(engine, prompt)
    engine.cache.evict(ALL_PAGES)
    if engine.offload.disk is not None:
        engine.offload.disk.store.flush()
    before = engine.stats()["fetched_tokens"]
    fetched = first_token(engine, prompt)
    assert engine.stats()["fetched_tokens"] == before + LENGTH
    return cold, fetched, first_token(engine, prompt)
