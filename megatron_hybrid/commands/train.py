"""`megatron-hybrid train`."""

import argparse
from pathlib import Path

HELP = "Train a model by a recipe; a stopped run continues from its newest checkpoint."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "On 8 GPUs: torchrun --nproc-per-node 8 -m megatron_hybrid train RECIPE"
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="Train by this YAML file, or by the recipe of this name in the package.",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="Set this field of the recipe, such as run.steps=100.",
    )
    parser.add_argument(
        "--folder",
        help="Write the run to this folder. The default is the folder of the recipe's name in "
        "runs/.",
    )


def run(options: argparse.Namespace) -> int:
    from megatron_hybrid.training.run import train

    folder = options.folder or Path("runs") / Path(options.recipe).stem
    return train(options.recipe, options.overrides, Path(folder))
