"""`python -m benchmarks.replay.ablations`: what each part of the policy brings.

Traces are replayed with one part after the other taken out of the cache: docs/replay.md, "What each
part brings".
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Any
from unittest.mock import patch

from benchmarks.replay.__main__ import whole_number
from benchmarks.replay.sweep import skipped_by
from benchmarks.replay.table import header
from benchmarks.replay.workloads import WORKLOADS
from megatron_hybrid.cache.index.tree import Kind
from megatron_hybrid.cache.policy import placement, reuse

GEOMETRY = "nemotron-h-8b"
REPLAYED = [name for name in WORKLOADS if name != "rl-group"]
"""Where memory is short: that one fits everywhere."""
BUDGETS = slice(2)
"""Of each workload's sizes; the ample one tells nothing either."""
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Part:
    """What can be taken out."""

    what: str
    without: Mapping[str, Any]
    """By name below megatron_hybrid.cache, what stands there when it is out."""


def constant(value: Any) -> Callable[..., Any]:
    """A function that takes anything and returns this."""
    return lambda *_, **__: value


def positions_but(*kinds: Kind) -> Callable[..., dict[int, Kind]]:
    """`prefill_positions` without those of some kinds."""

    def positions(*arguments) -> dict[int, Kind]:
        found = placement.prefill_positions(*arguments)
        return {position: kind for position, kind in found.items() if kind not in kinds}

    return positions


def room_at_any_price(cache, *_) -> bool:
    """`PrefixCache._make_room_for_state` that drops whatever is worth least, be it worth more."""
    return cache._evictor.make_room_for(cache.spec.checkpoint_pages, math.inf)


def no_fork_again(*arguments, observe=reuse.ReuseModel.observe) -> tuple[int, int]:
    """`ReuseModel.observe` that asks for no lost state at a fork."""
    return observe(*arguments)[0], 0


def class_of_once(checkpoint, covered, class_of=reuse.class_of) -> int:
    """`class_of` for which used repeatedly is used once."""
    uses, checkpoint.uses = checkpoint.uses, min(checkpoint.uses, 1)
    try:
        return class_of(checkpoint, covered)
    finally:
        checkpoint.uses = uses


def class_uncovered(checkpoint, covered, class_of=reuse.class_of) -> int:
    """`class_of` that does not tell whether a deeper state is stored beneath."""
    return class_of(checkpoint, False)


def told_of(what: Callable[[int], int]) -> Callable[[int, int, bool], int]:
    """`_new_class` that is told only this much of `Lease.turn`."""
    new_class = reuse._new_class
    return lambda kind, turn, covered: new_class(kind, what(turn), covered)


PARTS = {
    # eviction
    "work": Part(
        "what takes longer to compute again is worth more",
        {"pages.spec.CacheSpec.work": constant(1.0)},
    ),
    "KV that goes along": Part(
        "a state is charged for the KV that leads to it alone",
        {"eviction.kv_pages": constant(0), "prefix_cache.kv_pages": constant(0)},
    ),
    "KV in use": Part(
        "a state is not charged for KV that a running request holds",
        {"eviction.kv_is_held": constant(False)},
    ),
    "upkeep": Part(
        "values are computed anew in rotation", {"eviction.Evictor.refresh": constant(None)}
    ),
    "price": Part(
        "a new state takes the place of what is worth less, or is not saved",
        {"prefix_cache.PrefixCache._make_room_for_state": room_at_any_price},
    ),
    "replacing": Part(
        "or takes the place of the state below it",
        {"prefix_cache.rebuild_work": constant(math.inf)},
    ),
    "own uses": Part(
        "uses in which that one only stood in for it do not count",
        {
            "prefix_cache.own_rate": lambda checkpoint, deeper, model: model.rate(
                checkpoint, covered=True
            )
        },
    ),
    "same forward": Part(
        "what a forward saves further up counts as there",
        {"prefix_cache.PrefixCache._saved_before": constant(0)},
    ),
    # placement
    "junctions": Part(
        "states where a prompt leaves a known one",
        {"prefix_cache.prefill_positions": positions_but(Kind.JUNCTION)},
    ),
    "lost forks": Part(
        "states saved again at forks that lost theirs",
        {"policy.reuse.ReuseModel.observe": no_fork_again},
    ),
    "tails": Part(
        "states as far before the end of a prompt as successors leave it",
        {"prefix_cache.tail_position": lambda prompt_tokens, *_: prompt_tokens},
    ),
    "prompt ends": Part(
        "states at the ends of prompts",
        {"prefix_cache.prefill_positions": positions_but(Kind.PROMPT_END)},
    ),
    "rungs": Part(
        "states at a distance in long prompts and answers",
        {"prefix_cache.rung_distance": constant(placement.NO_RUNG)},
    ),
    # likelihood of reuse
    "known tokens": Part(
        "tokens stay known when their KV goes",
        {"prefix_cache.MIN_KNOWN_TOKENS": 0, "prefix_cache.KNOWN_TOKENS": 0.0},
    ),
    "uses of forks": Part(
        "a fork that could have served counts as used",
        {"index.tree.Checkpoint.is_fork": constant(False)},
    ),
    "own gap": Part(
        "what was used repeatedly is judged by its own mean gap",
        {"policy.reuse.class_of": class_of_once, "policy.reuse.time_scale": constant(1.0)},
    ),
    "passed": Part(
        "states told apart by whether requests went past them",
        {"policy.reuse.ReuseModel.passed": constant(None)},
    ),
    "covered": Part(
        "states told apart by whether a deeper one is stored",
        {"policy.reuse.class_of": class_uncovered},
    ),
    "turns": Part(
        "sessions told apart by turns, and by what they went on from",
        {"policy.reuse._new_class": told_of(lambda turn: turn if turn < 2 else 0)},
    ),
    "went on from": Part(
        "sessions told apart by what they went on from",
        {"policy.reuse._new_class": told_of(lambda turn: turn if turn < 2 else turn & ~1)},
    ),
    "found more": Part(
        "requests told apart by whether they found more than they brought",
        {"policy.reuse._new_class": told_of(lambda turn: turn if turn > 1 else 0)},
    ),
    "turns' own waits": Part(
        "a turn's own waits beside those of all turns", {"policy.sessions._OWN_WEIGHT": 1e9}
    ),
    "best moment": Part(
        "the best moment to give up (Gittins), not the hazard now",
        {"policy.reuse.best_rates": lambda hazard_CA: hazard_CA},
    ),
    "fading": Part("what was seen long ago counts less", {"policy.reuse._MEMORY": 10**9}),
}


@contextmanager
def taken_out(name: str | None) -> Iterator[None]:
    """The cache without this part; None: whole."""
    with ExitStack() as stack:
        for target, stand_in in PARTS[name].without.items() if name else ():
            stack.enter_context(patch(f"megatron_hybrid.cache.{target}", stand_in))
        yield


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay.ablations", description=__doc__.splitlines()[0]
    )
    add, names = parser.add_argument, {"nargs": "+", "metavar": "NAME"}
    add("--parts", choices=PARTS, default=list(PARTS), help="default: all", **names)
    add("--workloads", choices=WORKLOADS, default=REPLAYED, help="default: %(default)s", **names)
    add("--seeds", nargs="+", type=int, default=SEEDS, metavar="N", help="default: %(default)s")
    add(
        "--in-flight",
        type=whole_number,
        default=1,
        metavar="N",
        help="requests that run side by side",
    )
    options = parser.parse_args(arguments)
    found: dict[str | None, list[float]] = {name: [] for name in (None, *options.parts)}
    for workload in (WORKLOADS[name] for name in options.workloads):
        traces = [list(workload.generate(seed=seed)) for seed in options.seeds]
        for name, columns in found.items():
            runs = product(workload.budgets_gb[BUDGETS], traces, [options.in_flight])
            with taken_out(name):
                columns.append(mean(skipped_by("ours", GEOMETRY, *run) for run in runs))
    print(header("without", [*options.workloads, "mean"]))
    whole = found.pop(None)
    print_row("(nothing), % skipped", whole, "")
    lost = {
        name: [left - all_in for left, all_in in zip(each, whole)] for name, each in found.items()
    }
    for name in sorted(lost, key=lambda name: mean(lost[name])):
        print_row(f"{name}: {PARTS[name].what}", lost[name], "+")


def print_row(head: str, columns: Sequence[float], sign: str) -> None:
    shown = [round(column, 1) + 0.0 for column in (*columns, mean(columns))]  # no -0.0
    print(f"| {head} | {' | '.join(f'{column:{sign}.1f}' for column in shown)} |")


if __name__ == "__main__":
    main()
