"""A process stays its owner's: what loading, building, serving and training change globally."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS = ("build", "load", "generate", "groups_end", "train_scope")
ALLOWED = {
    "build": {"rng.torch"},  # parameters are drawn, as those of torch's modules
    "load": {"rng.torch"},
    "generate": {"core.rng"},  # core's tracker of random states, which is empty
    "train_scope": {"torch.distributed"},  # the name of a backend
}
"""What docs/guides/rollouts.md lists, by step."""


def test_no_step_changes_what_is_not_documented():
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'helpers'}"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/helpers/process_steps.py")]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert tuple(found) == STEPS
    for step, changed in found.items():
        assert changed.keys() <= ALLOWED.get(step, set()), (step, changed)
