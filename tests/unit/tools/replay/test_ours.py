"""A replay through this project's cache."""

import numpy as np
import pytest
from matrix import matrix_rows

from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.runner import replay
from benchmarks.replay.workloads import WORKLOADS
from megatron_hybrid.tools.replay.lru import Ceiling, LeastRecentlyUsed
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.protocol import Request

NEMOTRON = GEOMETRIES["nemotron-h-8b"]


@pytest.mark.parametrize(("budget", "in_flight"), [(3e8, 1), (1e9, 1), (1e9, 8)])
def test_ours_leaves_the_cache_whole(budget, in_flight):
    engine = Ours(NEMOTRON.spec(), budget)
    replay(list(WORKLOADS["chat"].generate(60)), engine, in_flight)
    engine.cache.check_integrity()
    stats = engine.cache.stats()
    assert stats["leases"] == 0 and stats["pages_in_use"] == 0
    assert stats["pages"] * stats["page_bytes"] <= budget


def test_ours_runs_a_request_that_never_fits_beside_the_cache():
    requests = list(WORKLOADS["agent"].generate(3))
    result = replay(requests, Ours(NEMOTRON.spec(), 1e8))
    assert len(result.prompt_tokens) == 3 and result.skipped_share == 0


@pytest.mark.parametrize(("length", "fits"), [(36_000, True), (46_000, False)])
def test_a_prompt_whose_last_forward_has_no_room_is_computed_in_shorter_ones(length, fits):
    """Its first forward would have: windows roll, and what they give back is not enough."""
    engine = Ours(GEOMETRIES["gemma-3-27b"].spec(), 4e9)
    prompt = np.arange(length, dtype=np.int32)
    assert engine.cache.fits(20_000, 2048) and not engine.cache.fits(length, 2048)
    assert engine.holds(length) is fits
    running = engine.begin(prompt)
    engine.finish(running, prompt)
    assert (running.lease is not None) is fits


def documents_in_batches(seed, batches=10, documents=30):
    """Three rounds of questions about the documents of a batch; then there is another batch."""
    rng = np.random.default_rng(seed)

    def draw(low, high=None):
        return rng.integers(0, 1000, rng.integers(low, high or low + 1), dtype=np.int32)

    for batch in range(batches):
        texts = [draw(500, 2500) for _ in range(documents)]
        for turn in range(3):
            question = draw(40)
            for i, text in enumerate(texts):
                prompt = np.concatenate([text, question])
                yield Request(prompt, draw(100), documents * batch + i, turn, 0.0)


@pytest.mark.parametrize(
    ("geometry", "seed"),
    matrix_rows(
        [(geometry, seed) for geometry in ("llama-3-8b", "jamba-1.5-mini") for seed in range(2)],
        ("jamba-1.5-mini", 0),
    ),
)
def test_documents_in_use_outlive_those_that_were_popular(geometry, seed):
    """Two batches fit, so none is lost to anyone who goes by recency; the past teaches more than
    that, and must not teach less."""
    shape = GEOMETRIES[geometry]
    requests = list(documents_in_batches(seed))
    budget = 2 * 30 * (1700 * shape.kv_bytes_per_token + 2 * shape.state_bytes())
    ours = replay(requests, Ours(shape.spec(), budget))
    recent = replay(
        requests,
        LeastRecentlyUsed(16, shape.kv_bytes_per_token, shape.state_bytes(), budget),
    )
    possible = replay(requests, Ceiling()).skipped_share
    assert ours.skipped_share > max(recent.skipped_share, possible - 0.02)
