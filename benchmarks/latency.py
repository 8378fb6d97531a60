"""Time to first token: what a restored prefix costs, and what it saves."""

import statistics
from collections.abc import Iterator

import numpy as np

from benchmarks.common import (
    ONE_TOKEN,
    Row,
    benchmark_model,
    first_token,
    median_ratio,
    paired,
    seconds,
)
from megatron_hybrid import DynamicInferenceEngine, InferenceConfig

LENGTH, RESTORED, ROUNDS = 2000, 1500, 9


def run() -> Iterator[Row]:
    model = benchmark_model()
    rng = np.random.default_rng(0)

    def engine(**fields) -> DynamicInferenceEngine:
        config = InferenceConfig(
            cache_bytes=256 << 20, max_requests=4, max_sequence_length=4096, **fields
        )
        return DynamicInferenceEngine(model, None, config)

    def prompt() -> list[int]:
        return rng.integers(0, model.config.vocab_size, LENGTH).tolist()

    restoring = engine(prefix_caching="restore", max_tokens=LENGTH)

    def restored() -> float:
        tokens = prompt()
        first_token(restoring, tokens[:RESTORED])
        return first_token(restoring, tokens)

    # A chunked prefill without any cache: its second step runs the rest from the live state.
    plain = engine(prefix_caching="off", max_tokens=RESTORED)

    def live() -> float:
        request = plain.add_request(prompt(), ONE_TOKEN)
        plain.step()
        assert request.num_computed == RESTORED
        elapsed = seconds(plain.step)
        assert request.first_token_at is not None
        return elapsed

    a, b = paired(restored, live, ROUNDS)
    yield Row(
        f"first token, {RESTORED} of {LENGTH} tokens restored / the other "
        f"{LENGTH - RESTORED} computed from a live state",
        f"{median_ratio(a, b):.3f}  ({statistics.median(a) * 1e3:.1f} / "
        f"{statistics.median(b) * 1e3:.1f} ms)",
        "<= 1.10",
    )

    def cached_then_cold() -> tuple[float, float]:
        tokens = prompt()
        cold = first_token(restoring, tokens)
        return first_token(restoring, tokens), cold

    cached_then_cold()
    pairs = [cached_then_cold() for _ in range(ROUNDS)]
    hot, cold = [x for x, _ in pairs], [y for _, y in pairs]
    yield Row(
        f"first token, fully cached prompt / the same prompt cold, {LENGTH} tokens",
        f"{median_ratio(hot, cold):.2%}  ({statistics.median(hot) * 1e3:.2f} / "
        f"{statistics.median(cold) * 1e3:.1f} ms)",
        "<= 3 %",
    )
