"""Many random runs of the engine against forward passes without any cache: see differential.py.

A failing run is repeated by its number: `RandomRun(seed, ...).run()`.
"""

from collections import Counter

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


def each_of(kept: range, seeds: range) -> pytest.MarkDecorator:
    """Seeds for a test: a few in `make test`, all of them, twenty at a time, in the matrix."""
    groups = [seeds[start : start + 20] for start in range(0, len(seeds), 20)]
    return pytest.mark.parametrize("seeds", matrix_rows([kept, *groups], kept), ids=str)


@each_of(range(1001, 1002), range(1000, 1080))
def test_mixed_runs(seeds):
    totals = run_all(seeds)
    assert totals["skipped_tokens"] > 0


@each_of(range(2003, 2004), range(2000, 2060))
def test_crowded_runs(seeds):
    totals = run_all(seeds, longest_prompt=60, longest_answer=80, crowded=True)
    assert totals["preemptions"] > len(seeds)
    assert totals["checkpoints_evicted"] > len(seeds)


@each_of(range(3004, 3005), range(3000, 3020))
def test_long_prompts(seeds):
    totals = run_all(seeds, longest_prompt=700, longest_answer=30)
    assert totals["skipped_tokens"] > 500 * len(seeds)


@each_of(range(4006, 4008), range(4000, 4020))
def test_runs_with_tiers(seeds):
    totals = run_all(seeds, tiers=True)
    assert totals["fetched_tokens"] > 30 * len(seeds)
    assert totals["host_records_evicted"] and totals["disk_kv_blocks"]
    assert not totals["fetches_failed"]


@each_of(range(5001, 5003), range(5000, 5060))
def test_runs_launched_ahead(seeds):
    """Also crowded, and with tiers."""
    totals = run_all(seeds, longest_prompt=60, ahead=True)
    totals += run_all(seeds[:-1], longest_prompt=60, ahead=True, crowded=True, num_requests=6)
    totals += run_all(seeds[-1:], longest_prompt=60, ahead=True, tiers=True, num_requests=6)
    assert totals["steps_ahead"] > 20 * len(seeds)
