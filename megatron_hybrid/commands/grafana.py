"""`megatron-hybrid grafana`."""

import argparse

HELP = "Print a Grafana dashboard of a server's metrics, as JSON."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    import json

    from megatron_hybrid.tools.grafana import dashboard

    print(json.dumps(dashboard(), indent=2))
    return 0
