"""ReuseModel: what is counted, the rates that follow, and which states they put first.

Rates are compared with known waiting-time distributions, counts with plain loops.
"""

import numpy as np
import pytest

from megatron_hybrid.cache.index.prefix_index import PrefixIndex
from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Origin
from megatron_hybrid.cache.pages.allocator import PageAllocator
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.policy.hazards import AGES, BOUNDS, age_class
from megatron_hybrid.cache.policy.reuse import (
    CLASSES,
    Kind,
    ReuseModel,
    class_hazards,
    class_of,
    mean_rate,
    time_scale,
)
from megatron_hybrid.cache.policy.values import checkpoint_value
from megatron_hybrid.cache.prefix_cache import PrefixCache

FOUND = 48  # the first class of requests that found more than they brought; 8 for each kind before
LATER = 60  # the first class of later turns' other positions
REPEATED = 72  # the first class of those that were used at least twice
OWN_GAPS = list(range(REPEATED, REPEATED + 4))
PLAIN = [c for c in range(CLASSES) if c not in OWN_GAPS]
STRANGER, FOUND_MORE = Origin(), Origin(mostly_known=True)


def after_prompt(turns):
    return Origin(turns, Kind.PROMPT_END)


def after_answer(turns):
    return Origin(turns, Kind.ANSWER_END)


SESSIONS = [after_prompt(1), after_answer(1), after_prompt(2), after_answer(7)]
SESSIONS += [after_prompt(20), after_prompt(1000)]


def checkpoint(kind=Kind.PROMPT_END, origin=STRANGER, uses=0, passed=False, covered=False, now=0):
    """One at position 10 of an edge of its own."""
    edge = Edge(Edge(None, 0, np.zeros(0, np.int32), None), 0, np.zeros(20, np.int32), None)
    made = edge.checkpoints[10] = Checkpoint(edge, 10, kind, now, origin)
    made.uses, made.passed = uses, passed
    edge.num_stored = int(covered)
    return made


# ---- classes ----


def fate(state):
    """The class of a state as it is."""
    return class_of(state, state.is_covered())


def test_classes():
    """Kinds, used or not, passed or not, covered or not are told apart while few uses are known;
    until they are used or passed also whether their request brought more than it found, or less, or
    went on from another; the ends of prompts and answers then by the turns before them and by where
    it went on from. Used twice, only whether it was passed and is covered matters."""
    flags = [(u, p, c) for u in (0, 1) for p in (False, True) for c in (False, True)]
    plain = [fate(checkpoint(kind, STRANGER, u, p, c)) for kind in Kind for u, p, c in flags]
    assert sorted(plain) == list(range(FOUND))
    found = [fate(checkpoint(k, FOUND_MORE, covered=c)) for k in Kind for c in (False, True)]
    assert found == list(range(FOUND, LATER))
    others = [kind for kind in Kind if kind > Kind.ANSWER_END]
    for origin in SESSIONS:
        later = [fate(checkpoint(k, origin, covered=c)) for k in others for c in (False, True)]
        assert later == list(range(LATER + 4, REPEATED))
    turns = [
        fate(checkpoint(kind, Origin(n, role), 0, False, covered))
        for kind in (Kind.PROMPT_END, Kind.ANSWER_END)
        for n in (*range(1, 8), *range(8, 16, 2), *range(16, 32, 4), *range(32, 64, 8), 64)
        for role in (Kind.PROMPT_END, Kind.ANSWER_END)
        for covered in (False, True)
    ]
    assert sorted(turns) == list(range(REPEATED + 4, CLASSES))
    for origin in (FOUND_MORE, *SESSIONS):
        for uses, passed in ((1, False), (0, True), (1, True)):
            for kind in Kind:
                with_origin = fate(checkpoint(kind, origin, uses, passed))
                assert with_origin == fate(checkpoint(kind, STRANGER, uses, passed))
    for kind in Kind:
        for uses in (2, 9):
            repeated = [
                fate(checkpoint(kind, after_answer(2), uses, p, c)) for _, p, c in flags[:4]
            ]
            assert repeated == OWN_GAPS
    for state in (
        checkpoint(Kind.TAIL),
        checkpoint(origin=after_prompt(2)),
        checkpoint(uses=1),
        checkpoint(uses=5),
    ):
        as_if = class_of(state, covered=True)
        state.edge.num_stored = 1
        assert fate(state) == class_of(state, covered=True) == as_if


@pytest.mark.parametrize(
    ("uses", "born", "last_use", "gap"),
    [
        (2, 0, 0, 100 / 3),  # 3 Gamma-distributed events in 100 requests, and no more
        (2, 0, 200, 300 / 3),
        (9, 50, 950, 1000 / 10),
        (999, 0, 9900, 10.0),
    ],
)
def test_ages_of_the_repeatedly_used_are_in_their_own_gaps(uses, born, last_use, gap):
    used = checkpoint(uses=uses, now=born)
    used.last_use = last_use
    assert time_scale(used) == pytest.approx(32 / gap)


def test_ages_of_all_others_are_in_requests():
    for uses in (0, 1):
        one = checkpoint(uses=uses)
        one.last_use = 500
        assert time_scale(one) == 1.0
    for origin in SESSIONS:
        one = checkpoint(origin=origin)
        assert time_scale(one) == 1.0


def test_the_gap_is_the_mean_of_the_posterior():
    """Gaps drawn around a rate that is itself drawn: among those with the same record, the mean
    rate is what time_scale says."""
    random = np.random.default_rng(3)
    # prior: one event in 100 requests, a Gamma of shape 1
    rates = random.gamma(1.0, 1 / 100, 400_000)
    span = random.gamma(2, 1 / rates)  # two uses took so long
    for wanted in (20, 100, 400):
        near = abs(span - wanted) < 0.05 * wanted
        # seen again after a wait of unknown length: the rate given two events in `wanted`
        used = checkpoint(uses=2)
        used.last_use = wanted
        expected = rates[near].mean()
        assert time_scale(used) / 32 == pytest.approx(expected, rel=0.05)


# ---- rates ----


def learnt_hazards(uses, risk):
    return class_hazards(uses, risk, mean_rate(uses, risk))


def test_without_data_every_hazard_fades_from_what_is_assumed():
    hazard = learnt_hazards(np.zeros((CLASSES, AGES)), np.zeros((CLASSES, AGES)))
    fading = 0.8 ** np.arange(AGES)
    assert hazard[PLAIN] == pytest.approx(np.tile(1e-3 * fading, (len(PLAIN), 1)))
    for cls in OWN_GAPS:
        assert hazard[cls] == pytest.approx(fading / 32)


def test_few_observations_shrink_to_the_prior():
    uses, risk = np.zeros((CLASSES, AGES)), np.zeros((CLASSES, AGES))
    uses[8, 4], risk[8, 4] = 500, 5000  # 0.1
    uses[16, 4], risk[16, 4] = 1, 50_000
    hazard = learnt_hazards(uses, risk)
    # a class with no data: the mean of all, 501 in 55,000, at every age, fading
    assert hazard[24, 0] == pytest.approx(502 / 56_000, rel=0.01)
    assert hazard[24, 3] == pytest.approx(0.8**3 * 502 / 56_000, rel=0.01)
    # unless there is data on those that differ only in being covered, or in not being so
    assert hazard[9, 0] == pytest.approx(0.1, rel=0.02)
    assert hazard[9, 3] == pytest.approx(0.8**3 * 0.1, rel=0.02)
    # ages without data in a class with some: its mean
    assert hazard[8, 0] == pytest.approx(0.1, rel=0.02)
    assert hazard[16, 0] < 0.1 * hazard[8, 0]
    # beyond, it fades from the last age that was seen
    assert hazard[8, 6] == pytest.approx(0.1 * 0.8, rel=0.02)
    # one observation does not outweigh what younger ones tell
    uses[8, 5], risk[8, 5] = 1, 1
    assert 0.1 < learnt_hazards(uses, risk)[8, 5] < 0.2
    # what is used repeatedly, in units of its own gap, tells nothing about the rest
    before = learnt_hazards(uses, risk)
    uses[REPEATED, 2], risk[REPEATED, 2] = 1e6, 1e6
    assert learnt_hazards(uses, risk)[PLAIN] == pytest.approx(before[PLAIN])


def test_a_class_ages_as_the_one_that_differs_only_in_covered():
    """Covered tails are used at once or never again. What is known of uncovered ones says
    nothing, or that they are used a tenth as often; where much is known of an age, it counts."""
    uses, risk = np.zeros((CLASSES, AGES)), np.zeros((CLASSES, AGES))
    covered = 8 * Kind.TAIL + 1
    risk[covered] = 10_000
    uses[covered, 0] = 5000
    hazard = learnt_hazards(uses, risk)
    assert hazard[covered, 0] == pytest.approx(0.5, rel=0.03)
    assert hazard[covered, 12] < 0.001
    assert hazard[covered - 1] == pytest.approx(hazard[covered], rel=0.03, abs=1e-3)
    uses[covered - 1, 0], risk[covered - 1, 0] = 50, 1000
    hazard = learnt_hazards(uses, risk)
    assert hazard[covered - 1, 0] == pytest.approx(0.05, rel=0.1)
    assert hazard[covered - 1, 12] == pytest.approx(0.1 * hazard[covered, 12], rel=0.2)
    uses[covered - 1, 1], risk[covered - 1, 1] = 500, 1000
    hazard = learnt_hazards(uses, risk)
    assert hazard[covered - 1, 1] > 0.1
    assert hazard[covered, 1] < 0.005


# ---- counting ----


def uses_of(model):
    return model.counts()[0]


def risk_of(model):
    return model.counts()[1]


def naive_risk(history, cls, scale=1.0):
    """Time at risk of one state in [since, until) after its last use, request by request."""
    risk = np.zeros((CLASSES, AGES))
    since, until = history
    for age in range(since, until):
        for k in range(AGES):
            start = BOUNDS[k]
            end = BOUNDS[k + 1] if k + 1 < AGES else np.inf
            risk[cls, k] += max(0.0, min((age + 1) * scale, end) - max(age * scale, start))
    return risk


def test_time_at_risk_equals_a_loop_over_requests():
    model = ReuseModel()
    expected = np.zeros((CLASSES, AGES))
    states = [
        checkpoint(kind, origin, uses, passed)
        for kind, origin, uses, passed in (
            (Kind.PROMPT_END, STRANGER, 0, False),
            (Kind.ANSWER_END, after_answer(2), 0, False),
            (Kind.RUNG, STRANGER, 1, True),
            (Kind.JUNCTION, STRANGER, 5, False),
        )
    ]
    model.now = 7
    for state in states:
        model.count_exposure(state)
    for state in states:
        cls = fate(state)
        expected += naive_risk((0, 7), cls, time_scale(state))
    assert risk_of(model) == pytest.approx(expected)
    model.now = 300
    for state in states:
        model.count_exposure(state)
    for state in states:
        cls = fate(state)
        expected += naive_risk((7, 300), cls, time_scale(state))
    assert risk_of(model) == pytest.approx(expected)
    assert not np.any(uses_of(model))
    model.now = 2000
    for state in states:
        cls = fate(state)
        model.count_exposure(state)
        expected += naive_risk((300, 2000), cls, time_scale(state))
    assert risk_of(model) == pytest.approx(expected)
    model.count_exposure(states[0])  # counted already
    assert risk_of(model) == pytest.approx(expected)
    assert sum(risk_of(model)[fate(states[0])]) == pytest.approx(2000)


def test_the_oldest_age_has_no_end():
    model, old = ReuseModel(), checkpoint()
    model.now = 1_000_000
    model.count_exposure(old)
    assert np.sum(risk_of(model)) == pytest.approx(1_000_000)
    assert risk_of(model)[0][-1] == pytest.approx(1_000_000 - BOUNDS[AGES - 1])


def test_a_use_is_counted_in_the_class_and_at_the_age_that_it_had():
    model, state = ReuseModel(), checkpoint(Kind.TAIL, now=0)
    before = fate(state)
    model.now = 11
    model.count_use(state)
    assert age_class(10.5) != age_class(11)
    assert uses_of(model)[before][age_class(10.5)] == 1  # between its ages 10 and 11
    assert sum(risk_of(model)[before]) == pytest.approx(11)
    assert (state.uses, state.last_use, state.counted) == (1, 11, 11)
    model.now = 14
    model.mark_passed(state)
    assert sum(risk_of(model)[before + 4]) == pytest.approx(3)
    model.now = 15
    model.mark_passed(state)  # that it was passed is known: nothing changes, nothing is counted
    assert state.counted == 14
    model.count_use(state)
    assert uses_of(model)[before + 4 + 2][age_class(3.5)] == 1
    assert np.sum(uses_of(model)) == 2
    assert state.uses == 2


def test_uses_that_another_state_served_are_counted_while_it_is_the_same_one():
    model = ReuseModel()
    state, near, far = (checkpoint(Kind.JUNCTION, now=0) for _ in range(3))
    near.position, far.position = 40, 20
    seen = []
    for resumed in (None, far, far, state, far, near, near, None, near):
        model.now += 1
        model.count_use(state, resumed)
        seen.append((state.served_by, state.served_count))
    assert seen == [(0, 0), (20, 1), (20, 2), (20, 2), (20, 3), (40, 1), (40, 2), (40, 2), (40, 3)]
    assert state.uses == 9


def test_learning_counts_half_after_a_thousand_requests():
    model = ReuseModel()
    model._uses_CA[0][3], model._risk_CA[0][3] = 8, 800
    model.now = 1000
    model.refit()
    assert (model._uses_CA[0][3], model._risk_CA[0][3]) == (4, 400)
    model.refit()
    assert model._uses_CA[0][3] == 4


def test_new_traffic_is_learnt_however_much_is_known():
    """30,000 prompts that never came back, then documents, each asked again after 5 requests."""
    model = ReuseModel()
    for _ in range(30_000):
        model.now += 1
        model.watch(checkpoint(Kind.PROMPT_END, now=model.now))
        model.maintain(model.now)
    assert model.new_rate(Kind.TAIL, STRANGER) < 1e-3
    documents = []
    for _ in range(200):
        model.now += 1
        documents.append(checkpoint(Kind.TAIL, now=model.now))
        model.watch(documents[-1])
        for state in documents[-6:-5]:
            model.count_use(state)
        model.maintain(30_000)
    assert model.new_rate(Kind.TAIL, STRANGER) > 0.02


def test_time_at_risk_is_neither_late_nor_early():
    """Of 2,000 states whose last use lies up to 2,000 requests back, half of them used once: as
    much as there was, where all is counted; before that, within a few per cent, also of each age
    that many have left behind."""
    model, states = ReuseModel(), []
    model.refit = lambda: None  # which fades what was counted long ago
    chance = np.random.default_rng(0)
    for _ in range(2000):
        model.now += 1
        states.append(checkpoint(Kind.JUNCTION, now=model.now))
        model.watch(states[-1])
        state = states[int(chance.integers(len(states)))]
        if not state.uses:
            model.count_use(state)
        model.maintain(len(states))
    before = risk_of(model).copy()
    for state in states:
        model.count_exposure(state)
    exact = risk_of(model)
    assert np.all(exact >= 0)
    assert np.sum(exact) == pytest.approx(sum(range(2000)))
    assert np.sum(before) == pytest.approx(np.sum(exact), rel=0.05)
    young = slice(age_class(8), age_class(128))
    for used_once in (False, True):
        cls = class_of(checkpoint(Kind.JUNCTION, uses=used_once), covered=False)
        assert before[cls, young] == pytest.approx(exact[cls, young], rel=0.1)


def test_visits_per_request_grow_with_the_octaves_of_known_time():
    """30,000 states, one new one per request: a request counts 12 of them."""
    model, most = ReuseModel(), 0
    for _ in range(30_000):
        model.watch(checkpoint(Kind.RUNG, now=model.now))
        model.now += 1
        before = len(model._spans)
        model.maintain(model.now)
        most = max(most, (len(model._spans) - before) // 3)
    assert most == 12  # ages of 8 to 8 * 2^11 = 16,384


def sessions_of(model, origin, share, wait):
    """What is counted of 1,000 sessions at one turn until an age of 500, if the share of them goes
    on, after waits of this mean, exponentially distributed."""
    row = fate(checkpoint(Kind.ANSWER_END, origin))
    for start, end, k in zip(BOUNDS, BOUNDS[1:], range(AGES)):
        start, end = min(start, 500), min(end, 500)
        back = 1000 * share * (np.exp(-start / wait) - np.exp(-end / wait))
        model._uses_CA[row][k] += back
        model._risk_CA[row][k] += back * wait + 1000 * (1 - share) * (end - start)
    return row


def test_learning_tells_turns_apart_by_their_continuation():
    """The same waits; after two turns all sessions go on, after four hardly any. New states of both
    kinds, and those that have been waited for, are valued by that."""
    model = ReuseModel()
    early, late = (
        sessions_of(model, after_answer(turns), share, 20) for turns, share in ((2, 1.0), (4, 0.1))
    )
    for _ in range(5):
        model.refit()
    rates = model._rate_CA
    assert rates[early][0] == pytest.approx(1 / 20, rel=0.25)
    assert rates[late][0] < 0.2 * rates[early][0]
    assert model.new_rate(Kind.ANSWER_END, after_answer(4)) == rates[late][0]
    assert rates[late][age_class(64)] < 0.02 * rates[early][0]


def test_what_sessions_go_on_from_is_learnt_apart():
    """Those that go on from prompts are all back after 5 requests; of those from answers fewer with
    each turn, after 100: each group has waits and shares of its own."""
    model = ReuseModel()
    from_prompts = [sessions_of(model, after_prompt(turns), 1.0, 5) for turns in (2, 3)]
    from_answers = [
        sessions_of(model, after_answer(turns), share, 100) for turns, share in ((2, 0.9), (3, 0.3))
    ]
    for _ in range(5):
        model.refit()
    for row in from_prompts:
        assert model._rate_CA[row][0] == pytest.approx(1 / 5, rel=0.25)
    for row in from_answers:
        assert model._rate_CA[row][0] < 1 / 50
    # What the next estimate starts from, just after a request.
    assert model._back_GKA[4, [1, 2], 0].min() > 0.95
    assert model._back_GKA[6, 1, 0] > 0.8
    assert model._back_GKA[6, 2, 0] < 0.6


def test_sessions_that_were_never_seen_are_expected_like_all_others():
    model = ReuseModel()
    model._uses_CA[8][4], model._risk_CA[8][4] = 500, 5000
    model.refit()
    never = fate(checkpoint(Kind.ANSWER_END, after_answer(2)))
    assert model._rate_CA[never][0] == pytest.approx(model._rate_CA[16][0], rel=0.5)
    assert model._rate_CA[never][0] > 0.03


def test_rates_are_at_the_age_since_the_last_use():
    model = ReuseModel()
    rates = 1.0 + np.arange(CLASSES)[:, None] * 100 + np.arange(AGES)
    model._rate_CA = rates.tolist()
    state = checkpoint(Kind.JUNCTION)
    model.now = 7
    age = age_class(7)
    assert model.rate(state, state.is_covered()) == rates[fate(state), age]
    assert model.rate(state, covered=True) == rates[fate(state) + 1, age]
    covered = checkpoint(Kind.JUNCTION, covered=True)
    assert model.rate(covered, covered=True) == model.rate(covered, covered.is_covered())
    turn = checkpoint(Kind.PROMPT_END, after_prompt(2))
    assert model.rate(turn, turn.is_covered()) == rates[fate(turn), age]
    assert model.rate(turn, covered=True) == rates[class_of(turn, covered=True), age]
    used = checkpoint(uses=7)
    scale = 32 * 8 / 100
    for is_covered in (False, True):
        expected = rates[class_of(used, is_covered), age_class(7 * scale)] * scale
        assert model.rate(used, is_covered) == expected
    for kind in Kind:
        for origin in (STRANGER, FOUND_MORE, *SESSIONS):
            assert model.new_rate(kind, origin) == rates[fate(checkpoint(kind, origin)), 0]


# ---- what a prompt used ----


class Tree:
    """A small index without pages to speak of, and a model that watches it."""

    def __init__(self):
        self.pool = PageAllocator(2000)
        self.index = PrefixIndex(16, 1, self.pool)
        self.model = ReuseModel()

    def add(self, tokens):
        pages = self.pool.allocate(-(-len(tokens) // 16)).reshape(-1, 1)
        self.index.insert("", np.array(tokens, np.int32), pages, self.model.now)
        self.pool.release(pages)

    def watch(self, tokens, kind=Kind.JUNCTION):
        path = self.walk(tokens)
        assert path.known == len(tokens)
        return self.index.watch(path.edges[-1], len(tokens), kind, self.model.now)

    def store(self, state):
        self.index.store(state, self.pool.allocate(1), [])

    def walk(self, tokens):
        return self.index.walk("", np.array(tokens, np.int32))

    def observe(self, tokens, resumed=None):
        return self.model.observe(self.walk(tokens), resumed, len(tokens))


def counting(n, start=0):
    return list(range(start, start + n))


def test_a_prompt_uses_the_deepest_known_state_and_passes_the_others():
    tree = Tree()
    tree.add(counting(100))
    states = [tree.watch(counting(n)) for n in (20, 50, 80, 100)]
    assert tree.observe([*counting(90), 7]) == (FOUND_MORE, 0)
    assert [state.uses for state in states] == [0, 0, 1, 0]
    assert [state.passed for state in states] == [True, True, False, False]
    assert tree.model.now == 1
    assert states[2].last_use == 1


def test_it_also_uses_the_one_that_it_resumed_from():
    tree = Tree()
    tree.add(counting(100))
    states = [tree.watch(counting(n)) for n in (20, 50, 80)]
    tree.store(states[1])
    tree.observe([*counting(90), 7], resumed=states[1])
    assert [state.uses for state in states] == [0, 1, 1]
    assert [state.passed for state in states] == [True, False, False]


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
        assert [state.passed for state in states] == [start is not states[0], True, True, False]


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
        (Kind.PROMPT_END, after_prompt(1)),
        (Kind.ANSWER_END, after_answer(1)),
        (Kind.JUNCTION, FOUND_MORE),
        (Kind.TAIL, FOUND_MORE),
        (Kind.RUNG, FOUND_MORE),
    ],
)
def test_origin_names_the_prefix_that_a_prompt_continues(kind, origin):
    tree = Tree()
    tree.add(counting(100))
    tree.watch(counting(20), Kind.PROMPT_END)
    tree.watch(counting(60), kind)
    assert tree.observe(counting(70))[0] == origin
    assert tree.observe([*counting(70), *range(200, 270)])[0] == (
        origin if origin.turns else STRANGER
    )
    assert tree.observe(counting(10))[0] == STRANGER  # nothing is watched there
    assert tree.observe([99])[0] == STRANGER
    tree.watch(counting(10))
    assert tree.observe([*counting(10), *range(200, 209)])[0] == FOUND_MORE
    assert tree.observe([*counting(10), *range(200, 210)])[0] == STRANGER


def test_turns_are_counted():
    """Each turn goes on from the last one's end, of its prompt or of its answer."""
    tree, origin = Tree(), STRANGER
    for n, kind in enumerate((Kind.PROMPT_END, Kind.ANSWER_END, Kind.ANSWER_END), 1):
        tree.add(counting(100 * n))
        tree.watch(counting(100 * n), kind).origin = origin
        origin, _ = tree.observe(counting(100 * n + 50))
        assert origin == Origin(n, kind)
    tree.watch(counting(300), Kind.ANSWER_END).origin = STRANGER
    assert tree.observe(counting(350))[0] == after_answer(
        1
    )  # whose first turn that was is forgotten


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
    assert list(tree.model.distances._recent) == expected


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
    assert list(tree.model.distances._recent) == expected


def test_what_is_known_only_counts_as_well():
    """Neither pages nor KV are needed to learn: what was dropped is watched."""
    tree = Tree()
    tree.add(counting(100))
    state = tree.watch(counting(80), Kind.ANSWER_END)
    tree.store(state)
    tree.index.drop_kv(tree.walk(counting(100)).edges[0], 0)
    assert tree.observe(counting(90)) == (after_answer(1), 0)
    assert state.uses == 1


# ---- after traffic ----


def prompt(n, *seed):
    return np.random.default_rng(seed).integers(0, 50_000, n).tolist()


def serve(cache, tokens, answer):
    """A whole request, without a model."""
    whole = np.array(tokens + answer, np.int32)
    lease = cache.acquire(whole[: len(tokens)], capacity_tokens=len(whole))
    for end in (len(tokens), len(whole)):
        wanted = {*lease.wanted, end}
        wanted = [p for p in sorted(wanted) if lease.done < p <= end]
        reserved = [cache.reserve_checkpoint(lease, position) for position in wanted]
        cache.commit(lease, whole, end, flush=end == len(whole))
        for reservation in filter(None, reserved):
            cache.publish_checkpoint(reservation)
    cache.release(lease)


def chats(cache, num_chats, seed):
    """Chats of one to four turns behind one system prompt, a few at a time, and one-off prompts."""
    random = np.random.default_rng(seed)
    system = prompt(200, 0)
    waiting, started = [], 0
    while waiting or started < num_chats:
        if started < num_chats and (not waiting or random.random() < 0.3):
            started += 1
            waiting.append((system + prompt(60, 1, seed, started), int(random.integers(1, 5))))
            serve(cache, prompt(260, 2, seed, started), prompt(20, 3, seed, started))
        tokens, turns = waiting.pop(int(random.integers(min(4, len(waiting)))))
        answer = prompt(30, 4, seed, started, len(tokens), turns)
        serve(cache, tokens, answer)
        if turns > 1:
            waiting.append((tokens + answer + prompt(30, 5, seed, len(tokens)), turns - 1))


SPEC = CacheSpec(16, (KVGroup(2, 64),), state_bytes=80_000, hidden_bytes=64)


def after_chats(num_pages):
    cache = PrefixCache(SPEC, num_pages)
    chats(cache, 60, seed=1)
    for state in cache._index.checkpoints():
        cache.policy.reuse.count_exposure(state)
    cache.policy.reuse.refit()
    cache.check_integrity()
    return cache


def test_traffic_tells_forks_tips_and_finished_turns_apart():
    served = after_chats(num_pages=60_000)
    reuse, now = served.policy.reuse, served.policy.reuse.now
    states = [state for state in served._index.checkpoints() if state.pages is not None]
    (fork,) = [state for state in states if state.position == 200 and state.is_fork()]
    assert fork.uses >= 30
    recent = [state for state in states if now - state.last_use < 40 and state is not fork]
    finished = [s for s in recent if s.passed and not s.uses and s.kind <= Kind.ANSWER_END]
    one_off = [
        s
        for s in recent
        if s.kind == Kind.ANSWER_END and not s.origin.turns and not s.uses and not s.passed
    ]
    assert finished and one_off

    def values(group):
        refs = served.allocator.ref_counts
        return [checkpoint_value(state, SPEC, reuse, refs) for state in group]

    assert min(values([fork])) > max(values(one_off))
    assert np.mean(values(one_off)) > np.mean(values(finished))
    rates = [[reuse.rate(s, s.is_covered()) for s in group] for group in (one_off, finished)]
    assert min(rates[0]) > max(rates[1])


def test_learning_is_deterministic():
    first, second = (after_chats(num_pages=1500) for _ in range(2))
    assert first.stats()["checkpoints_evicted"] > 0
    assert first.policy.reuse._rate_CA == second.policy.reuse._rate_CA
    assert first.digest() == second.digest()
