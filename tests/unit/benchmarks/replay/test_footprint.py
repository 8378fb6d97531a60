"""The memory of an index, and the time of a long trace."""

import numpy as np

from benchmarks.replay.footprint import deep_size, footprint
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.workloads import WORKLOADS


def test_deep_size_counts_each_thing_once():
    array = np.zeros(1000, np.int64)
    assert deep_size([array]) == deep_size([array, array]) - 8
    assert 8000 < deep_size([array[:1], array[5:6]]) < 8500  # views of one array
    assert deep_size([array, array.copy()]) > 16_000


def test_footprint():
    found = footprint(WORKLOADS["chat"].generate(50), GEOMETRIES["nemotron-h-8b"], 16e9)
    assert found.requests == 50
    assert 4 * found.cached_tokens < found.index_bytes < 1e8
    assert 0 < found.cache_seconds <= found.wall_seconds
