"""Tables of results, and plots of a few of the engines, as words and lines, on light and on dark
paper."""

import json

from benchmarks.plots import COLOURS, RESULTS, ROOT
from benchmarks.replay.engines import ENGINES
from benchmarks.replay.plots import BEST, STYLES, cliffs, hit_rates, models
from benchmarks.replay.sweep import Cell, Cliff
from benchmarks.replay.table import cells_behind, markdown


def test_cells_behind_set_ours_beside_the_best_that_one_could_have_instead():
    def cell(engine, budget, percent, geometry="a", in_flight=1):
        return Cell("chat", geometry, in_flight, budget, engine, None, 9, 99, percent, 1.0, 2.0)

    cells = [
        cell("ours", 4.0, 70.0), cell("ours-int8", 4.0, 80.0), cell("vllm", 4.0, 50.04),
        cell("marconi", 4.0, 60.0), cell("lru-free", 4.0, 90.0), cell("clairvoyant", 4.0, 91.0),
        cell("ours", 0.5, 20.0), cell("ours-int8", 0.5, 30.0), cell("vllm", 0.5, 10.25),
        cell("ceiling", None, 95.0),
        cell("ours", 4.0, 40.0, "b", 8), cell("vllm", 4.0, 41.0, "b", 8),
        cell("ours-int8", 4.0, 45.0, "b", 8),
    ]  # fmt: skip
    behind = cells_behind(cells)
    assert behind.startswith("**Another engine is ahead in 1 of 3 cells")
    assert behind.strip().splitlines()[4:] == ["| chat | b | 8 | 4 | 40.0 | 41.0 | vllm | 45.0 |"]
    assert "in 0 of 0 cells" in cells_behind([cell("ours", 4.0, 40.0), cell("ceiling", None, 95.0)])


def test_the_page_has_the_tables_of_the_recorded_replays():
    page = (ROOT / "docs" / "measured" / "replay.md").read_text(encoding="utf-8")
    for name, write in (("replay", markdown), ("replay_models", cells_behind)):
        recorded = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["cells"]
        assert write([Cell(**cell) for cell in recorded]) in page


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
