"""The pictures of README.md are those that the numbers give."""

import json

from benchmarks import pictures


def test_the_chart_is_that_of_the_replay():
    replay = pictures.ROOT / "benchmarks" / "results" / "replay.json"
    cells = json.loads(replay.read_text(encoding="utf-8"))["cells"]
    drawn = (pictures.ROOT / "docs" / "skipped.svg").read_text(encoding="utf-8")
    assert drawn == pictures.chart(cells)
    assert pictures.skipped(cells, "chat", 4, ("vllm", "vllm-fine")) == 50.02


def test_the_idea_is_drawn_by_the_script():
    drawn = (pictures.ROOT / "docs" / "idea.svg").read_text(encoding="utf-8")
    assert drawn == pictures.idea()
