"""What decisions cost: scheduler, context and commit around a forward pass that does nothing."""

import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.common import Row, benchmark_model
from megatron_hybrid import DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.scheduling.step_plan import StepResult

STEPS = 200


def run() -> Iterator[Row]:
    yield from _match()
    for count in (1, 8, 64):
        yield _decode_steps(count)


def _decode_steps(count: int) -> Row:
    """Median time of schedule + begin_step + complete with `count` requests in decode."""
    model = benchmark_model()
    engine = DynamicInferenceEngine(
        model,
        None,
        InferenceConfig(cache_bytes=512 << 20, max_requests=64, max_sequence_length=4096),
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(top_k=1, num_tokens_to_generate=3 * STEPS, ignore_termination=True)
    for _ in range(count):
        engine.add_request(rng.integers(0, model.config.vocab_size, 100).tolist(), params)
    with torch.inference_mode():
        while any(not request.num_generated for request in engine.scheduler.running) or (
            engine.scheduler.waiting
        ):
            engine.step()
        micros = []
        for _ in range(STEPS):
            began = time.perf_counter()
            plan = engine.scheduler.schedule()
            engine.context.begin_step(plan)
            engine.scheduler.complete(plan, StepResult())
            micros.append((time.perf_counter() - began) * 1e6)
            for request in engine.scheduler.running:  # what sampling would do
                request.num_tokens += 1
    return Row(
        f"one decode step, {count} running requests, no forward",
        f"{statistics.median(micros):.0f} us  (p95 {np.percentile(micros, 95):.0f} us)",
        f"<= {300 + 20 * count} us",
    )


def _match() -> Iterator[Row]:
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
