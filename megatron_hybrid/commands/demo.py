"""`megatron-hybrid demo`."""

import argparse

from megatron_hybrid.commands.arguments import add_model, load

HELP = "Run the same requests in the three modes of prefix caching, and compare them."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)


def run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_hybrid.tools.demo import run_demo

    return 0 if run_demo(*load(options.model), Console()) else 1
