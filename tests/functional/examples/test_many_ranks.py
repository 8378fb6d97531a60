"""The example of many ranks."""

import re
from pathlib import Path

import pytest
from commands import Command, run_script

EXAMPLE = Path(__file__).parents[3] / "examples" / "many_ranks.py"


@pytest.mark.matrix
@pytest.mark.parametrize("tp", [1, 2])
def test_second_turns_of_every_replica_skip_the_first_ones(tp, tmp_path):
    command = Command([str(EXAMPLE), "--tp", str(tp)], tmp_path / "printed", 2, run_script)
    assert command.wait() == [0, 0], command.printed()
    found = re.findall(
        r"(\w+) turns of replica (.*) ranks: (\d+) of (\d+) prompt", command.printed()
    )
    turns = {(turn, where): (int(skipped), int(total)) for turn, where, skipped, total in found}
    replicas = [f"{number} of {2 // tp}, on {tp}" for number in range(2 // tp)]
    assert turns.keys() == {(turn, each) for turn in ("first", "second") for each in replicas}
    for (turn, _), (skipped, total) in turns.items():
        assert skipped >= 0.95 * total if turn == "second" else skipped == 0
