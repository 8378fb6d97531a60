"""The chart of README.md is the one that the numbers give."""

import json

from benchmarks import pictures


def test_the_chart_is_that_of_the_replay():
    replay = pictures.ROOT / "benchmarks" / "results" / "replay.json"
    cells = json.loads(replay.read_text(encoding="utf-8"))["cells"]
    drawn = (pictures.ROOT / "docs" / "skipped.svg").read_text(encoding="utf-8")
    assert drawn == pictures.chart(cells)
    assert pictures.skipped(cells, "chat", 4, ("vllm", "vllm-fine")) == 50.02
