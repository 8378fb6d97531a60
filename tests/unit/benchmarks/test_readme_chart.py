"""The picture of README.md has the numbers of the replay."""

import json
import re

from benchmarks import plots


def test_the_chart_is_that_of_the_replay():
    replay = plots.RESULTS / "replay.json"
    cells = json.loads(replay.read_text(encoding="utf-8"))["cells"]
    drawn = (plots.FOLDER / "skipped.svg").read_text(encoding="utf-8")
    percents = [
        f"{plots.skipped(cells, workload, size, engines):.0f}"
        for _, workload, size in plots.ROWS
        for _, engines, _ in plots.BARS
    ]
    shown = re.findall(r"<text[^>]*>(\d+)</text>", drawn)
    assert shown == percents
    assert plots.skipped(cells, "chat", 4, ("vllm", "vllm-fine")) == 50.02
