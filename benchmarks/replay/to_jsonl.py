"""`python -m benchmarks.replay.to_jsonl WORKLOAD`: the requests of a workload as JSON lines, for
`megatron-hybrid profile`."""

import argparse
import json
import sys

from benchmarks.replay.workloads import WORKLOADS
from megatron_hybrid.commands.arguments import whole_number
from megatron_hybrid.tools.replay.protocol import Request


def to_line(request: Request) -> str:
    """The JSON object of a request, as `megatron_hybrid.tools.replay.jsonl` reads it."""
    return json.dumps(
        {
            "tokens": request.prompt.tolist(),
            "output": request.output.tolist(),
            "session": request.session,
            "turn": request.turn,
            "arrival": round(request.arrival, 3),
        }
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay.to_jsonl", description=__doc__.splitlines()[0]
    )
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument(
        "--limit",
        type=whole_number,
        default=100,
        help="Write the first requests, of this number. The default is %(default)s.",
    )
    options = parser.parse_args(arguments)
    for request in WORKLOADS[options.workload].generate(limit=options.limit):
        sys.stdout.write(to_line(request) + "\n")


if __name__ == "__main__":
    main()
