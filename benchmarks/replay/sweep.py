"""Runs cells (workload, geometry, budget, engine) and collects their numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.replay.engines import ENGINES
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.runner import Replay, side_by_side
from megatron_hybrid.tools.replay.protocol import Request
from megatron_hybrid.utils.tables import GB


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


def run_cells(
    workload: str,
    requests: Sequence[Request],
    geometry: str,
    budgets_gb: Sequence[float],
    engines: Sequence[str],
    in_flight: int,
) -> list[Cell]:
    """All engines at all budgets over one workload, engine by engine; those that share a budget
    run side by side."""
    total = sum(len(request.prompt) for request in requests)
    cells = []
    for budget in (None, *budgets_gb):
        compared = [name for name in engines if ENGINES[name].bounded == (budget is not None)]
        replays = best_replays(compared, geometry, budget, requests, in_flight)
        for engine, (best, parameter) in zip(compared, replays):
            cells.append(
                Cell(
                    workload,
                    geometry,
                    in_flight,
                    budget,
                    engine,
                    parameter,
                    len(requests),
                    total,
                    round(100 * best.skipped_share, 2),
                    *(np.quantile(best.seconds, (0.5, 0.95)) * 1e6).round(1).tolist(),
                )
            )
    return sorted(cells, key=lambda cell: engines.index(cell.engine))


def best_replays(
    engines: Sequence[str],
    geometry: str,
    budget_gb: float | None,
    requests: Sequence[Request],
    in_flight: int,
) -> list[tuple[Replay, float | None]]:
    """Find for each engine the replay that skips most among its candidates, and its parameter."""
    of_engine = [
        ENGINES[name].build(GEOMETRIES[geometry], (budget_gb or 0) * GB, in_flight)
        for name in engines
    ]
    built = [build() for candidates in of_engine for build in candidates.values()]
    replays = iter(side_by_side(requests, built, in_flight))
    best = []
    for candidates in of_engine:
        found = {parameter: next(replays) for parameter in candidates}
        parameter = max(found, key=lambda parameter: found[parameter].skipped_share)
        best.append((found[parameter], parameter))
    return best
