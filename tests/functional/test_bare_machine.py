"""A GPU machine that has none of the libraries of servers and of NVIDIA's containers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = "apex fastapi openai pydantic starlette transformer_engine uvicorn llguidance"
COLLECT = """
import sys
from importlib.machinery import PathFinder

import pytest

absent, find_spec = sys.argv[1].split(), PathFinder.find_spec


def find_spec_of_others(name, path=None, target=None):
    return None if name.partition(".")[0] in absent else find_spec(name, path, target)


PathFinder.find_spec = find_spec_of_others
sys.exit(pytest.main(["-m", "gpu", "--collect-only", "-qq", "-p", "no:cacheprovider", "tests"]))
"""


@pytest.mark.matrix
def test_the_gpu_tests_are_collected():
    command = [sys.executable, "-c", COLLECT, ABSENT]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    found = set(re.findall(r"^tests/.*/(\w+)\.py: \d+$", result.stdout, re.MULTILINE))
    assert found >= {"test_gpu", "test_gpu_ops", "test_adapters_on_gpu"}
