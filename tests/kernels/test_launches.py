"""Launches of a decode step: their number does not grow. `pytest -s` prints them by kernel."""

import pytest
from launch_counts import launches_of_a_step, launches_of_a_suffix

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


@pytest.mark.parametrize(
    ("name", "launched", "in_pieces"), [("nemotron_h_8b", 498, 360), ("qwen3_5_4b", 616, 396)]
)
def test_a_suffix_has_no_more_launches_than_told(name, launched, in_pieces):
    """Of 256 tokens: a piece, an op over sequences and a copy, which is all of an attention layer;
    ops of recurrent layers are up to nine kernels."""
    for most, on in ((launched, False), (in_pieces, True)):
        counts = launches_of_a_suffix(name, 256, on)
        print(name, counts.total())
        print("   ", ", ".join(f"{what} {n}" for what, n in counts.most_common()))
        assert most - 5 < counts.total() <= most
