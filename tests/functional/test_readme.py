"""README.md's Python runs as it stands there, and shows what the text beside it says."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_ten_lines_skip_what_was_seen(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(block.splitlines()) <= 12
    exec(block, {})
    printed = capsys.readouterr().out
    (first, second) = re.findall(r"tokens: prompt (\d+), skipped (\d+)", printed)
    assert int(first[1]) == 0 and int(second[1]) > 0.7 * int(second[0])
    assert re.search(r"\d+ of \d+ prompt tokens are skipped", printed)
