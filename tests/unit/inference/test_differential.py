"""Random runs against forward passes without any cache (tests/helpers/differential.py defines one).

Longer runs, and many more of them: tests/functional/inference/test_many_random_runs.py.
"""

import pytest
from differential import PATTERNS, RandomRun


@pytest.mark.parametrize("seed", range(12))
def test_random_run(seed):
    RandomRun(seed, num_requests=7).run()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_requests_that_preempt_each_other(pattern):
    seed = 100 + PATTERNS.index(pattern)
    sizes = {"num_requests": 7, "longest_prompt": 40, "longest_answer": 40}
    RandomRun(seed, patterns=(pattern,), crowded=True, **sizes).run()
