"""Invariant 7: what is decided depends on the requests, not on the process that decides."""

import os
import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).parents[2] / "helpers"
SCRIPT = """
from differential import RandomRun
run = RandomRun(0, longest_prompt=60, longest_answer=20, crowded=True)
run.run()
print("decided", run.engine.cache.digest(), *(each.generated_tokens for each in run.requests))
print("hash", hash("a salt"))
"""


def test_invariant_7_processes_with_other_hash_seeds_decide_alike():
    path = os.pathsep.join(
        [str(HELPERS), str(HELPERS.parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [run.communicate()[0].splitlines() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    # torch 2.8 prints of its own.
    outputs = [[line for line in each if line.startswith(("decided", "hash"))] for each in outputs]
    (*first, first_hash), (*second, second_hash) = outputs
    assert first == second and len(first) == 1
    assert first_hash != second_hash  # strings do hash differently in them
