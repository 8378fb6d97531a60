"""Python in a process that compiles Triton's kernels, where tests interpret them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"


def run_compiling(*arguments: str) -> str:
    """Run Python with arguments of its command line. Returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(HELPERS)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    result = subprocess.run(command, env=environment | paths, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout
