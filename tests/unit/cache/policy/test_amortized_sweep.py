"""When upkeep is due, and how much of it."""

from megatron_hybrid.cache.policy.amortized_sweep import AmortizedSweep


def parts(rounds, numbers):
    """What is due at each request; numbers: how many things there are then."""
    return [rounds.due(now, number) for now, number in enumerate(numbers)]


def test_few_things_are_done_at_once_every_so_often():
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


def test_the_more_things_the_rarer_the_rounds():
    assert parts(AmortizedSweep(least=2, share=8, at_once=100), [40] * 6) == [40, 0, 0, 0, 0, 40]


def test_many_things_are_done_part_by_part():
    rounds = AmortizedSweep(least=2, share=2, at_once=4)
    assert parts(rounds, [10] + 5 * [99]) == [4, 4, 2, 0, 0, 4]
    assert rounds.left == 95


def test_a_round_is_over_before_the_next_begins():
    """Even where its parts take longer than it is to the next."""
    assert parts(AmortizedSweep(least=2, share=100, at_once=1), [5] * 7) == [1] * 7


def test_nothing_to_do_is_asked_again_later():
    assert parts(AmortizedSweep(least=2, share=8, at_once=4), [0, 1, 1, 1, 1]) == [0, 0, 1, 0, 1]
