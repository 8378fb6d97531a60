"""What a lookup costs, and a step for each request, forward aside: it must not grow with them."""

import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.common import Row, benchmark_model
from megatron_hybrid import DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.prefix_cache import PrefixCache

RUNNING = (64, 256, 1024)
STEPS = 100
GROWTH = 1.3  # most that a request of the largest batch costs, in those of one of the smallest


def run() -> Iterator[Row]:
    yield from lookups()
    costs = {count: step_micros(count) / count for count in RUNNING}
    least = costs[RUNNING[0]]
    for count, micros in costs.items():
        yield Row(
            f"one decode step with a stub for the forward, {count:,} running requests",
            f"{micros * count / 1e3:.1f} ms, {micros:.1f} us a request ({micros / least:.2f}x)",
            f"<= {GROWTH}x",
        )


def lookups() -> Iterator[Row]:
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
        for _ in range(2 * STEPS):
            began = time.perf_counter()
            match = cache.match(tokens)
            micros.append((time.perf_counter() - began) * 1e6)
        assert match.shared_tokens == length
        yield Row(
            f"match of a cached prompt of {length:,} tokens",
            f"{statistics.median(micros):.0f} us  (p95 {np.percentile(micros, 95):.0f} us)",
            f"<= {goal} us",
        )


def step_micros(count: int) -> float:
    """Median CPU time of `step` with `count` requests in decode: scheduling, layout, sampling,
    commit and outputs."""
    model = benchmark_model()
    engine = DynamicInferenceEngine(
        model,
        None,
        InferenceConfig(
            cache_bytes=1 << 30, max_requests=count, max_sequence_length=256, max_tokens=4096
        ),
    )
    rng, vocab_size = np.random.default_rng(0), model.config.vocab_size
    logits_nV = torch.from_numpy(rng.standard_normal((count, vocab_size), np.float32))
    params = SamplingParams(top_k=1, num_tokens_to_generate=200, ignore_termination=True)
    for _ in range(count):
        engine.add_request(rng.integers(0, vocab_size, 20).tolist(), params)

    def forward(input_ids, *, inference_context):
        return logits_nV[None, : len(inference_context._inputs["logit_rows"])]

    model.forward = forward
    try:
        while len(engine.scheduler.running) < count or engine.scheduler.waiting:
            engine.step()
        engine.step()
        micros = []
        for _ in range(STEPS):
            began = time.thread_time()
            outputs = engine.step()
            micros.append((time.thread_time() - began) * 1e6)
            assert len(outputs) == count
    finally:
        del model.forward
    return statistics.median(micros)
