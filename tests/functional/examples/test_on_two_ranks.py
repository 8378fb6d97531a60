"""Examples on two ranks: that of pretraining, under torchrun, learns, and goes on where it stopped;
in that of many ranks replicas skip what they have seen."""

import re
from pathlib import Path

import pytest
from commands import Command, run_script, run_torchrun

from megatron_hybrid import load_pretrained

EXAMPLE = Path(__file__).parents[3] / "examples" / "pretrain_hybrid.py"
OVERRIDES = ["run.eval_every_steps=2", "data.sequence_length=64", "run.steps=6"]


def run(folder, *overrides):
    """Evaluations as (step, loss on held-out rows), of two ranks."""
    arguments = ["--nproc-per-node", "2", str(EXAMPLE), *OVERRIDES, *overrides]
    result = run_torchrun(arguments, cwd=folder)
    lines = re.findall(r"step (\d+): loss [\d.]+, held_out=([\d.]+)", result.stdout)
    return [(int(step), float(loss)) for step, loss in lines]


@pytest.mark.matrix
def test_it_learns_and_goes_on_in_another_layout(tmp_path):
    (_, first), (_, second), (_, third) = whole = run(tmp_path)
    assert [step for step, _ in whole] == [2, 4, 6] and first > second > third
    folder = tmp_path / "runs/pretrain_hybrid"
    model, tokenizer = load_pretrained(folder / "exported")
    assert model.config.vocab_size == tokenizer.vocab_size
    for made in ("iter_0000006", "exported"):
        (folder / made).rename(folder / f"old_{made}")
    resumed = run(tmp_path, "model.tensor_model_parallel_size=2")
    assert resumed == [(6, third)] and (folder / "exported").exists()


MANY_RANKS = Path(__file__).parents[3] / "examples" / "many_ranks.py"


@pytest.mark.matrix
@pytest.mark.parametrize("tp", [1, 2])
def test_second_turns_of_every_replica_skip_the_first_ones(tp, tmp_path):
    command = Command([str(MANY_RANKS), "--tp", str(tp)], tmp_path / "printed", 2, run_script)
    assert command.wait() == [0, 0], command.printed()
    found = re.findall(
        r"(\w+) turns of replica (.*) ranks: (\d+) of (\d+) prompt", command.printed()
    )
    turns = {(turn, where): (int(skipped), int(total)) for turn, where, skipped, total in found}
    replicas = [f"{number} of {2 // tp}, on {tp}" for number in range(2 // tp)]
    assert turns.keys() == {(turn, each) for turn in ("first", "second") for each in replicas}
    for (turn, _), (skipped, total) in turns.items():
        assert skipped >= 0.95 * total if turn == "second" else skipped == 0
