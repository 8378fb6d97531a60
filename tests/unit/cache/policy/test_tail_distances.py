"""TailDistances: the shares that it reports, and how fast it forgets."""

import numpy as np
import pytest

from megatron_hybrid.cache.policy.reuse import WINDOW, TailDistances


def observed(*distances):
    """The weights after these."""
    tails = TailDistances()
    for distance in distances:
        tails.observe(distance)
    return list(tails.weights())


@pytest.mark.parametrize(
    ("distances", "expected"),
    [  # 0, 32, 128 and 512 count as observed before
        ((), {0: 0.25, 32: 0.5, 128: 0.75, 512: 1.0}),
        ((0,), {0: 0.4, 32: 0.6, 128: 0.8, 512: 1.0}),
        ((50, 50, 7), {0: 1 / 7, 7: 2 / 7, 32: 3 / 7, 50: 5 / 7, 128: 6 / 7, 512: 1.0}),
    ],
)
def test_weights(distances, expected):
    weights = observed(*distances)
    assert weights == sorted(weights)
    assert dict(weights) == pytest.approx(expected)


def test_weights_are_the_shares_of_what_was_observed():
    random = np.random.default_rng(0)
    distances = random.geometric(0.02, WINDOW)
    for distance, share in observed(*distances.tolist()):
        assert share == pytest.approx(np.mean(distances <= distance))


def test_only_the_last_256_count():
    old, new = [7] * 300, [int(d) for d in np.random.default_rng(1).integers(0, 99, 256)]
    assert observed(*old, *new) == observed(*new)
    mixed = dict(observed(*old, *[9] * 100))
    assert mixed[7] == 156 / 256
    assert mixed[9] == 1.0
