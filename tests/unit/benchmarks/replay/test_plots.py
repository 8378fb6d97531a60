"""The plots draw a few of the engines, as words and lines, on light and on dark paper."""

from benchmarks.plots import COLOURS
from benchmarks.replay.engines import ENGINES
from benchmarks.replay.plots import BEST, STYLES, cliffs, hit_rates, models
from benchmarks.replay.sweep import Cell, Cliff


def test_at_most_six_engines_are_drawn(tmp_path):
    assert len(STYLES) <= 6 and set(STYLES) < set(ENGINES)
    cells = [
        Cell("chat", "nemotron-h-8b", 1, budget, engine, None, 10, 1000, 50.0, 10.0, 20.0)
        for engine in ENGINES
        for budget in ((None,) if engine == "ceiling" else (1.0, 4.0))
    ]
    found = [Cliff("qwen3.5-4b", engine, [16, 32], [16, 0], [0, 16]) for engine in ENGINES]
    paths = hit_rates(cells, tmp_path), cliffs(found, tmp_path), models(cells, tmp_path)
    for [path], words in zip(paths, (STYLES, STYLES, ("ours", "ours-int8", BEST)), strict=True):
        drawn = path.read_text(encoding="utf-8")
        assert [word for word in words if f">{word}</text>" not in drawn] == []
        assert all(f"fill: {light}']{{fill:{dark}" in drawn for light, dark in COLOURS)
        assert ">lru-16<" not in drawn
