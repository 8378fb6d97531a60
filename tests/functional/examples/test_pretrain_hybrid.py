"""The example of pretraining, under torchrun: it learns, and goes on where it stopped."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hybrid import load_pretrained

EXAMPLE = Path(__file__).parents[3] / "examples" / "pretrain_hybrid.py"
OVERRIDES = ["run.eval_every_steps=2", "data.sequence_length=64", "run.steps=6"]


def run(folder, *overrides):
    """Evaluations as (step, loss on held-out rows), of two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(EXAMPLE), *OVERRIDES, *overrides],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"step (\d+): loss [\d.]+, held_out=([\d.]+)", result.stdout)
    return [(int(step), float(loss)) for step, loss in lines]


@pytest.mark.matrix
def test_it_learns(tmp_path):
    (_, first), (_, second), (_, third) = whole = run(tmp_path)
    assert [step for step, _ in whole] == [2, 4, 6] and first > second > third
    model, tokenizer = load_pretrained(tmp_path / "runs/pretrain_hybrid/exported")
    assert model.config.vocab_size == tokenizer.vocab_size


@pytest.mark.matrix
def test_it_goes_on_in_another_layout(tmp_path):
    *_, (_, third) = run(tmp_path)
    folder = tmp_path / "runs/pretrain_hybrid"
    for made in ("iter_0000006", "exported"):
        (folder / made).rename(folder / f"old_{made}")
    resumed = run(tmp_path, "model.tensor_model_parallel_size=2")
    assert resumed == [(6, third)] and (folder / "exported").exists()
