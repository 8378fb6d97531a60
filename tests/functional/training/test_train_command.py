"""`megatron-hybrid train` as a command: what it prints, how it ends, and runs that were stopped."""

import signal
from itertools import count

import pytest
import torch
import yaml
from commands import Command, Launched
from safetensors.torch import load_file
from small_recipes import SIZES, small_recipe, write_small_text

from megatron_hybrid.training.reports import LOG, read_log

RANKS, STEPS, SAVED_EVERY = 2, 40, 8
FEW_STEPS = ["run.steps=6", "run.eval_every_steps=5", "run.eval_batches=2", "data.workers=0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a recipe and its data. Dropout and readers ahead are a part of what goes on."""
    folder = tmp_path_factory.mktemp("command")
    text, dropout = write_small_text(folder / "text"), {"hidden_dropout": 0.1}
    recipe = small_recipe(
        model={"layer_pattern": "M*-", "attention_dropout": 0.1, **dropout, **SIZES},
        data={"sequence_length": 32, "train": [text], "valid": [text], "workers": 1},
        run={"steps": STEPS, "global_batch_size": RANKS},
        checkpoints={"every_steps": SAVED_EVERY, "asynchronous": True},
    ).to_dict()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def start(folder):
    """start(name, *overrides, num_ranks=2, by_torchrun=False): a command that trains in the folder
    `name`."""
    numbers = count()

    def start(name, *overrides, num_ranks=RANKS, by_torchrun=False):
        arguments = ["train", str(folder / "recipe.yaml"), "--folder", str(folder / name)]
        arguments += overrides
        prints = folder / f"printed {next(numbers)}"
        if not by_torchrun:
            return Command(arguments, prints, num_ranks)
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        return Launched(["-m", *launcher, "-m", "megatron_hybrid", *arguments], prints)

    return start


def losses(path):
    """(step, loss, norm of the gradient) in a run's log."""
    records = [one for one in read_log(path / LOG) if "loss" in one]
    return [(one["step"], one["loss"], one["gradient_norm"]) for one in records]


def step_of(path):
    found = losses(path)
    return found[-1][0] if found else 0


def has(path, step):
    """For `wait_until`: whether a run has come to a step."""
    return lambda: step_of(path) >= step


@pytest.fixture(scope="module")
def alone(start, folder):
    """A whole run of one process."""
    command = start("alone", *FEW_STEPS, num_ranks=1)
    assert command.wait() == [0], command.printed()
    return command


def test_reports_are_all_that_is_printed(alone, folder):
    lines = alone.err().splitlines()
    assert len(lines) == 8
    assert all(line.startswith("step ") for line in lines)
    assert "step 6  eval " in lines[-1]
    assert max(map(len, lines)) <= 80
    assert alone.out() == f"the model is in {folder}/alone/exported\n"


def contents(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_run_that_has_ended_does_nothing_when_it_is_started_again(alone, start, folder):
    before = contents(folder / "alone")
    again = start("alone", *FEW_STEPS, num_ranks=1)
    assert again.wait() == [0], again.printed()
    assert again.err() == "" and again.out() == alone.out()
    assert contents(folder / "alone") == before


@pytest.fixture(scope="module")
def whole(start, folder):
    """The folder of a run that nobody stopped."""
    command = start("whole", "data.workers=0")
    assert command.wait() == [0] * RANKS, command.printed()
    return folder / "whole"


@pytest.fixture(scope="module")
def stopped(start, folder):
    """A run under torchrun that got SIGTERM, and the step that it has come to."""
    path = folder / "stopped"
    command = start("stopped", by_torchrun=True)
    command.wait_until(has(path, SAVED_EVERY + 3))  # the second save is that of the end
    command.send(signal.SIGTERM)
    statuses = command.wait()
    assert statuses != [0], command.printed()
    return command, step_of(path)


@pytest.mark.matrix
def test_sigterm_to_torchrun_finishes_the_step_and_saves(stopped, folder):
    command, step = stopped
    assert SAVED_EVERY < step < STEPS
    line = f"stopped and saved after step {step} of {STEPS}; run it again to go on\n"
    assert command.out() == line
    assert (folder / "stopped" / f"iter_{step:07d}" / "files.json").is_file()


@pytest.mark.matrix
def test_a_run_that_was_stopped_and_killed_is_that_of_none_to_the_bit(
    stopped, whole, start, folder
):
    path, (_, first) = folder / "stopped", stopped
    again = start("stopped")
    again.wait_until(has(path, first + 3))
    again.send(signal.SIGINT, [1])  # all ranks stop, whichever got it
    assert again.wait() == [3] * RANKS, again.printed()
    assert all(line.startswith("step ") for line in again.err().splitlines())
    second = step_of(path)
    assert f"stopped and saved after step {second} of {STEPS}" in again.out()
    assert again.out(1) == "" and not (path / "exported").exists()

    killed = start("stopped")
    saved = path / f"iter_{(second // SAVED_EVERY + 1) * SAVED_EVERY:07d}"
    killed.wait_until(saved.exists)
    killed.wait_until(has(path, int(saved.name[-7:]) + 3))
    killed.send(signal.SIGKILL)
    assert killed.wait() == [-signal.SIGKILL] * RANKS
    assert step_of(path) < STEPS, killed.printed()

    last = start("stopped")
    assert last.wait() == [0] * RANKS, last.printed()
    assert losses(path)[0][0] == 1 and len(losses(path)) == STEPS
    assert losses(path) == losses(whole)
    one, other = (load_file(run / "exported" / "model.safetensors") for run in (path, whole))
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
