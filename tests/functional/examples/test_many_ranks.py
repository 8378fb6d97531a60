"""The example of many ranks."""

import re
from pathlib import Path

import pytest
from commands import Command, run_script
from matrix import matrix_rows

EXAMPLE = Path(__file__).parents[3] / "examples" / "many_ranks.py"


@pytest.mark.parametrize(
    "layout", matrix_rows(["1 replicas of 2", "2 replicas of 1"], "1 replicas of 2")
)
def test_second_turns_skip_the_first_ones(layout, tmp_path):
    command = Command([str(EXAMPLE), "--tp", layout[-1]], tmp_path / "printed", 2, run_script)
    assert command.wait() == [0, 0], command.printed()
    turns = re.findall(r"(\w+) turns on (.*) ranks: (\d+) of (\d+) prompt", command.out())
    assert [(turn, where) for turn, where, *_ in turns] == [("first", layout), ("second", layout)]
    (*_, none, _), (*_, skipped, total) = turns
    assert int(none) == 0 and int(skipped) >= 0.95 * int(total)
