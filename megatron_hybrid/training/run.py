"""`megatron-hybrid train`: a recipe from its file to an exported model."""

import os
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import torch.distributed as dist
import yaml

from megatron_hybrid.distributed.ranks import fail_together
from megatron_hybrid.training.recipe import Recipe
from megatron_hybrid.training.reports import plot_losses
from megatron_hybrid.training.trainer import Trainer, TrainingError, training_device
from megatron_hybrid.utils.core_errors import core_refusals
from megatron_hybrid.utils.files import replace_file

EXPORTED = "exported"


def train(source: str | Path, overrides: Iterable[str], folder: Path) -> int:
    """Train by a recipe in `folder`, on every rank. After the last step the model is exported to
    the folder `exported`, for `load_pretrained`, and the losses are plotted if matplotlib is there.

    Returns:
        The exit status: 0; 1 if the run cannot go on, which all ranks report; 3 if it was stopped
        before its last step; 130 if it was interrupted in a step.

    Raises:
        ValueError: the recipe, or a file that it names, does not fit; on all ranks.
        OSError: the folder cannot be written; on all ranks.
    """
    try:
        with core_refusals("this run"), training_device() as device:
            recipe = _recipe_of_all(source, overrides)
            with closing(Trainer(recipe, folder, device)) as trainer:
                return _run(trainer, recipe, folder)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(
                "megatron-hybrid: interrupted; run it again to go on from its last checkpoint",
                file=sys.stderr,
            )
        return 130


def _run(trainer: Trainer, recipe: Recipe, folder: Path) -> int:
    is_first = dist.get_rank() == 0
    with fail_together(OSError, whole_job=True):
        if is_first:
            text = yaml.safe_dump(recipe.to_dict(), sort_keys=False)
            replace_file(folder / "recipe.yaml", lambda path: path.write_text(text))
    try:
        trainer.train()
    except TrainingError as error:
        print(f"megatron-hybrid: {error}", file=sys.stderr)
        return 1
    if trainer.progress.step < recipe.run.steps:
        if is_first:
            print(
                f"stopped and saved after step {trainer.progress.step} of {recipe.run.steps}; "
                "run it again to go on"
            )
        return 3
    trainer.export(folder / EXPORTED)
    if is_first:
        print(f"the model is in {folder / EXPORTED}")
        try:
            plot_losses(folder, folder / "losses.png")
        except ImportError:
            print("no plot of the losses without matplotlib: pip install matplotlib")
    return 0


def _recipe_of_all(source: str | Path, overrides: Iterable[str]) -> Recipe:
    """Return the first rank's recipe: others may lack the file, or have another one."""
    found: list[Recipe | None] = [None]
    with fail_together(ValueError, whole_job=True):
        if dist.get_rank() == 0:
            found = [Recipe.load(source, overrides)]
    dist.broadcast_object_list(found, src=0)
    return found[0]
