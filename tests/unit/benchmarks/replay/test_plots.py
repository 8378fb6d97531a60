"""The plots draw a few of the engines, as words and lines, on light and on dark paper."""

from benchmarks.plots import THEMES
from benchmarks.replay.cliff import Cliff
from benchmarks.replay.engines import ENGINES
from benchmarks.replay.plots import BEST, STYLES, cliffs, hit_rates, models
from benchmarks.replay.sweep import Cell


def test_at_most_six_engines_are_drawn(tmp_path):
    assert len(STYLES) <= 6 and set(STYLES) < set(ENGINES)
    cells = [
        Cell("chat", "nemotron-h-8b", 1, budget, engine, None, 10, 1000, 50.0, 10.0, 20.0)
        for engine in ENGINES
        for budget in ((None,) if engine == "ceiling" else (1.0, 4.0))
    ]
    found = [Cliff("qwen3.5-4b", engine, [16, 32], [16, 0], [0, 16]) for engine in ENGINES]
    paths = hit_rates(cells, tmp_path), cliffs(found, tmp_path), models(cells, tmp_path)
    for pair, words in zip(paths, (STYLES, STYLES, ("ours", "ours-int8", BEST)), strict=True):
        assert [path.name.endswith("-dark.svg") for path in pair] == [False, True]
        for path, (paper, ink, _) in zip(pair, THEMES.values(), strict=True):
            drawn = path.read_text(encoding="utf-8")
            assert [word for word in words if f">{word}</text>" not in drawn] == []
            assert paper in drawn and ink in drawn and ">lru-16<" not in drawn
