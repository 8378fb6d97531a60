"""Many random runs of the engine against forward passes without any cache: see differential.py.

A failing run is repeated by its number: `RandomRun(seed, ...).run()`.
"""

from collections import Counter
from itertools import accumulate, pairwise

import pytest
from differential import RandomRun
from matrix import matrix_rows


def run_all(seeds: range, **sizes) -> Counter[str]:
    """One run of each seed; returns the sums of their counters."""
    totals: Counter[str] = Counter()
    for seed in seeds:
        run = RandomRun(seed, **sizes)
        try:
            run.run()
        except Exception as error:
            raise AssertionError(
                f"RandomRun({seed}, **{sizes}), {run.pattern} with {run.fields}: {error}"
            ) from error
        totals.update(run.stats)
    return totals


def each_of(first_seed: int, *runs: int) -> pytest.MarkDecorator:
    """Seeds for a test, as many in each row. `make test` runs the first row."""
    ends = list(accumulate(runs, initial=first_seed))
    seeds = [range(start, end) for start, end in pairwise(ends)]
    return pytest.mark.parametrize(
        "seeds", matrix_rows(seeds, seeds[0]), ids=lambda s: str(s.start)
    )


@each_of(1000, 8, 12, 20, 20, 20)
def test_mixed_runs(seeds):
    totals = run_all(seeds)
    assert totals["skipped_tokens"] > 0


@each_of(2000, 5, 15, 20, 20)
def test_crowded_runs(seeds):
    totals = run_all(seeds, longest_prompt=60, longest_answer=80, crowded=True)
    assert totals["preemptions"] > len(seeds)
    assert totals["checkpoints_evicted"] > len(seeds)


@each_of(3000, 4, 16)
def test_long_prompts(seeds):
    totals = run_all(seeds, longest_prompt=700, longest_answer=30)
    assert totals["skipped_tokens"] > 500 * len(seeds)


@each_of(4000, 6, 14)
def test_runs_with_tiers(seeds):
    totals = run_all(seeds, tiers=True)
    assert totals["fetched_tokens"] > 100
    assert totals["host_records_evicted"] and totals["disk_kv_blocks"]
    assert not totals["fetches_failed"]
