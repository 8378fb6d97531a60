"""Kills a training run under torchrun at many moments, lets it go on, and compares its losses with
those of a run that nobody killed, evaluations included. A line for each kill: what was killed, at
which step, seconds until all processes were gone.

python tests/helpers/training_soak.py [MOMENTS]: kills of each kind, 10 if left out.
"""

import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml
from commands import Launched
from small_recipes import SIZES, small_recipe, write_small_text
from waiting import is_running

from megatron_hybrid.training.reports import LOG, read_log

KINDS = ("one rank", "all ranks", "launcher")
STEPS_BETWEEN, SAVED_EVERY, LIMIT_S = 4, 2, 60


def write_recipe(folder: Path, moments: int) -> Path:
    text, evaluations = write_small_text(folder / "text"), {"eval_every_steps": SAVED_EVERY}
    steps = {"steps": STEPS_BETWEEN * (moments + 1), "global_batch_size": 4}
    recipe = small_recipe(
        model={"layer_pattern": "M*-", "hidden_dropout": 0.1, **SIZES},
        data={"sequence_length": 64, "train": [text], "valid": [text], "workers": 1},
        run={**steps, **evaluations, "eval_batches": 1},
        checkpoints={"every_steps": SAVED_EVERY, "asynchronous": True},
    )
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.to_dict()))
    return path


def start(recipe: Path, run: Path, number: int) -> Launched:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "megatron_hybrid", "train", str(recipe), "--folder", str(run)]
    return Launched([*launcher, *command], run.with_name(f"{run.name} {number}"))


def losses(run: Path) -> list[tuple[int, float, bool]]:
    """(step, loss, whether it is of an evaluation)."""
    return [
        (record["step"], record.get("loss", record.get("eval_loss")), "eval_loss" in record)
        for record in read_log(run / LOG)
    ]


def kill(command: Launched, kind: str, rng: random.Random) -> tuple[float, list[str]]:
    """Returns seconds until all processes were gone, and the commands of those that were not."""
    launcher = psutil.Process(command.pid)
    ranks = launcher.children()
    doomed = {"one rank": [rng.choice(ranks)], "all ranks": ranks, "launcher": [launcher]}[kind]
    alive = [launcher, *launcher.children(recursive=True)]
    began = time.monotonic()
    for process in doomed:
        process.send_signal(signal.SIGKILL)
    while alive and time.monotonic() - began < LIMIT_S:
        command.poll()
        alive = [process for process in alive if is_running(process.pid)]
        time.sleep(0.01)
    left = [" ".join(process.cmdline()) for process in alive]
    for process in alive:
        process.kill()
    return time.monotonic() - began, left


def main(moments: int) -> int:
    rng, failures = random.Random(7), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_recipe(folder, moments)
        assert start(recipe, folder / "whole", 0).wait() == [0]
        whole = losses(folder / "whole")
        for kind in KINDS:
            run = folder / kind
            for number in range(moments):
                command = start(recipe, run, number)
                wanted = [(STEPS_BETWEEN * (number + 1),)]
                command.wait_until(lambda run=run, wanted=wanted: losses(run)[-1:] >= wanted)
                time.sleep(rng.random() / 10)  # also in the midst of a step, or of a save
                step = losses(run)[-1][0]
                seconds, left = kill(command, kind, rng)
                failures += len(left)
                print(
                    f"{kind} killed at step {step}: all gone after {seconds:.2f} s",
                    *left,
                    sep="\n  ",
                )
            assert start(recipe, run, moments).wait() == [0]
            equal = losses(run) == whole
            failures += not equal
            print(
                f"{kind}: losses of {len(whole)} steps",
                "are those of no kill" if equal else "DIFFER from those of no kill",
            )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10))
