"""The baselines against naive models, and every engine through every geometry."""

import numpy as np
import pytest
from matrix import matrix_rows

from benchmarks.replay.engines import ENGINES
from benchmarks.replay.engines.marconi import Marconi
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.workloads import WORKLOADS
from megatron_hybrid.tools.replay.lru import Ceiling, LeastRecentlyUsed
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.request import Request
from megatron_hybrid.tools.replay.runner import replay

NEMOTRON = GEOMETRIES["nemotron-h-8b"]


def small_requests(seed, count=80):
    """Prompts over two tokens, so that they share, leave and extend each other all the time."""
    rng = np.random.default_rng(seed)
    histories = [np.empty(0, dtype=np.int32)]
    for i in range(count):
        start = histories[rng.integers(len(histories))]
        start = start[: rng.integers(0, len(start) + 1)]
        prompt = np.concatenate([start, rng.integers(0, 2, rng.integers(1, 9), dtype=np.int32)])
        output = rng.integers(0, 2, rng.integers(1, 5), dtype=np.int32)
        histories = [*histories[-9:], np.concatenate([prompt, output])]
        yield Request(prompt, output, i, 0, float(i))


def check(engine):
    """Recount what a baseline holds."""
    tokens = states = window_tokens = 0
    stack = [engine.tree.root]
    while stack:
        node = stack.pop()
        assert all(
            child.parent is node and child.start == node.end for child in node.children.values()
        )
        assert all(node.start < p <= node.end for p in node.states)
        assert node.pins == 0 or engine.running
        tokens += len(node.tokens)
        states += len(node.states)
        window_tokens += sum(min(position, engine.tree.window) for position in node.states)
        stack.extend(node.children.values())
    assert (tokens, states) == (engine.tree.num_tokens, engine.tree.num_states)
    assert window_tokens == engine.tree.num_window_tokens
    assert engine.bytes_held <= engine.budget


class NaiveLRU:
    """Every block and every state is an item with its last use: the oldest, of equals the one
    further on, goes first, blocks only when nothing follows them."""

    def __init__(self, block, state_bytes, budget):
        self.block, self.state_bytes, self.budget = block, state_bytes, budget
        self.blocks, self.states, self.tick = {}, {}, 0

    def run(self, prompt, output):
        self.tick += 1
        known = 0
        while self.key(prompt, known + self.block) in self.blocks:
            known += self.block
        limit = (len(prompt) - 1) // self.block * self.block
        if self.state_bytes:
            skipped = max(
                (p for p in range(1, min(known, limit) + 1) if self.key(prompt, p) in self.states),
                default=0,
            )
            saved = {skipped, min(known, limit), limit}
        else:
            skipped, saved = known, set()
        self.insert(prompt, saved)
        self.tick += 1
        whole = np.concatenate([prompt, output])
        last = len(whole) // self.block * self.block
        self.insert(whole, {last} if self.state_bytes else set())
        return skipped

    def key(self, tokens, n):
        return tuple(tokens[:n]) if n <= len(tokens) else None

    def insert(self, tokens, saved):
        for n in range(self.block, len(tokens) + 1, self.block):
            self.blocks[self.key(tokens, n)] = self.tick
        for n in saved - {0}:
            self.states[self.key(tokens, n)] = self.tick
        while len(self.blocks) * self.block + len(self.states) * self.state_bytes > self.budget:
            parents = {key[: -self.block] for key in self.blocks}
            items = [(tick, -len(k), 1, k) for k, tick in self.blocks.items() if k not in parents]
            items += [(tick, -len(k), 0, k) for k, tick in self.states.items()]
            _, _, is_block, key = min(items)
            if is_block:
                del self.blocks[key]
            self.states.pop(key, None)


@pytest.mark.parametrize(("block", "state_bytes"), [(1, 0), (4, 0), (2, 7), (4, 30)])
@pytest.mark.parametrize("seed", range(4))
def test_lru_is_a_plain_lru(block, state_bytes, seed):
    budget = 120
    engine = LeastRecentlyUsed(block, 1, state_bytes, budget)
    naive = NaiveLRU(block, state_bytes, budget)
    skipped = []
    for request in small_requests(seed):
        handle = engine.begin(request.prompt)
        skipped.append(handle.skipped_tokens)
        engine.finish(handle, np.concatenate([request.prompt, request.output]))
        check(engine)
        if handle.node is not None:
            assert handle.skipped_tokens == naive.run(request.prompt, request.output)
    assert sum(skipped) > 0


@pytest.mark.parametrize("seed", range(3))
def test_the_ceiling_is_the_longest_prefix_ever_seen(seed):
    requests = list(small_requests(seed))
    seen = []
    for request, skipped in zip(requests, replay(requests, Ceiling()).skipped_tokens):
        best = 0
        for other in seen:
            n = min(len(other), len(request.prompt))
            differ = np.flatnonzero(other[:n] != request.prompt[:n])
            best = max(best, int(differ[0]) if len(differ) else n)
        assert skipped == best
        seen.append(np.concatenate([request.prompt, request.output]))


def marconi(budget=1e12, alpha=1.0):
    return Marconi(NEMOTRON, NEMOTRON.state_bytes(), budget, alpha)


def run(engine, *prompts):
    requests = [Request(p, np.array([7] * 5, np.int32), i, 0, 0.0) for i, p in enumerate(prompts)]
    return replay(requests, engine).skipped_tokens


def test_marconi_saves_junctions_and_ends_and_hits_nowhere_else():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1000, (2, 200), dtype=np.int32)
    first = a[:100]
    fork = np.concatenate([a[:50], b[:30]])
    inside = np.concatenate([a[:70], b[100:130]])  # leaves the edge (50, 100] in its middle
    turn = np.concatenate([first, np.array([7] * 5, np.int32), b[40:60]])
    assert run(marconi(), first, fork, inside, turn) == [0, 0, 50, 105]


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_marconi_keeps_to_its_budget(alpha):
    engine = Marconi(NEMOTRON, 7 * NEMOTRON.kv_bytes_per_token, 0, alpha)
    engine.budget = 120 * NEMOTRON.kv_bytes_per_token
    skipped = 0
    for request in small_requests(1, count=200):
        handle = engine.begin(request.prompt)
        skipped += handle.skipped_tokens
        engine.finish(handle, np.concatenate([request.prompt, request.output]))
        check(engine)
    assert skipped > 0


def test_marconi_keeps_to_its_budget_where_answers_are_empty():
    """The state after the prompt has no room: nor has it when the request ends at the prompt."""
    prompt = np.arange(300, dtype=np.int32)
    engine = Marconi(NEMOTRON, NEMOTRON.state_bytes(), NEMOTRON.state_bytes() / 10, alpha=1.0)
    for _ in range(2):
        engine.finish(engine.begin(prompt), prompt)
        assert engine.bytes_held <= engine.budget
        check(engine)


def test_marconi_weighs_work_against_recency():
    """A long sequence, the least recently used one, goes if alpha is 0 and stays if it is large."""
    rng = np.random.default_rng(0)
    long, *short = (rng.integers(0, 1000, n, dtype=np.int32) for n in (20_000, 200, 200, 200, 200))
    budget = 20_600 * NEMOTRON.kv_bytes_per_token + 3.5 * NEMOTRON.state_bytes()
    turn = np.concatenate([long, np.array([7] * 5, np.int32), short[0]])
    assert run(marconi(budget, alpha=0.0), long, *short, turn)[-1] == 0
    assert run(marconi(budget, alpha=4.0), long, *short, turn)[-1] == 20_005


INSTALLED = [name for name, entry in ENGINES.items() if entry.installed]


@pytest.mark.parametrize("geometry", matrix_rows(GEOMETRIES, "nemotron-h-8b"))
@pytest.mark.parametrize("name", INSTALLED)
def test_every_engine_replays_every_geometry(name, geometry):
    requests = list(WORKLOADS["chat"].generate(60))
    possible = replay(requests, Ceiling()).skipped_tokens
    for in_flight, budget in ((1, 8e9), (8, 4e9)):
        build = list(ENGINES[name].build(GEOMETRIES[geometry], budget, in_flight).values())[-1]
        result = replay(requests, build(), in_flight)
        assert len(result.skipped_tokens) == len(requests)
        if in_flight == 1:  # no request finds what no request left
            assert all(s <= p for s, p in zip(result.skipped_tokens, possible))
            assert sum(result.skipped_tokens) > 0


@pytest.mark.parametrize("geometry", matrix_rows(GEOMETRIES, "gemma-3-27b"))
@pytest.mark.parametrize("name", INSTALLED)
def test_a_prompt_that_had_to_wait_for_room_does_not_hit_itself(name, geometry):
    """An engine may have computed and cached most of it before it finds that there is none."""
    prompts = np.random.default_rng(0).integers(0, 9999, (4, 30_000), np.int32)
    requests = [
        Request(prompt, prompt[:8], f"{i}", 0, float(i)) for i, prompt in enumerate(prompts)
    ]
    token_bytes = GEOMETRIES[geometry].kv_bytes_per_token
    for room_tokens in (40_000, 55_000, 90_000):
        builds = ENGINES[name].build(GEOMETRIES[geometry], room_tokens * token_bytes + 2e8, 4)
        for build in builds.values():
            assert replay(requests, build(), in_flight=4).skipped_tokens == [0] * 4


@pytest.mark.parametrize(("budget", "in_flight"), [(3e8, 1), (1e9, 1), (1e9, 8)])
def test_ours_leaves_the_cache_whole(budget, in_flight):
    engine = Ours(NEMOTRON.spec(), budget)
    replay(list(WORKLOADS["chat"].generate(60)), engine, in_flight)
    engine.cache.check_integrity()
    stats = engine.cache.stats()
    assert stats["leases"] == 0 and stats["pages_in_use"] == 0
    assert stats["pages"] * stats["page_bytes"] <= budget


def test_ours_runs_a_request_that_never_fits_beside_the_cache():
    requests = list(WORKLOADS["agent"].generate(3))
    result = replay(requests, Ours(NEMOTRON.spec(), 1e8))
    assert result.miss_reasons == ["too_large"] * 3 and result.skipped_share == 0


@pytest.mark.parametrize(("kind", "state_bytes"), [("lru", 0), ("lru", 10), ("marconi", 0)])
def test_baselines_run_a_prompt_that_never_fits_beside_the_cache(kind, state_bytes):
    """Whatever of it they hold: it has no room to resume from that."""
    token_bytes = NEMOTRON.kv_bytes_per_token
    if kind == "lru":
        engine = LeastRecentlyUsed(16, 1, state_bytes, 200)
    else:
        engine = Marconi(NEMOTRON, state_bytes, 200 * token_bytes, alpha=1.0)
    prompt = np.arange(300, dtype=np.int32)
    assert run(engine, prompt[:97], prompt, prompt[:180])[1] == 0
    assert engine.bytes_held <= engine.budget and engine.tree.num_tokens
    check(engine)


def test_windows_of_states_and_of_running_requests_are_in_the_budget():
    """Three bytes for each of the last ten tokens before a state, and of what runs."""
    engine = LeastRecentlyUsed(1, 1, 5, 195, window=10, window_bytes=3)
    first, second, huge = np.random.default_rng(0).integers(0, 99, (3, 180), np.int32)
    running = engine.begin(first[:40])
    assert engine.bytes_held == 40 + (5 + 30) + 30  # a state before the last token
    assert engine.begin(second[:40]) is None
    engine.finish(running, first[:42])
    assert engine.bytes_held == 42 + (5 + 30)
    alone = engine.begin(huge)  # it never fits, and runs beside the cache
    assert engine.bytes_held == 0
    short = engine.begin(second[:7])
    assert engine.bytes_held == 7 + (5 + 18) + 21
    engine.finish(alone, huge)
    engine.finish(short, second[:8])
    assert engine.bytes_held == 8 + (5 + 18) + (5 + 24)
    check(engine)


def test_the_windows_of_what_has_run_make_room_for_its_state():
    """9 tokens, 29 bytes for the state before the last, 27 for its windows; then 11 tokens, and a
    second state in their place."""
    engine = LeastRecentlyUsed(1, 1, 5, 75, window=10, window_bytes=3)
    prompt = np.arange(11, dtype=np.int32)
    engine.finish(engine.begin(prompt[:9]), prompt)
    assert engine.bytes_held == 11 + (5 + 24) + (5 + 30)
    assert engine.begin(prompt).skipped_tokens == 8


@pytest.mark.parametrize(("budget", "skipped"), [(355, 40), (260, 0), (190, 0)])
def test_the_longest_forward_of_a_prefill_is_in_the_budget(budget, skipped):
    """60 tokens in the local layers take 180 bytes, beside 60 for themselves; what they leave of
    the budget holds 40 other tokens and a state, or does not. In 190 bytes the forward is halved
    until it fits."""
    engine = LeastRecentlyUsed(1, 1, 5, budget, window=10, window_bytes=3)
    prompt, other = np.arange(40, dtype=np.int32), np.arange(100, 160, dtype=np.int32)
    engine.finish(engine.begin(prompt), prompt)
    running = engine.begin(other)
    assert running.node is not None
    engine.finish(running, other)
    assert engine.begin(np.arange(45, dtype=np.int32)).skipped_tokens == skipped
    check(engine)


@pytest.mark.parametrize(
    ("length", "reason"), [(36_000, "no_shared_prefix"), (46_000, "too_large")]
)
def test_a_prompt_whose_last_forward_has_no_room_is_computed_in_shorter_ones(length, reason):
    """Its first forward would have: windows roll, and what they give back is not enough."""
    engine = Ours(GEOMETRIES["gemma-3-27b"].spec(), 4e9)
    prompt = np.arange(length, dtype=np.int32)
    assert engine.cache.fits(20_000, 2048) and not engine.cache.fits(length, 2048)
    result = replay([Request(prompt, prompt[:10], "one", 0, 0.0)], engine)
    assert result.miss_reasons == [reason]


def documents_in_batches(seed, batches=10, documents=30):
    """Three rounds of questions about the documents of a batch; then there is another batch."""
    rng = np.random.default_rng(seed)

    def draw(low, high=None):
        return rng.integers(0, 1000, rng.integers(low, high or low + 1), dtype=np.int32)

    for batch in range(batches):
        texts = [draw(500, 2500) for _ in range(documents)]
        for turn in range(3):
            question = draw(40)
            for i, text in enumerate(texts):
                prompt = np.concatenate([text, question])
                yield Request(prompt, draw(100), documents * batch + i, turn, 0.0)


@pytest.mark.parametrize(
    ("geometry", "seed"),
    matrix_rows(
        [(geometry, seed) for geometry in ("llama-3-8b", "jamba-1.5-mini") for seed in range(2)],
        ("jamba-1.5-mini", 0),
    ),
)
def test_documents_in_use_outlive_those_that_were_popular(geometry, seed):
    """Two batches fit, so none is lost to anyone who goes by recency; the past teaches more than
    that, and must not teach less."""
    shape = GEOMETRIES[geometry]
    requests = list(documents_in_batches(seed))
    budget = 2 * 30 * (1700 * shape.kv_bytes_per_token + 2 * shape.state_bytes())
    ours = replay(requests, Ours(shape.spec(), budget))
    recent = replay(
        requests,
        LeastRecentlyUsed(16, shape.kv_bytes_per_token, shape.state_bytes(), budget),
    )
    possible = replay(requests, Ceiling()).skipped_share
    assert ours.skipped_share > max(recent.skipped_share, possible - 0.02)


def test_what_is_not_installed_says_so():
    entry = ENGINES["vllm"]
    missing = type(entry)(entry.what, entry.build, module="no_such_package.at_all")
    assert not missing.installed
