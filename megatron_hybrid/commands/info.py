"""`megatron-hybrid info`."""

import argparse
from textwrap import fill

HELP = "Show which libraries are installed, and which library serves each operation."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    from megatron_hybrid.tools.info import backends, environment

    served = backends()  # first: it refuses an unknown MEGATRON_HYBRID_BACKEND
    for name, value in environment().items():
        print(f"{name:20}{value}")
    print(f"\n{'op':24}served by")
    for name, value in served.items():
        print(fill(value, 80, initial_indent=f"{name:24}", subsequent_indent=" " * 24))
    return 0
