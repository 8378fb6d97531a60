"""Tables of results, in a terminal and in a page."""

import json

from benchmarks.plots import RESULTS, ROOT
from benchmarks.replay.sweep import Cell
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
