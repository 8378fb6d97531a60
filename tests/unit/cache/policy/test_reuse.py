"""ReuseModel: what is counted, the rates that follow, and which states they put first.
TailDistances: the shares that it reports, and how fast it forgets."""

from fractions import Fraction
from math import inf

import numpy as np
import pytest
from small_index import SmallIndex, counting

from megatron_hybrid.cache.index.tree import NO_ORIGIN, Checkpoint, Kind, Origin
from megatron_hybrid.cache.policy.reuse import (
    MEMORY,
    MOST_PROBABLE,
    PRIOR_GAP,
    PRIOR_PROBABILITY,
    WEIGHT,
    FateCounts,
    PolicyFlags,
    ReuseModel,
    TailDistances,
    whole_power,
)

FOUND_MORE = Origin(mostly_known=True)
AFTER_PROMPT, AFTER_ANSWER = Origin(Kind.PROMPT_END), Origin(Kind.ANSWER_END)


# ---- the counts of a fate ----


def test_a_fate_learns_how_many_states_are_used_and_when():
    counts, random = FateCounts(FateCounts()), np.random.default_rng(0)
    coming = []
    for now in range(1, 900):
        counts.add_state(now)
        if random.random() < 0.6:
            coming.append((now + int(random.geometric(1 / 20)), now))
        for use in [each for each in coming if each[0] == now]:
            coming.remove(use)
            counts.add_use(now - use[1])
    assert counts.expected(900) == (pytest.approx(0.6, abs=0.04), pytest.approx(20, rel=0.15))


def test_states_that_may_still_be_used_do_not_count_as_ended():
    """Little's law: with 1 use per request after 50 requests each, 50 to 100 are pending."""
    counts = FateCounts(FateCounts())
    for now in range(1, 201):
        counts.add_state(now)
        if now > 50:
            counts.add_use(50)
    assert counts.expected(200)[0] == MOST_PROBABLE


def test_a_fate_of_few_counts_is_like_all_others():
    mean = FateCounts()
    often, new = FateCounts(mean), FateCounts(mean)
    for now in range(1, 400):
        often.add_state(now)
        often.add_use(3)
    for _ in range(2):
        new.add_state(400)
    probability, gap = mean.expected(400)
    assert (probability, gap) == (MOST_PROBABLE, pytest.approx(3, rel=0.3))
    assert new.expected(400) == (pytest.approx(WEIGHT * probability / (2 + WEIGHT)), gap)
    often.add_use(1000)
    assert new.expected(401)[1] == mean.expected(401)[1] > gap


@pytest.mark.parametrize("before", [MEMORY, 30 * MEMORY])
def test_new_traffic_is_learnt_however_much_is_known(before):
    """States were never used; from now on most are."""
    counts = FateCounts(FateCounts())
    for now in range(before):
        counts.add_state(now)
    assert counts.expected(before)[0] < 0.01
    for now in range(before, before + 2 * MEMORY):
        counts.add_state(now)
        if now % 5:
            counts.add_use(10)
    probability, gap = counts.expected(before + 2 * MEMORY)
    assert probability > 0.6 and gap == pytest.approx(10, rel=0.1)


# ---- rates ----


def model_at(now):
    model = ReuseModel()
    model.now = now
    return model


def checkpoint(uses=0, born=0, last_use=0, kind=Kind.JUNCTION, origin=NO_ORIGIN):
    made = Checkpoint(None, 100, kind, born, origin)
    made.uses, made.last_use = uses, last_use
    return made


@pytest.mark.parametrize(
    ("uses", "born", "last_use"), [(0, 10, 10), (1, 10, 10), (2, 10, 60), (9, 500, 900)]
)
def test_a_rate_is_that_of_a_gamma_prior_and_of_an_end_after_each_use(uses, born, last_use):
    """The formula of the docstring in fractions: expected uses are those of a Gamma posterior; an
    ended state has shown no use since its last one with certainty, a living one with the
    probability ((a + t) / (a + T)) ^ (r + n) of Fader, Hardie, Lee (2005)."""
    now, gap, p = 1000, Fraction(int(PRIOR_GAP)), Fraction(PRIOR_PROBABILITY)
    n, a = max(0, uses - 1), WEIGHT * gap
    silent = ((a + last_use - born) / (a + now - born)) ** (WEIGHT + n)
    alive = p * silent / (1 - p + p * silent)
    expected = alive * (WEIGHT + n) / (a + now - born)
    assert model_at(now).rate(checkpoint(uses, born, last_use)) == pytest.approx(float(expected))


def test_a_new_state_has_the_rate_of_its_fate():
    model = model_at(50)
    assert model.new_rate(Kind.TAIL, FOUND_MORE) == PRIOR_PROBABILITY / PRIOR_GAP
    state = checkpoint(kind=Kind.TAIL, origin=FOUND_MORE, born=50, last_use=50)
    assert model.rate(state) == pytest.approx(PRIOR_PROBABILITY / PRIOR_GAP)


def test_the_first_use_starts_the_lifetime():
    model, state = model_at(500), checkpoint(born=100, last_use=100)
    model.count_use(state)
    assert (state.uses, state.born, state.last_use) == (1, 500, 500)
    model.now = 600
    model.count_use(state)
    assert (state.uses, state.born, state.last_use) == (2, 500, 600)


def test_uses_are_counted_in_the_fate_that_the_state_had():
    model, state = model_at(500), checkpoint(born=100, last_use=100, origin=AFTER_ANSWER)
    model.watch(state)
    model.count_use(state)
    mean = FateCounts()
    unused, used = FateCounts(mean), FateCounts(mean)
    unused.add_state(500)
    unused.add_use(400)
    used.add_state(500)
    rates = model.new_rate(Kind.JUNCTION, AFTER_ANSWER), model.rate(state)
    expected = [
        probability / gap for probability, gap in (unused.expected(500), used.expected(500))
    ]
    assert rates == pytest.approx(expected)


def test_powers_are_products():
    assert whole_power(1.5, 5) == 1.5 * 1.5**2 * 1.5**2
    assert whole_power(3.0, 0) == 1.0
    assert whole_power(10.0, 10**6) == inf
    model = model_at(10**9)
    assert model.rate(checkpoint(10**6, 0, 1)) == 0.0


# ---- what a prompt used ----


class Tree(SmallIndex):
    """And a model that watches it."""

    def __init__(self, **parts):
        super().__init__()
        self.model = ReuseModel(PolicyFlags(**parts))

    def watch(self, tokens, kind=Kind.JUNCTION):
        return super().watch(tokens, kind, self.model.now)

    def observe(self, tokens, resumed=None):
        return self.model.observe(self.walk(tokens), resumed, len(tokens))


def test_a_prompt_uses_the_deepest_known_state():
    tree = Tree()
    tree.add(counting(100))
    states = [tree.watch(counting(n)) for n in (20, 50, 80, 100)]
    assert tree.observe([*counting(90), 7]) == (FOUND_MORE, 0)
    assert [state.uses for state in states] == [0, 0, 1, 0]
    assert tree.model.now == 1
    assert states[2].last_use == 1


def test_lost_forks_beyond_the_one_resumed_would_have_served():
    """20 and 60 are forks; 20 was resumed from, or nothing was."""
    for resumed, uses in ((True, [1, 0, 1, 1]), (False, [1, 0, 1, 1]), (None, [0, 0, 0, 1])):
        tree = Tree()
        tree.add(counting(100))
        tree.add([*counting(20), 7])
        tree.add([*counting(60), 7])
        states = [tree.watch(counting(n)) for n in (20, 40, 60, 100)]
        # None: resumed from the deepest, so nothing beyond it was missing
        start = {True: states[0], False: None, None: states[3]}[resumed]
        tree.observe(counting(100), resumed=start)
        assert [state.uses for state in states] == uses


def test_the_lost_fork_is_the_one_that_would_save_most():
    tree = Tree()
    tree.add(counting(100))
    for n in (20, 60, 80):
        tree.add([*counting(n), 7])
    states = {n: tree.watch(counting(n)) for n in (20, 60, 80, 100)}
    assert tree.observe(counting(100)) == (FOUND_MORE, 0)  # once is not often
    assert tree.observe(counting(100)) == (FOUND_MORE, 80)  # all alike: the deepest fork saves most
    states[60].uses = 1000  # used far more often than the others
    assert tree.observe(counting(100)) == (FOUND_MORE, 60)
    assert tree.observe(counting(100), resumed=states[60]) == (FOUND_MORE, 80)
    assert tree.observe(counting(100), resumed=states[80]) == (FOUND_MORE, 0)


@pytest.mark.parametrize(
    ("kind", "origin"),
    [
        (Kind.PROMPT_END, AFTER_PROMPT),
        (Kind.ANSWER_END, AFTER_ANSWER),
        (Kind.JUNCTION, FOUND_MORE),
        (Kind.TAIL, FOUND_MORE),
        (Kind.INTERVAL, FOUND_MORE),
    ],
)
def test_origin_names_the_prefix_that_a_prompt_continues(kind, origin):
    tree = Tree()
    tree.add(counting(100))
    tree.watch(counting(20), Kind.PROMPT_END)
    tree.watch(counting(60), kind)
    assert tree.observe(counting(70))[0] == origin
    assert tree.observe([*counting(70), *range(200, 270)])[0] == (
        origin if origin.resumed_from is not None else NO_ORIGIN
    )
    assert tree.observe(counting(10))[0] == NO_ORIGIN  # nothing is watched there
    assert tree.observe([99])[0] == NO_ORIGIN
    tree.watch(counting(10))
    assert tree.observe([*counting(10), *range(200, 209)])[0] == FOUND_MORE
    assert tree.observe([*counting(10), *range(200, 210)])[0] == NO_ORIGIN


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (counting(100), [0]),  # the same again: it goes on from the end
        ([*counting(100), 7, 7], [0]),
        (counting(105), [0]),
        ([*counting(110), 7, 7], [0]),
        ([*counting(70), 7, 7], [30]),
        ([*counting(50), 7, 7], [10]),  # the nearest end behind the place
        ([*counting(59), 7], [1]),
        ([*counting(60), 7], [0]),
        ([7, 7], []),  # it has nothing to do with any other
    ],
)
def test_distances(prompt, expected):
    tree = Tree()
    tree.add(counting(110))
    tree.watch(counting(30))
    tree.watch(counting(60), Kind.PROMPT_END)
    tree.watch(counting(100), Kind.PROMPT_END)
    tree.watch(counting(110), Kind.ANSWER_END)
    tree.observe(prompt)
    assert list(tree.model.distances.weights()) == observed(*expected)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([*counting(70), 7, 7], [30]),  # nothing at all is watched before it leaves
        ([*counting(40), 7, 7], [260]),  # beyond a fork: of the newest one's prompt
        ([*counting(90), 7, 7], [10]),
        ([*counting(50), 9, 9], []),  # it leaves where they part: no single one
        ([*counting(50), *range(500, 520), 9], [230]),
    ],
)
def test_distances_to_an_end_beyond_forks(prompt, expected):
    """Of one prompt of 100 tokens and, if it is asked for, of one of 300 that leaves it at 50."""
    tree = Tree()
    tree.add(counting(110))
    tree.watch(counting(100), Kind.PROMPT_END)
    if prompt[:70] != counting(70):
        other = [*counting(50), *range(500, 750)]
        tree.add(other)
        tree.watch(other, Kind.PROMPT_END)
    tree.observe(prompt)
    assert list(tree.model.distances.weights()) == observed(*expected)


def test_without_a_part_uses_and_origins_are_not_told_apart():
    tree = Tree(fork_uses=False, resumed_from=False, mostly_known=False)
    tree.add(counting(100))
    tree.add([*counting(60), 7])
    fork, end = tree.watch(counting(60)), tree.watch(counting(100), Kind.ANSWER_END)
    assert tree.observe(counting(100)) == (AFTER_PROMPT, 0)
    assert (fork.uses, end.uses) == (0, 1)
    assert tree.observe([*counting(60), 9]) == (NO_ORIGIN, 0)
    tree = Tree(lost_forks=False)
    tree.add(counting(100))
    tree.add([*counting(60), 7])
    fork, _ = tree.watch(counting(60)), tree.watch(counting(100))
    for _ in range(3):
        assert tree.observe(counting(100)) == (FOUND_MORE, 0)
    assert fork.uses == 3


# ---- where prompts are left ----


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


def test_only_the_last_256_count():
    old, new = [7] * 300, [int(d) for d in np.random.default_rng(1).integers(0, 99, 256)]
    assert observed(*old, *new) == observed(*new)
    mixed = dict(observed(*old, *[9] * 100))
    assert mixed[7] == 156 / 256
    assert mixed[9] == 1.0
