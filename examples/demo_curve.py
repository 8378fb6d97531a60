"""Train the demo model's first steps, and compare their loss with docs/guides/demo_training.md.

    torchrun --nproc-per-node 2 examples/demo_curve.py

It needs the datasets that the recipe `demo` names; `make demo-curve` makes them first. A run that
was stopped goes on.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import megatron_hybrid as mh  # isort: skip  (before megatron.core, which warns if it is first)
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_hybrid.training.recipe import Recipe
from megatron_hybrid.training.trainer import Trainer, training_device

DOCUMENT = Path(__file__).parents[1] / "docs" / "guides" / "demo_training.md"
TOLERANCE = 0.03


@torch.no_grad()
def held_out_loss(model: mh.HybridModel, prefix: str) -> float:
    """Mean loss of a token in nats, each document of a dataset read whole, in one sequence."""
    documents = IndexedDataset(prefix)
    sums = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for index in range(dist.get_rank(), len(documents), dist.get_world_size()):
        tokens = torch.tensor(documents[index].astype("int64"))[None]
        losses = model(tokens[:, :-1], labels=tokens[:, 1:].contiguous())
        sums += torch.tensor([losses.sum(dtype=torch.float64), losses.numel()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def documented_loss(step: int) -> float:
    """The held-out loss at a step, from the table in docs/guides/demo_training.md."""
    row = re.search(rf"^\| {step:,} \|[^|]*\|[^|]*\| ([\d.]+) \|", DOCUMENT.read_text(), re.M)
    if row is None:
        raise SystemExit(f"the table in {DOCUMENT} has no step {step:,}")
    return float(row[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--step", type=int, default=200, help="Compare the loss at this step of the table."
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/demo_curve"), help="Write the run to this folder."
    )
    options = parser.parse_args()
    expected = documented_loss(options.step)
    recipe = Recipe.load("demo", [f"run.stop_at_step={options.step}"])
    with training_device() as device:
        trainer = Trainer(recipe, options.folder, device)
        trainer.train()
        loss = held_out_loss(trainer.model, recipe.data.valid[0])
        if dist.get_rank() == 0:
            print(
                f"held-out loss at step {trainer.progress.step}: {loss:.3f}, "
                f"in docs/guides/demo_training.md {expected:.3f}"
            )
    if trainer.progress.step != options.step:
        raise SystemExit(f"{options.folder} is at step {trainer.progress.step}: name another one")
    if not abs(loss - expected) <= TOLERANCE:
        raise SystemExit(f"they differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
