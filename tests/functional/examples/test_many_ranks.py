"""The example of many ranks, under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matrix import matrix_rows

EXAMPLE = Path(__file__).parents[3] / "examples" / "many_ranks.py"


@pytest.mark.parametrize(
    "layout", matrix_rows(["1 replicas of 2", "2 replicas of 1"], "1 replicas of 2")
)
def test_second_turns_skip_the_first_ones(layout):
    sizes = ["--tp", layout[-1]]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(EXAMPLE), *sizes],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    turns = re.findall(r"(\w+) turns on (.*) ranks: (\d+) of (\d+) prompt", result.stdout)
    assert [(turn, where) for turn, where, *_ in turns] == [("first", layout), ("second", layout)]
    (*_, none, _), (*_, skipped, total) = turns
    assert int(none) == 0 and int(skipped) >= 0.95 * int(total)
