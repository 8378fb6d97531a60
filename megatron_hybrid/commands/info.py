"""`megatron-hybrid info`."""

import argparse

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
        print(f"{name:24}{value}")
    return 0
