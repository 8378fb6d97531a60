"""What Marconi saves, and what it evicts."""

import numpy as np
import pytest
from replayed import check_baseline, skipped_tokens, small_requests

from benchmarks.replay.engines.marconi import Marconi, normalised
from benchmarks.replay.geometry import GEOMETRIES

NEMOTRON = GEOMETRIES["nemotron-h-8b"]


def marconi(budget=1e12, alpha=1.0):
    return Marconi(NEMOTRON, NEMOTRON.state_bytes(), budget, alpha)


def test_marconi_saves_junctions_and_ends_and_hits_nowhere_else():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1000, (2, 200), dtype=np.int32)
    first = a[:100]
    fork = np.concatenate([a[:50], b[:30]])
    inside = np.concatenate([a[:70], b[100:130]])  # leaves the edge (50, 100] in its middle
    turn = np.concatenate([first, np.array([7] * 5, np.int32), b[40:60]])
    assert skipped_tokens(marconi(), first, fork, inside, turn) == [0, 0, 50, 105]


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_marconi_keeps_to_its_budget(alpha):
    engine = Marconi(NEMOTRON, 7 * NEMOTRON.kv_bytes_per_token, 0, alpha)
    engine.budget = 120 * NEMOTRON.kv_bytes_per_token
    skipped = 0
    for request in small_requests(1, count=200):
        handle = engine.begin(request.prompt)
        skipped += handle.skipped_tokens
        engine.finish(handle, np.concatenate([request.prompt, request.output]))
        check_baseline(engine)
    assert skipped > 0


def test_marconi_keeps_to_its_budget_where_answers_are_empty():
    """The state after the prompt has no room: nor has it when the request ends at the prompt."""
    prompt = np.arange(300, dtype=np.int32)
    engine = Marconi(NEMOTRON, NEMOTRON.state_bytes(), NEMOTRON.state_bytes() / 10, alpha=1.0)
    for _ in range(2):
        engine.finish(engine.begin(prompt), prompt)
        assert engine.bytes_held <= engine.budget
        check_baseline(engine)


def test_marconi_weighs_work_against_recency():
    """A long sequence, the least recently used one, goes if alpha is 0 and stays if it is large."""
    rng = np.random.default_rng(0)
    long, *short = (rng.integers(0, 1000, n, dtype=np.int32) for n in (20_000, 200, 200, 200, 200))
    budget = 20_600 * NEMOTRON.kv_bytes_per_token + 3.5 * NEMOTRON.state_bytes()
    turn = np.concatenate([long, np.array([7] * 5, np.int32), short[0]])
    assert skipped_tokens(marconi(budget, alpha=0.0), long, *short, turn)[-1] == 0
    assert skipped_tokens(marconi(budget, alpha=4.0), long, *short, turn)[-1] == 20_005


def test_normalised():
    assert normalised(np.array([2.0, 4.0, 3.0])).tolist() == [0.0, 1.0, 0.5]
    assert normalised(np.array([2.0, 2.0])).tolist() == [0.0, 0.0]
