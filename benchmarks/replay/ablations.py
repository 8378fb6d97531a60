"""`python -m benchmarks.replay.ablations`: what each part of the policy brings.

Traces are replayed with one part after the other taken out of the cache: docs/measured/replay.md,
"What each part brings".
"""

import argparse
from collections.abc import Sequence
from itertools import product
from statistics import mean

from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.runner import replay
from benchmarks.replay.sweep import GB
from benchmarks.replay.table import header
from benchmarks.replay.workloads import WORKLOADS, add_seeds
from megatron_hybrid.cache.policy.hybrid import HybridPolicy
from megatron_hybrid.commands.arguments import whole_number
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.protocol import Request

GEOMETRY = "nemotron-h-8b"
REPLAYED = [name for name in WORKLOADS if name != "rl-group"]
"""Where memory is short: that one fits everywhere."""
BUDGETS = slice(2)
"""Of each workload's sizes; the ample one tells nothing either."""
SEEDS = (1, 2, 3)


PARTS = {
    # eviction
    "work": "candidates that take more work to recompute are worth more",
    "exclusive_kv": "a state is charged for KV that no other state needs",
    "refresh": "values are recomputed in rotation",
    "price": "a new state evicts only candidates of a lesser value, or is not saved",
    # placement
    "junctions": "states where a prompt leaves a known one",
    "lost_forks": "states saved again at forks that lost theirs",
    "tails": "states at the usual distance before the end of a prompt",
    "prompt_ends": "states at the ends of prompts",
    "intervals": "states at equal distances in long prompts and answers",
    "opportunistic": "states every 256 tokens while pages are free",
    # expected uses
    "fork_uses": "a fork that could have served counts as used",
    "resumed_from": "sessions separated by the kind of end that they resume",
    "mostly_known": "requests separated by whether most of their tokens were known",
}
"""What each part of `HybridPolicy` does, by its argument."""


def skipped_without(
    part: str | None, requests: Sequence[Request], budget_gb: float, in_flight: int
) -> float:
    """Return what the cache skips of a trace's prompt tokens without a part (None: with all), in
    %."""
    spec = GEOMETRIES[GEOMETRY].spec("exact")
    policy = HybridPolicy(spec, **({part: False} if part else {}))
    return 100 * replay(requests, Ours(spec, budget_gb * GB, policy), in_flight).skipped_share


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay.ablations", description=__doc__.splitlines()[0]
    )
    add, names = parser.add_argument, {"nargs": "+", "metavar": "NAME"}
    add(
        "--parts",
        choices=PARTS,
        default=list(PARTS),
        help="Leave out these parts, one at a time. The default is all.",
        **names,
    )
    add(
        "--workloads",
        choices=WORKLOADS,
        default=REPLAYED,
        help="Replay these workloads. The default is %(default)s.",
        **names,
    )
    add_seeds(parser, SEEDS)
    add(
        "--in-flight",
        type=whole_number,
        default=1,
        metavar="N",
        help="Run N requests at a time.",
    )
    options = parser.parse_args(arguments)
    found: dict[str | None, list[float]] = {name: [] for name in (None, *options.parts)}
    for workload in (WORKLOADS[name] for name in options.workloads):
        traces = [list(workload.generate(seed=seed)) for seed in options.seeds]
        for name, columns in found.items():
            runs = product(traces, workload.budgets_gb[BUDGETS], [options.in_flight])
            columns.append(mean(skipped_without(name, *run) for run in runs))
    print(header("without", [*options.workloads, "mean"]))
    whole = found.pop(None)
    print_row("(nothing), % skipped", whole, "")
    lost = {
        name: [left - all_in for left, all_in in zip(each, whole)] for name, each in found.items()
    }
    for name in sorted(lost, key=lambda name: mean(lost[name])):
        print_row(f"{name}: {PARTS[name]}", lost[name], "+")


def print_row(head: str, columns: Sequence[float], sign: str) -> None:
    shown = [round(column, 1) + 0.0 for column in (*columns, mean(columns))]  # no -0.0
    print(f"| {head} | {' | '.join(f'{column:{sign}.1f}' for column in shown)} |")


if __name__ == "__main__":
    main()
