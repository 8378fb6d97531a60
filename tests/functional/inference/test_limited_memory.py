"""An engine under a real limit of memory (ulimit -v): the default pool fits in it and runs, more is
refused with both numbers."""

import os
import re
import sys

import pytest
from commands import run_python

SCRIPT = """
import resource
from pathlib import Path
from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.memory.budget import available_bytes

model, tokenizer = load_pretrained("demo")
device = next(model.parameters()).device
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = used + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
assert 0 < available_bytes(device) <= 1 << 30
try:
    DynamicInferenceEngine(model, tokenizer, InferenceConfig(cache_bytes=2 << 30))
except MemoryError as error:
    print(error)
with DynamicInferenceEngine(model, tokenizer) as engine:
    assert 100 << 20 < engine.config.cache_bytes <= 256 << 20
    result, = engine.generate(["Once upon a time"])
    print("tokens:", len(result.token_ids))
"""


@pytest.mark.matrix
def test_an_engine_stays_below_an_address_space_limit():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    run = run_python(SCRIPT, env=environment, timeout=600)
    assert run.returncode == 0, run.stderr
    refusal, answer = run.stdout.splitlines()
    assert re.match(r"cpu has \d+ bytes \((0\.9\d|1\.00) GiB\) available, and the eng", refusal)
    assert f"{2 << 30} for the pool" in refusal
    assert re.fullmatch(r"tokens: [1-9]\d*", answer)
