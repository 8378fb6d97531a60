"""`make test-megatron MEGATRON_LM=PATH`: what main of a clone of Megatron-LM does over ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import megatron.core
import megatron.rl
from commands import free_port
from waiting import LIMIT_S

ROLLOUTS = Path(__file__).with_name("rl_rollouts.py")
STATIC = """
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines import StaticInferenceEngine
StaticInferenceContext(4, 64)
"""


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "megatron_hybrid.megatron", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=4 * LIMIT_S,
    )


def test_this_is_the_clone():
    assert Path(megatron.rl.__file__).parents[2] == Path(megatron.core.__file__).parents[2]


def test_rollouts_of_an_environment_and_their_ledger():
    """Each answer is in the ledger once, with the epoch of its weights."""
    result = run(str(ROLLOUTS), str(free_port()))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["epochs"] == [[1], [2]] and found["lag"] == 3
    for epoch in (1, 2):
        rollouts = found[f"rollouts {epoch}"]
        assert len(rollouts) == 4
        for num_turns, reward, num_in_ledger in rollouts:
            assert (num_turns, num_in_ledger) == (1, 4) and 0 <= reward <= 1


def test_the_static_script_is_refused_with_what_to_call(tmp_path):
    (tmp_path / "static.py").write_text(STATIC)
    result = run(str(tmp_path / "static.py"))
    assert result.returncode == 1 and "StaticInferenceContext is not supported" in result.stderr
    assert "DynamicInferenceEngine(controller, context).generate(" in result.stderr
