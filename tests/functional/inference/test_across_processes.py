"""Invariant 7: what is decided depends on the requests, not on the process that decides."""

import os
from pathlib import Path

from commands import run_python
from differential import RandomRun

HELPERS = Path(__file__).parents[2] / "helpers"
SCRIPT = """
from test_across_processes import decided
print("decided", *decided())
print("hash", hash("a salt"))
"""


def decided():
    run = RandomRun(0, 5, longest_prompt=40, longest_answer=20, crowded=True)
    run.run()
    return run.engine.cache.digest(), *(each.token_ids for each in run.requests)


def test_invariant_7_processes_with_other_hash_seeds_decide_alike():
    paths = (HELPERS, HELPERS.parents[1], Path(__file__).parent, os.environ.get("PYTHONPATH", ""))
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    path = os.pathsep.join(map(str, paths))
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    environment["OMP_NUM_THREADS"] = "1"
    other = run_python(SCRIPT, env=os.environ | environment, check=True)
    assert " ".join(["decided", *map(str, decided())]) in other.stdout
    assert f"hash {hash('a salt')}" not in other.stdout  # strings do hash differently in them
