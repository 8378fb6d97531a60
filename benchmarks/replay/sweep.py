"""Runs cells (workload, geometry, budget, engine) and measures cliffs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.replay.engines import ENGINES
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.runner import replay, side_by_side
from benchmarks.replay.workloads import draw_tokens
from megatron_hybrid.tools.replay.protocol import Request
from megatron_hybrid.utils.tables import GB

CLIFF_BUDGET_BYTES = 64e9
"""Nothing is evicted."""
SUFFIX_TOKENS = 64
ANSWER_TOKENS = 32


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
        of_engine = [
            ENGINES[name].build(GEOMETRIES[geometry], (budget or 0) * GB, in_flight)
            for name in compared
        ]
        built = [build() for candidates in of_engine for build in candidates.values()]
        replays = iter(side_by_side(requests, built, in_flight))
        for engine, candidates in zip(compared, of_engine):
            found = {parameter: next(replays) for parameter in candidates}
            parameter = max(found, key=lambda parameter: found[parameter].skipped_share)
            best = found[parameter]
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


@dataclass(frozen=True)
class Cliff:
    """Tokens that one engine computes again, by length: coarse blocks make a cliff."""

    geometry: str
    engine: str
    lengths: list[int]
    repeated: list[int]
    """The same prompt of that length a second time: tokens computed."""
    forked: list[int]
    """A second prompt that shares that many tokens and goes on differently: how many of the shared
    ones are computed."""


def measure_cliff(geometry: str, engine: str, lengths: Sequence[int], seed: int = 0) -> Cliff:
    """Every length by itself, in a cache that is empty before."""
    build = next(iter(ENGINES[engine].build(GEOMETRIES[geometry], CLIFF_BUDGET_BYTES, 1).values()))
    rng = np.random.default_rng(seed)
    repeated, forked = [], []
    for length in lengths:
        prompt = draw_tokens(rng, length)
        repeated.append(length - _second(build(), [prompt, prompt], rng))
        forks = [np.concatenate([prompt, draw_tokens(rng, SUFFIX_TOKENS)]) for _ in range(2)]
        forked.append(max(0, length - _second(build(), forks, rng)))
    return Cliff(geometry, engine, list(lengths), repeated, forked)


def _second(engine, prompts: list[np.ndarray], rng: np.random.Generator) -> int:
    """Tokens of the last prompt that were skipped."""
    requests = [
        Request(prompt, draw_tokens(rng, ANSWER_TOKENS), i, 0, float(i))
        for i, prompt in enumerate(prompts)
    ]
    return replay(requests, engine).skipped_tokens[-1]
