"""`megatron-hybrid grafana`."""

import argparse

HELP = "Print a Grafana dashboard over the metrics of a server, as JSON."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    import json

    from megatron_hybrid.tools.grafana import dashboard

    print(json.dumps(dashboard(), indent=2))
    return 0
