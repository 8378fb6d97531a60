"""Random runs against forward passes without any cache (tests/helpers/differential.py defines one).

Longer runs, and many more of them: tests/functional/inference/test_many_random_runs.py.
"""

import pytest
from differential import PATTERNS, RandomRun
from matrix import matrix_rows


@pytest.mark.parametrize("seed", matrix_rows(range(12), *range(2)))
def test_random_run(seed):
    RandomRun(seed, num_requests=7).run()


@pytest.mark.parametrize("pattern", matrix_rows(PATTERNS, "MG*-W-", "ME*E", "MZZ-Z", "SC*-"))
def test_requests_that_preempt_each_other(pattern):
    seed = 100 + PATTERNS.index(pattern)
    sizes = {"num_requests": 7, "longest_prompt": 40, "longest_answer": 40}
    RandomRun(seed, patterns=(pattern,), crowded=True, **sizes).run()
