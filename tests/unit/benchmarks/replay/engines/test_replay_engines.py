"""All engines that are installed, on every geometry; ours."""

import numpy as np
import pytest
from matrix import matrix_rows
from replayed import check_baseline

from benchmarks.replay.engines import ENGINES
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
