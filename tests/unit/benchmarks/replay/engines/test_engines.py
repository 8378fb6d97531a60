"""All engines that are installed, on every geometry; what ours has in its windows, and what Marconi
saves and evicts."""

import numpy as np
import pytest
from matrix import matrix_rows
from replayed import check_baseline, skipped_tokens, small_requests

from benchmarks.replay.engines import ENGINES
from benchmarks.replay.engines.marconi import Marconi, normalised
from benchmarks.replay.engines.windows import WindowedLRU
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.runner import replay
from benchmarks.replay.workloads import WORKLOADS
from megatron_hybrid.tools.replay.lru import Ceiling
from megatron_hybrid.tools.replay.protocol import Request

NEMOTRON = GEOMETRIES["nemotron-h-8b"]
INSTALLED = [name for name, entry in ENGINES.items() if entry.installed]


@pytest.mark.parametrize("geometry", matrix_rows(GEOMETRIES, "nemotron-h-8b"))
@pytest.mark.parametrize("name", INSTALLED)
def test_every_engine_replays_every_geometry(name, geometry):
    requests = list(WORKLOADS["chat"].generate(60))
    possible = replay(requests, Ceiling()).skipped_tokens
    for in_flight, budget in ((1, 8e9), (8, 4e9)):
        build = list(ENGINES[name].build(GEOMETRIES[geometry], budget, in_flight).values())[-1]
        result = replay(requests, build(), in_flight)
        assert len(result.skipped_tokens) == len(requests)
        if in_flight == 1:  # no request finds what no request left
            assert all(s <= p for s, p in zip(result.skipped_tokens, possible))
            assert sum(result.skipped_tokens) > 0


@pytest.mark.parametrize("geometry", matrix_rows(GEOMETRIES, "gemma-3-27b"))
@pytest.mark.parametrize("name", INSTALLED)
def test_a_prompt_that_had_to_wait_for_room_does_not_hit_itself(name, geometry):
    """An engine may have computed and cached most of it before it finds that there is none."""
    prompts = np.random.default_rng(0).integers(0, 9999, (4, 30_000), np.int32)
    requests = [
        Request(prompt, prompt[:8], f"{i}", 0, float(i)) for i, prompt in enumerate(prompts)
    ]
    token_bytes = GEOMETRIES[geometry].kv_bytes_per_token
    for room_tokens in (40_000, 55_000, 90_000):
        builds = ENGINES[name].build(GEOMETRIES[geometry], room_tokens * token_bytes + 2e8, 4)
        for build in builds.values():
            assert replay(requests, build(), in_flight=4).skipped_tokens == [0] * 4


def test_what_is_not_installed_says_so():
    entry = ENGINES["vllm"]
    missing = type(entry)(entry.what, entry.build, module="no_such_package.at_all")
    assert not missing.installed


def test_windows_of_states_and_of_running_requests_are_in_the_budget():
    """Three bytes for each of the last ten tokens before a state, and of what runs."""
    engine = WindowedLRU(1, 1, 5, 195, window=10, window_bytes=3)
    first, second, huge = np.random.default_rng(0).integers(0, 99, (3, 180), np.int32)
    running = engine.begin(first[:40])
    assert engine.bytes_held == 40 + (5 + 30) + 30  # a state before the last token
    assert engine.begin(second[:40]) is None
    engine.finish(running, first[:42])
    assert engine.bytes_held == 42 + (5 + 30)
    alone = engine.begin(huge)  # it never fits, and runs beside the cache
    assert engine.bytes_held == 0
    short = engine.begin(second[:7])
    assert engine.bytes_held == 7 + (5 + 18) + 21
    engine.finish(alone, huge)
    engine.finish(short, second[:8])
    assert engine.bytes_held == 8 + (5 + 18) + (5 + 24)
    check_baseline(engine)


def test_the_windows_of_what_has_run_make_room_for_its_state():
    """9 tokens, 29 bytes for the state before the last, 27 for its windows; then 11 tokens, and a
    second state in their place."""
    engine = WindowedLRU(1, 1, 5, 75, window=10, window_bytes=3)
    prompt = np.arange(11, dtype=np.int32)
    engine.finish(engine.begin(prompt[:9]), prompt)
    assert engine.bytes_held == 11 + (5 + 24) + (5 + 30)
    assert engine.begin(prompt).skipped_tokens == 8


@pytest.mark.parametrize(("budget", "skipped"), [(355, 40), (260, 0), (190, 0)])
def test_the_longest_forward_of_a_prefill_is_in_the_budget(budget, skipped):
    """60 tokens in the local layers take 180 bytes, beside 60 for themselves; what they leave of
    the budget holds 40 other tokens and a state, or does not. In 190 bytes the forward is halved
    until it fits."""
    engine = WindowedLRU(1, 1, 5, budget, window=10, window_bytes=3)
    prompt, other = np.arange(40, dtype=np.int32), np.arange(100, 160, dtype=np.int32)
    engine.finish(engine.begin(prompt), prompt)
    running = engine.begin(other)
    assert running.node is not None
    engine.finish(running, other)
    assert engine.begin(np.arange(45, dtype=np.int32)).skipped_tokens == skipped
    check_baseline(engine)


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
