"""ReuseModel: what is counted, the rates that follow, and which states they put first.

Rates are compared with known waiting-time distributions, counts with plain loops.
"""

import numpy as np
import pytest

from megatron_hybrid.cache.eviction import checkpoint_value
from megatron_hybrid.cache.page_allocator import PageAllocator
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.prefix_index import PrefixIndex
from megatron_hybrid.cache.reuse import (
    AGES,
    CLASSES,
    Kind,
    ReuseModel,
    age_class,
    best_rates,
    class_of,
    hazards,
    time_scale,
)
from megatron_hybrid.cache.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.tree import Checkpoint, Edge

EDGES = [2 ** (k / 2) - 1 for k in range(AGES)]
REPEATED = 48  # the first class of those that were used at least twice: 8 for each of 6 kinds
PLAIN = [c for c in range(CLASSES) if c not in (REPEATED, REPEATED + 1)]


def checkpoint(kind=Kind.PROMPT_END, turn=0, uses=0, passed=False, covered=False, now=0):
    """One at position 10 of an edge of its own."""
    edge = Edge(Edge(None, 0, np.zeros(0, np.int32), None), 0, np.zeros(20, np.int32), None)
    made = edge.checkpoints[10] = Checkpoint(edge, 10, kind, now, turn)
    made.uses, made.passed = uses, passed
    edge.num_stored = int(covered)
    return made


# ---- classes and ages ----


def test_ages_are_two_classes_per_octave():
    for k, start in enumerate(EDGES):
        assert age_class(start) == k
        assert age_class(start + 1e-6 * (1 + start)) == k
        if k:
            assert age_class(start * (1 - 1e-6)) == k - 1
    assert (age_class(0), age_class(1), age_class(3), age_class(7)) == (0, 2, 4, 6)
    assert age_class(1e12) == AGES - 1


def test_classes():
    """Kinds, used or not, passed or not, covered or not are told apart while few uses are known;
    the ends of prompts and answers also by where their request went on from, until they are used
    or passed. Used twice, only whether it was passed matters."""
    flags = [(u, p, c) for u in (0, 1) for p in (False, True) for c in (False, True)]
    plain = [class_of(checkpoint(kind, 0, u, p, c)) for kind in Kind for u, p, c in flags]
    assert sorted(plain) == list(range(REPEATED))
    turns = [
        class_of(checkpoint(kind, turn, 0, False, covered))
        for kind in (Kind.PROMPT_END, Kind.ANSWER_END)
        for turn in (1, 2)
        for covered in (False, True)
    ]
    assert sorted(turns) == list(range(REPEATED + 2, CLASSES))
    for turn in (1, 2):
        for uses, passed in ((1, False), (0, True), (1, True)):
            with_turn = class_of(checkpoint(Kind.ANSWER_END, turn, uses, passed))
            assert with_turn == class_of(checkpoint(Kind.ANSWER_END, 0, uses, passed))
    for kind in Kind:
        for uses in (2, 9):
            assert class_of(checkpoint(kind, 0, uses, False, True)) == REPEATED
            assert class_of(checkpoint(kind, 0, uses, True, False)) == REPEATED + 1


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
    assert time_scale(used, class_of(used)) == pytest.approx(32 / gap)


def test_ages_of_all_others_are_in_requests():
    for uses in (0, 1):
        one = checkpoint(uses=uses)
        one.last_use = 500
        assert time_scale(one, class_of(one)) == 1.0
    for turn in (1, 2):
        one = checkpoint(turn=turn)
        assert time_scale(one, class_of(one)) == 1.0


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
        assert time_scale(used, class_of(used)) / 32 == pytest.approx(expected, rel=0.05)


# ---- rates ----


def test_without_data_every_hazard_fades_from_what_is_assumed():
    hazard = hazards(np.zeros((CLASSES, AGES)), np.zeros((CLASSES, AGES)))
    fading = 0.8 ** np.arange(AGES)
    assert hazard[PLAIN] == pytest.approx(np.tile(1e-3 * fading, (len(PLAIN), 1)))
    assert hazard[REPEATED] == pytest.approx(fading / 32)
    assert hazard[REPEATED + 1] == pytest.approx(fading / 32)


def fates(rate_at, n, seed, until=3000):
    """Uses and time at risk by age class of n states, each followed to its first use, or to the
    end: an own loop over requests. rate_at(age): the true hazard at each age in requests."""
    random = np.random.default_rng(seed)
    uses, risk = np.zeros(AGES), np.zeros(AGES)
    rates = np.array([rate_at(age) for age in range(until)])
    alive = n
    for age in range(until):
        hit = random.binomial(alive, -np.expm1(-rates[age]))
        k = age_class(age + 0.5)
        risk[k] += alive - hit / 2
        uses[k] += hit
        alive -= hit
    return uses, risk


def test_hazards_recover_known_rates():
    truth = {
        3: lambda age: 0.2 if age < 7 else 0.001,
        11: lambda age: 0.002 if age < 31 else 0.02,
        20: lambda age: 0.01,
        REPEATED + 4: lambda age: 0.05,
    }
    uses, risk = np.zeros((CLASSES, AGES)), np.zeros((CLASSES, AGES))
    for cls, rate_at in truth.items():
        uses[cls], risk[cls] = fates(rate_at, 20_000, seed=cls)
    hazard = hazards(uses, risk)
    for cls, rate_at in truth.items():
        for k in range(AGES):
            if uses[cls, k] > 400:
                middle = (EDGES[k] + EDGES[k + 1]) / 2
                assert hazard[cls, k] == pytest.approx(rate_at(middle), rel=0.15), (cls, k)
    assert (uses > 400).sum() > 25


def test_few_observations_lean_on_the_next_wider_circle():
    uses, risk = np.zeros((CLASSES, AGES)), np.zeros((CLASSES, AGES))
    uses[8, 4], risk[8, 4] = 500, 5000  # 0.1
    uses[16, 4], risk[16, 4] = 1, 50_000
    hazard = hazards(uses, risk)
    # a class with no data: the mean of all, 501 in 55,000, at every age, fading
    assert hazard[24, 0] == pytest.approx(502 / 56_000, rel=0.01)
    assert hazard[24, 3] == pytest.approx(0.8**3 * 502 / 56_000, rel=0.01)
    # ages without data in a class with some: its mean
    assert hazard[8, 0] == pytest.approx(0.1, rel=0.02)
    assert hazard[16, 0] < 0.1 * hazard[8, 0]
    # beyond, it fades from the last age that was seen
    assert hazard[8, 6] == pytest.approx(0.1 * 0.8, rel=0.02)
    # one observation does not outweigh what younger ones tell
    uses[8, 5], risk[8, 5] = 1, 1
    assert 0.1 < hazards(uses, risk)[8, 5] < 0.15


def test_a_turn_lends_to_the_class_that_it_is_part_of():
    """The end of a first answer has no record of its own yet: that of later ones speaks for it."""
    later = class_of(checkpoint(Kind.ANSWER_END, turn=2))
    first = class_of(checkpoint(Kind.ANSWER_END))
    prompt = class_of(checkpoint(Kind.PROMPT_END))
    after_prompt = class_of(checkpoint(Kind.ANSWER_END, turn=1))
    uses, risk = np.zeros((CLASSES, AGES)), np.zeros((CLASSES, AGES))
    uses[later, 2], risk[later, 2] = 900, 3000
    uses[prompt, 2], risk[prompt, 2] = 9, 60_000
    hazard = hazards(uses, risk)
    for cls in (later, first, after_prompt):
        assert hazard[cls, 0] == pytest.approx(0.3, rel=0.03)
    assert hazard[prompt, 0] < 0.01
    # what is used repeatedly, in units of its own gap, tells nothing about the rest
    uses[REPEATED, 2], risk[REPEATED, 2] = 1e6, 1e6
    assert hazards(uses, risk)[PLAIN] == pytest.approx(hazard[PLAIN])


def brute_force_rate(waits, age, horizon):
    """Among those that waited at least `age`: the largest uses per request over all moments of
    giving up, each tried on every waiting time."""
    left = np.sort(waits[waits > age]) - age
    total = np.cumsum(left)
    n = np.arange(1, len(left) + 1)
    stops = left[left <= horizon - age]
    index = np.searchsorted(left, stops, side="right") - 1
    time = total[index] + (len(left) - n[index]) * stops
    seen = n[index] >= 2000  # a handful tells nothing
    return (n[index] / time)[seen].max()


def sampled_waits(hazard, n, seed):
    """Waiting times with this hazard per age class: by the inverse of its integral."""
    start = np.array([*EDGES, 2 ** (AGES / 2) - 1])
    integral = np.concatenate([[0], np.cumsum(hazard * np.diff(start))])
    level = np.random.default_rng(seed).exponential(size=n)
    waits = np.interp(level, integral, start)
    waits[level > integral[-1]] = np.inf
    return waits


SHAPES = {
    "constant": lambda k: 0.01,
    "falling": lambda k: 0.3 * 0.75**k,
    "periodic": lambda k: 0.05 if 8 <= k < 10 else 0.0005,  # comes back after 15 to 31 requests
    "young or old": lambda k: 0.1 if k < 3 else 0.02 if 12 <= k < 14 else 0.0002,
}


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_best_rates_against_every_moment_of_giving_up(shape):
    hazard = np.array([SHAPES[shape](k) for k in range(AGES)])
    best = best_rates(hazard[None])[0]
    waits = sampled_waits(hazard, 400_000, seed=5)
    waits = np.minimum(waits, 1e9)
    for k in (0, 2, 5, 8, 9, 12):
        if (waits > EDGES[k]).sum() < 100_000:
            continue
        expected = brute_force_rate(waits, EDGES[k], horizon=EDGES[k + 16])
        assert best[k] == pytest.approx(expected, rel=0.06), k


def test_best_rates_by_hand():
    """Two ages: used with certainty soon, or waiting for the next."""
    hazard = np.full((1, AGES), 1e-9)
    hazard[0, 4] = 1.0  # ages 3 to 4.66
    best = best_rates(hazard)[0]
    width = EDGES[5] - EDGES[4]
    used = 1 - np.exp(-width)
    assert best[4] == pytest.approx(1.0)
    for k in range(4):
        assert best[k] == pytest.approx(used / (EDGES[4] - EDGES[k] + used), rel=1e-3)
    assert best[5] == pytest.approx(1e-9)
    assert best_rates(np.full((2, AGES), 0.25)) == pytest.approx(0.25)


# ---- counting ----


def naive_risk(history, cls, scale=1.0):
    """Time at risk of one state in [since, until) after its last use, request by request."""
    risk = np.zeros((CLASSES, AGES))
    since, until = history
    for age in range(since, until):
        for k in range(AGES):
            start = EDGES[k]
            end = EDGES[k + 1] if k + 1 < AGES else np.inf
            risk[cls, k] += max(0.0, min((age + 1) * scale, end) - max(age * scale, start))
    return risk


def test_time_at_risk_equals_a_loop_over_requests():
    model = ReuseModel()
    expected = np.zeros((CLASSES, AGES))
    states = [
        checkpoint(kind, turn, uses, passed)
        for kind, turn, uses, passed in (
            (Kind.PROMPT_END, 0, 0, False),
            (Kind.ANSWER_END, 2, 0, False),
            (Kind.RUNG, 0, 1, True),
            (Kind.JUNCTION, 0, 5, False),
        )
    ]
    model.now = 7
    for state in states:
        model.changes(state)
    for state in states:
        cls = class_of(state)
        expected += naive_risk((0, 7), cls, time_scale(state, cls))
    assert np.array(model._risk_CA) == pytest.approx(expected)
    model.now = 300
    for state in states:
        model.changes(state)
    for state in states:
        cls = class_of(state)
        expected += naive_risk((7, 300), cls, time_scale(state, cls))
    assert np.array(model._risk_CA) == pytest.approx(expected)
    assert not np.any(model._uses_CA)
    model.now = 2000
    for state in states:
        cls = class_of(state)
        model.changes(state)
        expected += naive_risk((300, 2000), cls, time_scale(state, cls))
    assert np.array(model._risk_CA) == pytest.approx(expected)
    model.changes(states[0])  # counted already
    assert np.array(model._risk_CA) == pytest.approx(expected)
    assert sum(model._risk_CA[class_of(states[0])]) == pytest.approx(2000)


def test_the_oldest_age_has_no_end():
    model, old = ReuseModel(), checkpoint()
    model.now = 1_000_000
    model.changes(old)
    assert np.sum(model._risk_CA) == pytest.approx(1_000_000)
    assert model._risk_CA[0][-1] == pytest.approx(1_000_000 - EDGES[-1])


def test_a_use_is_counted_in_the_class_and_at_the_age_that_it_had():
    model, state = ReuseModel(), checkpoint(Kind.TAIL, now=0)
    before = class_of(state)
    model.now = 10
    model.used(state)
    assert model._uses_CA[before][age_class(10)] == 1
    assert sum(model._risk_CA[before]) == pytest.approx(10)
    assert (state.uses, state.last_use, state.counted) == (1, 10, 10)
    model.now = 14
    model.passed(state)
    assert sum(model._risk_CA[before + 4]) == pytest.approx(4)
    model.now = 15
    model.passed(state)  # that it was passed is known: nothing changes, nothing is counted
    assert state.counted == 14
    model.used(state)
    assert model._uses_CA[before + 4 + 2][age_class(5)] == 1
    assert np.sum(model._uses_CA) == 2
    assert state.uses == 2


def test_learning_counts_half_after_a_thousand_requests():
    model = ReuseModel()
    model._uses_CA[0][3], model._risk_CA[0][3] = 8, 800
    model.now = 1000
    model.learn([])
    assert (model._uses_CA[0][3], model._risk_CA[0][3]) == (4, 400)
    model.learn([])
    assert model._uses_CA[0][3] == 4


def test_rates_are_at_the_age_since_the_last_use():
    model = ReuseModel()
    rates = 1.0 + np.arange(CLASSES)[:, None] * 100 + np.arange(AGES)
    model._rate_CA = rates.tolist()
    state = checkpoint(Kind.JUNCTION)
    model.now = 7
    assert model.rate(state) == rates[class_of(state), 6]
    assert model.rate_if_covered(state) == rates[class_of(state) + 1, 6]
    covered = checkpoint(Kind.JUNCTION, covered=True)
    assert model.rate_if_covered(covered) == model.rate(covered)
    turn = checkpoint(Kind.PROMPT_END, turn=1)
    assert model.rate(turn) == rates[class_of(turn), 6]
    assert model.rate_if_covered(turn) == rates[class_of(turn) + 1, 6]
    used = checkpoint(uses=7)
    scale = 32 * 8 / 100
    assert model.rate(used) == rates[REPEATED, age_class(7 * scale)] * scale
    assert model.rate_if_covered(used) == model.rate(used)
    for kind in Kind:
        for turn in (0, 1, 2):
            new = checkpoint(kind, turn if kind <= Kind.ANSWER_END else 0)
            assert model.new_rate(kind, turn) == rates[class_of(new), 0]


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
        return self.model.observe(self.walk(tokens), resumed)


def counting(n, start=0):
    return list(range(start, start + n))


def test_a_prompt_uses_the_deepest_known_state_and_passes_the_others():
    tree = Tree()
    tree.add(counting(100))
    states = [tree.watch(counting(n)) for n in (20, 50, 80, 100)]
    assert tree.observe([*counting(90), 7]) == (0, 0)
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


def test_again_is_the_fork_that_would_save_most():
    tree = Tree()
    tree.add(counting(100))
    for n in (20, 60, 80):
        tree.add([*counting(n), 7])
    states = {n: tree.watch(counting(n)) for n in (20, 60, 80, 100)}
    assert tree.observe(counting(100)) == (0, 0)  # once is not often
    assert tree.observe(counting(100)) == (0, 80)  # all alike: the deepest fork saves most
    states[60].uses = 1000  # used far more often than the others
    assert tree.observe(counting(100)) == (0, 60)
    assert tree.observe(counting(100), resumed=states[60]) == (0, 80)
    assert tree.observe(counting(100), resumed=states[80]) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "turn"),
    [(Kind.PROMPT_END, 1), (Kind.ANSWER_END, 2), (Kind.JUNCTION, 0), (Kind.TAIL, 0),
     (Kind.RUNG, 0)],
)  # fmt: skip
def test_turn_says_what_a_prompt_goes_on_from(kind, turn):
    tree = Tree()
    tree.add(counting(100))
    tree.watch(counting(20), Kind.PROMPT_END)
    tree.watch(counting(60), kind)
    assert tree.observe(counting(70))[0] == turn
    assert tree.observe(counting(10))[0] == 0
    assert tree.observe([99])[0] == 0


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


def test_what_is_known_only_counts_as_well():
    """Neither pages nor KV are needed to learn: what was dropped is watched."""
    tree = Tree()
    tree.add(counting(100))
    state = tree.watch(counting(80), Kind.ANSWER_END)
    tree.store(state)
    tree.index.drop_kv(tree.walk(counting(100)).edges[0], 0)
    assert tree.observe(counting(90)) == (2, 0)
    assert state.uses == 1


# ---- after traffic ----


def prompt(n, *seed):
    return np.random.default_rng(seed).integers(0, 50_000, n).tolist()


def serve(cache, tokens, answer):
    """A whole request, without a model."""
    whole = np.array(tokens + answer, np.int32)
    lease = cache.acquire(whole[: len(tokens)], capacity_tokens=len(whole))
    for end in (len(tokens), len(whole)):
        wanted = {*lease.checkpoint_positions, end}
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
    cache._reuse.learn(list(cache._index.checkpoints()))
    cache.check_integrity()
    return cache


def test_traffic_tells_forks_tips_and_finished_turns_apart():
    served = after_chats(num_pages=60_000)
    reuse, now = served._reuse, served._reuse.now
    states = [state for state in served._index.checkpoints() if state.pages is not None]
    (fork,) = [state for state in states if state.position == 200 and state.is_fork()]
    assert fork.uses >= 30
    recent = [state for state in states if now - state.last_use < 40 and state is not fork]
    finished = [s for s in recent if s.passed and not s.uses and s.kind <= Kind.ANSWER_END]
    one_off = [
        s
        for s in recent
        if s.kind == Kind.ANSWER_END and not s.turn and not s.uses and not s.passed
    ]
    assert finished and one_off

    def values(group):
        return [checkpoint_value(state, SPEC, reuse) for state in group]

    assert min(values([fork])) > max(values(one_off))
    assert np.mean(values(one_off)) > np.mean(values(finished))
    assert min(map(reuse.rate, one_off)) > max(map(reuse.rate, finished))


def test_learning_is_deterministic():
    first, second = (after_chats(num_pages=1500) for _ in range(2))
    assert first.stats()["checkpoints_evicted"] > 0
    assert first._reuse._rate_CA == second._reuse._rate_CA
    assert first.digest() == second.digest()
