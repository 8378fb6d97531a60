"""`python -m benchmarks.replay.digests`: one line for each workload and size that tells whether any
decision of the cache has changed.

A digest covers what each request skipped, its miss reason, and all decisions of the cache in order.
A change that should change no decision prints the same lines before and after.
"""

from __future__ import annotations

import argparse
import hashlib

from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.sweep import GB
from benchmarks.replay.workloads import WORKLOADS
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.runner import replay

IN_FLIGHT = (1, 8)


def digest(requests, geometry: str, budget_gb: float, in_flight: int) -> str:
    """16 hexadecimal digits."""
    engine = Ours(GEOMETRIES[geometry].spec("exact"), budget_gb * GB)
    result = replay(requests, engine, in_flight)
    told = repr((result.skipped_tokens, result.miss_reasons, engine.cache.digest()))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay.digests", description=__doc__.splitlines()[0]
    )
    add, names = parser.add_argument, {"nargs": "+", "metavar": "NAME"}
    add(
        "--workloads",
        choices=WORKLOADS,
        default=list(WORKLOADS),
        help="Replay these workloads. The default is all.",
        **names,
    )
    add(
        "--geometry",
        choices=GEOMETRIES,
        default=["nemotron-h-8b"],
        help="Replay for these models. The default is %(default)s.",
        **names,
    )
    add(
        "--sizes",
        type=int,
        default=2,
        metavar="N",
        help="Take the first N cache sizes of each workload. The default is %(default)s.",
    )
    options = parser.parse_args(arguments)
    for name in options.workloads:
        workload = WORKLOADS[name]
        requests = list(workload.generate())
        for geometry in options.geometry:
            for budget in workload.budgets_gb[: options.sizes]:
                for in_flight in IN_FLIGHT:
                    found = digest(requests, geometry, budget, in_flight)
                    print(f"{name} {geometry} {budget:g} GB {in_flight}: {found}", flush=True)


if __name__ == "__main__":
    main()
