"""`python -m benchmarks.replay.agents`: what bounds an online policy for the workload "agent".

An idealised cache that serves this workload alone, told more than any policy can learn, beside
ours: docs/measured/replay.md, "What bounds an online policy".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp
from statistics import mean

import numpy as np

from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.sweep import GB, skipped_by
from benchmarks.replay.table import header
from benchmarks.replay.workloads import AGENT_PAUSE, AGENT_STEPS, add_seeds, agent
from megatron_hybrid.cache.index.tree import common_prefix
from megatron_hybrid.tools.replay.request import Request

GEOMETRY = GEOMETRIES["nemotron-h-8b"]
ENCODINGS = ("exact", "int8")
BUDGETS_GB = (4, 16)
SEEDS = (5, 1, 2, 3, 4, 6)
"""The first is the workload's own."""


@dataclass(frozen=True)
class Step:
    """A request of an agent, as the idealised cache sees it. Lengths in tokens."""

    agent: int | str
    number: int
    """From 1 on."""
    last: bool
    tools: bytes
    """Tells one tool prompt from another."""
    tools_length: int
    prompt_length: int
    whole_length: int
    """With the answer."""
    arrival: float

    @property
    def own_length(self) -> int:
        """Behind the tool prompt."""
        return self.whole_length - self.tools_length


ComesBack = Callable[[Step, float], float]
"""The probability that an agent comes back, from its last step and the seconds since."""


def told_the_means(step: Step, away: float) -> float:
    """By the mean pause and the mean number of steps."""
    return still_runs(1 - 1 / mean(AGENT_STEPS), away)


def told_the_law(step: Step, away: float) -> float:
    """By all that the past says, for one who knows how the trace was drawn."""
    possible = AGENT_STEPS.stop - max(AGENT_STEPS.start, step.number)
    ends_here = step.number in AGENT_STEPS
    return still_runs(1 - ends_here / possible, away)


def told_the_end(step: Step, away: float) -> float:
    """For one who is told which agents have ended."""
    return 0.0 if step.last else 1.0


def still_runs(goes_on: float, away: float) -> float:
    """That an agent which goes on with this probability still does, after so many seconds."""
    silent = goes_on * exp(-away / AGENT_PAUSE)
    return silent / (1 - goes_on + silent) if silent else 0.0


TOLD: dict[str, ComesBack] = {
    "the mean pause and the mean number of steps": told_the_means,
    "how both are drawn": told_the_law,
    "which agents have ended": told_the_end,
}


def steps_of(requests: Sequence[Request]) -> Iterator[Step]:
    """The steps of a trace. A tool prompt is what the agents that start alike have in common."""
    shared: dict[bytes, np.ndarray] = {}
    final_turn: dict[int | str, int] = {}
    for request in requests:
        if request.turn == 0:
            known = shared.setdefault(tools_of(request), request.prompt)
            shared[tools_of(request)] = known[: common_prefix(known, request.prompt)]
        final_turn[request.session] = request.turn
    for request in requests:
        tools, length = tools_of(request), len(request.prompt)
        yield Step(
            request.session,
            request.turn + 1,
            request.turn == final_turn[request.session],
            tools,
            len(shared[tools]),
            length,
            length + len(request.output),
            request.arrival,
        )


def tools_of(request: Request) -> bytes:
    return request.prompt[:100].tobytes()


def skipped_percent(
    steps: Sequence[Step], budget: float, state_cost: float, comes_back: ComesBack
) -> float:
    """Prompt tokens that the idealised cache skips, in % of all.

    It holds whole agents and, for good, tool prompts, each with one state at its end, and nothing
    else. What goes first, and whether a step's own state comes in, is a matter of one value: the
    probability that the agent comes back, times the tokens that its state saves, by what it costs.
    Of what is to go, what fits all the same stays, the most valuable first.

    Args:
        budget, state_cost: in tokens of KV.
        comes_back: what it is told.
    """
    kept: dict[int | str, Step] = {}
    tools: set[bytes] = set()
    used = skipped = 0.0

    def value(step: Step, now: float) -> float:
        per_cost = step.own_length / (step.own_length + state_cost)
        return comes_back(step, now - step.arrival) * per_cost

    for step in steps:
        now = step.arrival
        if step.tools in tools:
            skipped += step.tools_length
        else:
            tools.add(step.tools)
            used += step.tools_length + state_cost
        if (before := kept.pop(step.agent, None)) is not None:
            skipped += before.own_length
            used -= before.own_length + state_cost
        used += step.own_length  # it runs now, so this has to fit; its state competes
        going = []
        for other in sorted(kept.values(), key=lambda other: value(other, now)):
            is_worth_more = value(other, now) >= value(step, now)
            if used + state_cost <= budget or (used <= budget and is_worth_more):
                break
            going.append(kept.pop(other.agent))
            used -= other.own_length + state_cost
        comes_in = used + state_cost <= budget
        if comes_in:
            kept[step.agent] = step
            used += state_cost
        for other in reversed(going):
            if used + other.own_length + state_cost <= budget:
                kept[other.agent] = other
                used += other.own_length + state_cost
        if not comes_in:
            used -= step.own_length
    return 100 * skipped / sum(step.prompt_length for step in steps)


def idealised(requests: Sequence[Request], budget_gb: float, encoding: str, told: str) -> float:
    """`skipped_percent` of a trace, with the sizes of `GEOMETRY`."""
    token = GEOMETRY.kv_bytes_per_token
    costs = budget_gb * GB / token, GEOMETRY.state_bytes(encoding) / token
    return skipped_percent(list(steps_of(requests)), *costs, TOLD[told])


def engine(requests: Sequence[Request], budget_gb: float, encoding: str, name: str) -> float:
    """What one of the replay's engines skips, in %."""
    name = name if encoding == "exact" else f"{name}-{encoding}"
    return skipped_by(name, GEOMETRY.name, budget_gb, requests)


ROWS = {
    "nothing (ours)": (engine, "ours"),
    **{told: (idealised, told) for told in TOLD},
    "the whole trace (clairvoyant)": (engine, "clairvoyant"),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay.agents", description=__doc__.splitlines()[0]
    )
    add_seeds(parser, SEEDS)
    seeds = parser.parse_args(arguments).seeds
    traces = [list(agent(seed=seed)) for seed in seeds]
    heads = [f"{b} GB, {of}" for b in BUDGETS_GB for of in (f"seed {seeds[0]}", "mean of all")]
    print(header("told", heads))
    for row, (run, name) in ROWS.items():
        columns = [row]
        for budget in BUDGETS_GB:
            found = [[run(trace, budget, e, name) for trace in traces] for e in ENCODINGS]
            columns.append(" / ".join(f"{each[0]:.1f}" for each in found))
            columns.append(" / ".join(f"{mean(each):.1f}" for each in found))
        print(f"| {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
