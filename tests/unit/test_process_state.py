"""A process stays its owner's: what loading, building, serving and training change globally."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "import": r"function.*\.get_tensor_model_parallel_group_if_none|stand-in._cython.*",
    "build": "rng.torch",  # parameters are drawn, as those of torch's modules
    "load": "nothing",
    "generate": "core.rng",  # core's tracker of random states, which is empty
    "serve": "atexit|threads|logging.uvicorn.access",
    "groups_end": "nothing",
    # The name of a backend, and groups that core leaves when its others end.
    "train": "rng.torch|torch.distributed|core._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP.*",
}
"""What docs/guides/rollouts.md lists, by step."""


def test_no_step_changes_what_is_not_documented():
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'helpers'}"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/helpers/process_steps.py")]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found.keys() == ALLOWED.keys()
    for step, changed in found.items():
        other = {
            name: why for name, why in changed.items() if not re.fullmatch(ALLOWED[step], name)
        }
        assert not other, step
