"""All engines that are installed, on every geometry; ours."""

import numpy as np
import pytest
from matrix import matrix_rows

from benchmarks.replay.engines import ENGINES
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
