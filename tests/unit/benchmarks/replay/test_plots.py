"""The plots draw a few of the engines."""

from benchmarks.replay.cliff import Cliff
from benchmarks.replay.engines import ENGINES
from benchmarks.replay.plots import STYLES, cliffs, hit_rates
from benchmarks.replay.sweep import Cell


def test_at_most_five_engines_are_drawn(tmp_path):
    assert len(STYLES) <= 5 and set(STYLES) < set(ENGINES)
    cells = [
        Cell("chat", "nemotron-h-8b", 1, budget, engine, None, 10, 1000, 50.0, 10.0, 20.0, {})
        for engine in ENGINES
        for budget in ((None,) if engine == "ceiling" else (1.0, 4.0))
    ]
    found = [Cliff("qwen3.5-4b", engine, [16, 32], [16, 0], [0, 16]) for engine in ENGINES]
    paths = hit_rates(cells, tmp_path) + cliffs(found, tmp_path)
    assert [path.read_bytes()[:4] for path in paths] == [b"\x89PNG"] * 2
