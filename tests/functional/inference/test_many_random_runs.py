"""Many random runs of the engine against forward passes without any cache: see differential.py.

A failing run is repeated by its number: `RandomRun(seed, ...).run()`.
"""

from collections import Counter

import pytest
from differential import RandomRun

RUNS = 20  # in one test


def run_all(first_seed: int, **sizes) -> Counter[str]:
    """Runs seeds first_seed .. first_seed + RUNS; returns the sums of their counters."""
    totals: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + RUNS):
        run = RandomRun(seed, **sizes)
        try:
            run.run()
        except Exception as error:
            raise AssertionError(
                f"RandomRun({seed}, **{sizes}), {run.pattern} with {run.fields}: {error}"
            ) from error
        totals.update(run.stats)
    return totals


@pytest.mark.parametrize("first_seed", range(1000, 1000 + 4 * RUNS, RUNS))
def test_mixed_runs(first_seed):
    totals = run_all(first_seed)
    assert totals["skipped_tokens"] > 0


@pytest.mark.parametrize("first_seed", range(2000, 2000 + 3 * RUNS, RUNS))
def test_crowded_runs(first_seed):
    totals = run_all(first_seed, longest_prompt=60, longest_answer=80, crowded=True)
    assert totals["preemptions"] > RUNS
    assert totals["checkpoints_evicted"] > RUNS


@pytest.mark.parametrize("first_seed", range(3000, 3000 + RUNS, RUNS))
def test_long_prompts(first_seed):
    totals = run_all(first_seed, longest_prompt=700, longest_answer=30)
    assert totals["skipped_tokens"] > 10_000


@pytest.mark.parametrize("first_seed", range(4000, 4000 + RUNS, RUNS))
def test_runs_with_tiers(first_seed):
    totals = run_all(first_seed, tiers=True)
    assert totals["fetched_tokens"] > 100
    assert totals["host_records_evicted"] and totals["disk_kv_blocks"]
    assert not totals["fetches_failed"]
