"""Runs cells (workload, geometry, budget, engine) and collects their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.replay.engines import ENGINES
from benchmarks.replay.geometry import GEOMETRIES
from megatron_hybrid.tools.replay.lru import Ceiling
from megatron_hybrid.tools.replay.request import Request
from megatron_hybrid.tools.replay.runner import Replay, replay

GB = 10**9


@dataclass(frozen=True)
class Cell:
    """One result."""

    workload: str
    geometry: str
    in_flight: int
    budget_gb: float | None
    """None: the engine has no limit."""
    engine: str
    parameter: float | None
    """The one that did best, of an engine that is tried with several."""
    requests: int
    prompt_tokens: int
    skipped_percent: float
    micros_median: float
    micros_p95: float
    lost_percent: dict[str, float]
    """Prompt tokens that an infinite cache skips and this engine did not, in % of all prompt
    tokens, by the engine's own reason. Empty where it gives none."""


def run_cells(
    workload: str,
    requests: Sequence[Request],
    geometry: str,
    budgets_gb: Sequence[float],
    engines: Sequence[str],
    in_flight: int,
) -> Iterator[Cell]:
    """All engines at all budgets over one workload."""
    possible = replay(requests, Ceiling(), in_flight).skipped_tokens
    total = sum(len(request.prompt) for request in requests)
    for engine in engines:
        for budget in budgets_gb if ENGINES[engine].bounded else (None,):
            best, parameter = best_of(engine, geometry, budget, requests, in_flight)
            lost = best.lost_tokens(possible)
            yield Cell(
                workload,
                geometry,
                in_flight,
                budget,
                engine,
                parameter,
                len(requests),
                total,
                round(100 * best.skipped_share, 2),
                round(best.micros(0.5), 1),
                round(best.micros(0.95), 1),
                {reason: round(100 * tokens / total, 2) for reason, tokens in lost.items()},
            )


def best_of(
    engine: str,
    geometry: str,
    budget_gb: float | None,
    requests: Sequence[Request],
    in_flight: int,
) -> tuple[Replay, float | None]:
    """The replay that skips most among the engine's candidates, and the parameter behind it."""
    candidates = ENGINES[engine].build(GEOMETRIES[geometry], (budget_gb or 0) * GB, in_flight)
    replays = {value: replay(requests, build(), in_flight) for value, build in candidates.items()}
    parameter = max(replays, key=lambda value: replays[value].skipped_share)
    return replays[parameter], parameter
