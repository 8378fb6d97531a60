"""Drawings of the docs are those that their scripts make, and the picture of README.md has the
numbers of the replay."""

import json
import re
import xml.etree.ElementTree as ET

from benchmarks import plots
from benchmarks.drawings.__main__ import FOLDER, files
from benchmarks.drawings.svg import WIDTH


def test_the_drawings_are_those_of_the_script():
    drawn = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")}
    assert drawn == files()


def test_text_of_the_drawings_fits_and_can_be_read_on_small_screens():
    """A letter is about half as wide as its size."""
    for name, content in files().items():
        for text in ET.fromstring(content).iter("{http://www.w3.org/2000/svg}text"):
            x, size = float(text.get("x")), int(text.get("font-size"))
            width = 0.5 * size * len(text.text)
            left = {"start": x, "middle": x - width / 2, "end": x - width}[text.get("text-anchor")]
            assert left >= 0 and left + width <= WIDTH, (name, text.text)
            assert size >= 13, (name, text.text)


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
