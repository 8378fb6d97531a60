"""The first block that a newcomer copies shows what the text beside it says. `make test-docs` runs
all others."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_ten_lines_skip_what_was_seen(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(block.splitlines()) <= 12
    exec(block, {})
    printed = capsys.readouterr().out
    (first, second) = re.findall(r"tokens: prompt (\d+), skipped (\d+)", printed)
    assert int(first[1]) == 0 and int(second[1]) > 0.7 * int(second[0])
    assert re.search(r"\d+ of \d+ prompt tokens are skipped", printed)
