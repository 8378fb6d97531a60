"""Memory of many requests that share a prefix."""

from collections.abc import Iterator

import numpy as np

from benchmarks.common import Row, benchmark_model
from megatron_hybrid import DynamicInferenceEngine, InferenceConfig, SamplingParams

PREFIX, TAIL, ANSWER, REQUESTS = 2000, 64, 32, 64


def run() -> Iterator[Row]:
    model = benchmark_model()
    rng = np.random.default_rng(0)
    engine = DynamicInferenceEngine(
        model,
        None,
        InferenceConfig(
            cache_bytes=256 << 20, max_requests=REQUESTS, max_tokens=4096, max_sequence_length=4096
        ),
    )
    prefix = rng.integers(0, model.config.vocab_size, PREFIX).tolist()
    params = SamplingParams(top_k=1, num_tokens_to_generate=ANSWER, ignore_termination=True)
    # The prefix is known once, as a system prompt is; its end was declared.
    engine.generate([prefix], SamplingParams(num_tokens_to_generate=0))
    requests = [
        engine.add_request(prefix + rng.integers(0, model.config.vocab_size, TAIL).tolist(), params)
        for _ in range(REQUESTS)
    ]
    peak, most_running = 0, 0
    while not all(request.closed for request in requests):
        engine.step()
        stats = engine.stats()
        most_running = max(most_running, stats["requests_running"])
        peak = max(peak, stats["pages_in_use"])
    page, spec = stats["page_bytes"], engine.cache.spec
    slots = stats["live_slot_bytes"]
    local_pages = sum(
        (spec.num_blocks(spec.groups[g].window) + 1) * spec.pages_per_block[g]
        for g in spec.local_groups
    )
    prefix_pages = PREFIX // spec.block_size_tokens * spec.kv_pages_per_block
    tail_blocks = spec.num_blocks(PREFIX + TAIL + ANSWER) - PREFIX // spec.block_size_tokens
    tail_pages = tail_blocks * spec.kv_pages_per_block + local_pages
    bound = (prefix_pages + REQUESTS * tail_pages) * page + slots
    yield Row(f"requests running at a time ({REQUESTS} share {PREFIX} tokens)", str(most_running))
    yield Row(
        "peak bytes held by them / (one prefix + private tails + live slots)",
        f"{(peak * page + slots) / bound:.3f}  ({(peak * page + slots) / 2**20:.1f} / "
        f"{bound / 2**20:.1f} MiB)",
        "<= 1.10",
    )
    unshared = REQUESTS * (prefix_pages + tail_pages) * page + slots
    yield Row(
        "the same without sharing / with",
        f"{unshared / (peak * page + slots):.1f} x",
    )
