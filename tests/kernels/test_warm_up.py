"""What an engine compiles on a GPU that is not there: all of it before its first request."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "helpers" / "compiles.py"
ALL_KINDS = "MGKSC*+WLE-"


def test_a_warm_up_compiles_all_that_later_requests_launch():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), ALL_KINDS],
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    stats = found["stats"]
    assert stats["preemptions"] and stats["fetches"] and stats["checkpoints_evicted"]

    assert len(found["made"]) > 50
    assert {kind: kernels for kind, kernels in found["later"].items() if kernels} == {}
    # Without it the first request waits for the same ones, and the second for none.
    first, *others = found["cold"].values()
    assert sorted(first) == sorted(found["made"]) and others == [[], []]
