"""Every kernel of ours compiles for GPUs that are not there, and needs no more than they have."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "helpers" / "ahead_of_time.py"
SHARED_BYTES = 227 << 10
"""Of a block, on both."""


def test_every_kernel_compiles_without_spills_and_fits_into_shared_memory():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert {one["gpu"] for one in compiled} == {"sm_90a", "sm_100a"}
    wrong = [one for one in compiled if one["spilled_bytes"] or one["shared_bytes"] > SHARED_BYTES]
    assert wrong == []
