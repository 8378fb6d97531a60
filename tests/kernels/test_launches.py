"""Launches of a decode step: their number does not grow. `pytest -s` prints them by kernel."""

import pytest
from launch_counts import launches_of_a_step

GREEDY = {"top_k": 1}


@pytest.mark.parametrize(
    ("name", "batch", "sampling", "most"),
    [
        ("nemotron_h_8b", 1, GREEDY, 315),
        ("qwen3_5_4b", 8, GREEDY, 385),
        ("qwen3_5_4b", 1, {"top_k": 0}, 453),
    ],
)
def test_a_decode_step_has_no_more_launches_than_told(name, batch, sampling, most):
    counts = launches_of_a_step(name, batch, **sampling)
    print(name, batch, sampling, counts.total())
    print("   ", ", ".join(f"{what} {n}" for what, n in counts.most_common()))
    assert most - 5 < counts.total() <= most
