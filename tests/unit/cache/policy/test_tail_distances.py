"""TailDistances: the shares that it reports, and how fast it forgets."""

import numpy as np
import pytest

from megatron_hybrid.cache.policy.tail_distances import TailDistances


def observed(*distances):
    """The weights after these."""
    tails = TailDistances()
    for distance in distances:
        tails.observe(distance)
    return list(tails.weights())


@pytest.mark.parametrize(
    ("distances", "expected"),
    [
        # a quarter of an observation of each of 0, 32, 128, 512
        ((), {0: 0.25, 32: 0.5, 128: 0.75, 512: 1.0}),
        ((0,), {0: 1.25 / 2, 32: 1.5 / 2, 128: 1.75 / 2, 512: 1.0}),
        ((50, 50, 7), {0: 0.0625, 7: 0.3125, 32: 0.375, 50: 0.875, 128: 0.9375, 512: 1.0}),
        ((1000,), {0: 0.125, 32: 0.25, 128: 0.375, 512: 0.5, 1000: 1.0}),
    ],
)
def test_weights(distances, expected):
    weights = observed(*distances)
    assert weights == sorted(weights)
    assert dict(weights) == pytest.approx(expected)


def test_one_is_known_from_the_first_on():
    tails = TailDistances()
    assert not tails.known
    tails.observe(0)
    assert tails.known


def test_weights_are_the_shares_of_what_was_observed():
    random = np.random.default_rng(0)
    distances = random.geometric(0.02, 200)
    for distance, share in observed(*distances.tolist()):
        assert share == pytest.approx(np.mean(distances <= distance), abs=1 / 200)


def test_only_the_last_256_count():
    old, new = [7] * 300, [int(d) for d in np.random.default_rng(1).integers(0, 99, 256)]
    assert observed(*old, *new) == observed(*new)
    mixed = dict(observed(*old, *[9] * 100))
    assert mixed[7] == pytest.approx((156 + 0.25) / 257)
    assert mixed[9] == pytest.approx((256 + 0.25) / 257)
