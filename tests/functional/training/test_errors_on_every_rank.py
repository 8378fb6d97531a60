"""A run that cannot start ends on all ranks, with one message: none waits for another.

Two ranks try one bad run after the other, each in a folder of its own, as on two machines: what
lies in one of them alone, only its rank finds.
"""

import io
import os
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
import yaml
from megatron.core import parallel_state
from rank_processes import on_ranks
from small_recipes import SIZES, small_recipe, write_small_text

from megatron_hybrid import cli
from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.checkpoints.pretrained import DEMO_FOLDER
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.training.trainer import Trainer

pytestmark = pytest.mark.matrix

RANKS = 2
MODEL = {**SIZES, "layer_pattern": "M*-"}
CASES = {
    # Of the recipe.
    "a key that does not exist": (["run.stesp=3"], r"run has no field 'stesp': did you mean steps"),
    "tensor parallelism over more ranks": (
        ["model.tensor_model_parallel_size=4", "model.num_attention_heads=4"],
        "tensor_model_parallel_size=4.* needs a multiple of 4 processes, but there are 2",
    ),
    "rows that do not divide": (
        ["run.global_batch_size=3"],
        "global_batch_size is 3, no multiple of the 2 rows",
    ),
    "a vocabulary below the tokenizer's": (["model.vocab_size=61"], "vocab_size is 61, but 'demo'"),
    "no tensorboard": (["reports.writers=[tensorboard]"], "pip install tensorboard"),
    # Of what it names.
    "no tokenizer": (["tokenizer={shared}"], r"there is no tokenizer\.json in .*shared"),
    "no pretrained model": (["model={{pretrained: /nowhere}}"], r"/nowhere/config\.json"),
    "a folder that cannot be written": (["--folder", "{shared}/text.bin/run"], "cannot be written"),
    "a recipe.yaml that cannot be written": (["--folder", "{shared}/blocked"], "recipe.yaml"),
    # Of the run's checkpoint.
    "a checkpoint of another model": (
        ["--folder", "{shared}/trained", "model.hidden_size=48"],
        r"iter_0000002 was saved with .*model.hidden_size",
    ),
    "a checkpoint of other data": (
        ["--folder", "{shared}/trained", "data.seed=9"],
        "iter_0000002 was saved with data.seed=1234, the recipe has 9",
    ),
    "a checkpoint of another optimizer": (
        ["--folder", "{shared}/trained", "optimizer.distributed=true"],
        "iter_0000002 was saved with optimizer.distributed=False, the recipe has True",
    ),
    "a checkpoint of no adapters": (
        ["--folder", "{shared}/trained", "model={{pretrained: {shared}/model}}", "lora.rank=4"],
        "iter_0000002 was saved with lora.rank=None, the recipe has 4: .*of model.pretrained",
    ),
    # Of one machine.
    "a recipe that the first machine lacks": (["second.yaml"], "second.yaml cannot be read"),
    "a tokenizer that one machine lacks": (["tokenizer=mine"], r"no tokenizer\.json in mine"),
    "documents that one machine lacks": (["data.train=[mine/text]"], r"text\.idx does not exist"),
    "a config that one machine lacks": (["model={{pretrained: mine}}"], r"mine/config\.json"),
    "weights that one machine lacks": (
        ["model={{pretrained: half}}"],
        r"half/model\.safetensors does not exist",
    ),
    "a folder that is not shared": (["--folder", "run"], "another one than that of the first rank"),
}
"""name: (arguments, message)."""


def attempt(arguments: list[str], shared: Path) -> tuple[int, str]:
    """The status of a run, and what it says on stderr."""
    parallel_state.destroy_model_parallel()
    out, err = io.StringIO(), io.StringIO()
    filled = [argument.format(shared=shared) for argument in arguments]
    if not filled or not filled[0].endswith(".yaml"):
        filled = ["recipe.yaml", *filled]
    if "--folder" not in filled:
        filled += ["--folder", str(shared / "new")]
    with redirect_stdout(out), redirect_stderr(err):
        status = cli.main(["train", *filled])
    return status, err.getvalue()


def attempt_all(shared: Path, machines: list[Path]) -> dict[str, tuple]:
    """A rank's outcomes by name. A rank that waits for ever is an error of the other ones after two
    minutes."""
    rank = torch.distributed.get_rank()
    os.chdir(machines[rank])
    steps = []

    def step(trainer, data):
        steps.append(trainer.progress.step)
        return whole(trainer, data)

    whole, Trainer.step = Trainer.step, step
    found = {"trains": attempt(["--folder", "{shared}/trained"], shared)}
    assert len(steps) == 2
    if rank == 0:
        sys.modules["torch.utils.tensorboard"] = None
    for name, (arguments, _) in CASES.items():
        found[name] = attempt(arguments, shared)
    assert len(steps) == 2, "a bad run has made a step"
    found["export"] = attempt(["--folder", "{shared}/full"], shared)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of all ranks."""
    shared = tmp_path_factory.mktemp("shared")
    machines = [tmp_path_factory.mktemp(f"machine_{rank}") for rank in range(RANKS)]
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    write_small_text(shared / "text")
    (shared / "blocked" / "recipe.yaml").mkdir(parents=True)
    (shared / "full").mkdir()
    (shared / "full" / "exported").touch()
    data, run = {"sequence_length": 32, "train": [str(shared / "text")]}, {"steps": 2}
    recipe = small_recipe(model=MODEL, data=data, run={**run, "global_batch_size": 2}).to_dict()
    model = build_hybrid_model(HybridConfig(**MODEL, vocab_size=tokenizer.vocab_size))
    save_checkpoint(model, shared / "model")
    for rank, machine in enumerate(machines):
        name = "recipe.yaml" if rank == 0 else "second.yaml"
        (machine / name).write_text(yaml.safe_dump(recipe))
        (machine / "mine").mkdir()
        save_checkpoint(model, machine / "half")
    tokenizer.save(machines[0] / "mine")
    save_checkpoint(model, machines[0] / "mine")
    write_small_text(machines[0] / "mine" / "text")
    (machines[1] / "half" / "model.safetensors").unlink()
    return on_ranks(attempt_all, RANKS, shared, shared, machines)


def messages(outcomes, name):
    """What each rank says, without the rank that found it."""
    texts = []
    for found in outcomes:
        status, text = found[name]
        lines = [line for line in text.splitlines() if not line.startswith("step ")]
        assert status == 2 and len(lines) == 1, text
        texts.append(re.sub(r"^megatron-hybrid: (rank \d on \S+: )?", "", lines[0]))
    return texts


def test_the_ranks_train_what_is_no_error(outcomes):
    assert [found["trains"][0] for found in outcomes] == [0] * RANKS


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_end_before_the_first_step_with_the_same_message(outcomes, name):
    first, *others = messages(outcomes, name)
    assert re.search(CASES[name][1], first), first
    assert others == [first] * (RANKS - 1)


def test_all_ranks_end_where_the_model_cannot_be_exported(outcomes):
    first, *others = messages(outcomes, "export")
    assert "cannot write a checkpoint to" in first and others == [first] * (RANKS - 1)
