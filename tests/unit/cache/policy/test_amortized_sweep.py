"""AmortizedSweep: how many items each request handles."""

from megatron_hybrid.cache.policy.amortized_sweep import AmortizedSweep


def parts(rounds, numbers):
    """What is due at each request; numbers: how many things there are then."""
    return [rounds.due(now, number) for now, number in enumerate(numbers)]


def test_a_small_sweep_takes_one_request():
    assert parts(AmortizedSweep(least=4, share=8, at_once=100), [3] * 9) == [
        3,
        0,
        0,
        0,
        3,
        0,
        0,
        0,
        3,
    ]


def test_sweeps_of_more_items_are_rarer():
    assert parts(AmortizedSweep(least=2, share=8, at_once=100), [40] * 6) == [40, 0, 0, 0, 0, 40]


def test_a_large_sweep_takes_several_requests():
    rounds = AmortizedSweep(least=2, share=2, at_once=4)
    assert parts(rounds, [10] + 5 * [99]) == [4, 4, 2, 0, 0, 4]
    assert rounds.left == 95


def test_a_sweep_ends_before_the_next_begins():
    """Even where its parts take longer than it is to the next."""
    assert parts(AmortizedSweep(least=2, share=100, at_once=1), [5] * 7) == [1] * 7


def test_an_empty_sweep_is_retried_later():
    assert parts(AmortizedSweep(least=2, share=8, at_once=4), [0, 1, 1, 1, 1]) == [0, 0, 1, 0, 1]
