"""Eviction: its order, and that room is made or nothing happens."""

import gc
from unittest.mock import Mock

import numpy as np
import pytest
from simulator import Simulator
from small_index import SmallIndex, counting
from valued_edges import HYBRID, PURE, STATE_ONLY, Rates, edge, tail_key, valued_by

from megatron_hybrid.cache.eviction import CacheListener, Evictor, tail_start
from megatron_hybrid.cache.index import prefix_index
from megatron_hybrid.cache.index.tree import Edge, Kind
from megatron_hybrid.cache.lease import NO_LOCAL_END
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.policy.reuse import ReuseModel
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.report import CacheStats


@pytest.mark.parametrize(
    ("start", "held_end", "checkpoints", "expected"),
    [
        (0, 100, (), 0),  # no state can reach it: all of it
        (20, 100, (), 20),
        (0, 100, (40,), 48),  # the block of the checkpoint stays
        (0, 100, (48,), 48),
        (0, 100, (10, 40), 48),
        (0, 45, (40,), 45),  # the rest of one block frees no page: no tail
        (0, 100, (100,), 100),
        (20, 20, (), 20),  # nothing is held
    ],
)
@pytest.mark.parametrize("known", [0, 7])
def test_tail_start(start, held_end, checkpoints, expected, known):
    upper = edge(0, start) if start else None
    tail = edge(start, held_end + known + 1, checkpoints, upper, held_end=held_end)
    assert tail_start(tail, HYBRID) == expected


def test_an_edge_with_held_children_has_no_tail():
    upper = edge(0, 50)
    lower = edge(50, 60, parent=upper)
    assert tail_key(upper, HYBRID, Rates()) is None
    lower.held_end, upper.num_held_children = 50, 0
    assert tail_key(upper, HYBRID, Rates()) == (0, 0.0, 0)
    assert tail_key(lower, HYBRID, Rates()) is None
    assert tail_key(upper.parent, HYBRID, Rates()) is None


class Room(SmallIndex):
    """And an evictor over it; states have two pages, blocks one."""

    def __init__(self, spec=HYBRID, num_pages=101):
        super().__init__(num_pages, spec.kv_pages_per_block)
        self.rates, self.stats, self.records = Rates(), CacheStats(), []
        self.evictor = Evictor(
            spec, self.index, self.pool, self.stats, valued_by(self.rates, spec), self.record
        )

    def record(self, *decision):
        self.records.append(decision)

    def watch(self, tokens, rate):
        checkpoint = super().watch(tokens, now=self.rates.now)
        self.rates.rates[checkpoint] = rate
        return checkpoint

    def save(self, tokens, rate=1.0):
        checkpoint = self.watch(tokens, rate)
        pages = self.pool.allocate(2)
        self.index.store(checkpoint, pages, [])
        self.pool.release(pages)
        self.evictor.on_store(checkpoint)
        return checkpoint

    def stored(self):
        return {c.position for c in self.index.checkpoints() if c.pages is not None}

    def refresh(self):
        self.evictor.refresh(max(len(self.evictor.checkpoints), len(self.evictor.tails)))

    def make_room(self, more, **options):
        return self.evictor.make_room(self.pool.num_free + more, **options)


@pytest.fixture
def room():
    return Room()


class TestEvictor:
    def test_the_least_valuable_state_is_evicted_before_its_kv(self, room):
        for n, rate in ((32, 1.0), (64, 0.1), (96, 1.0)):
            room.add(counting(n, 1000 * n))
            room.save(counting(n, 1000 * n), rate)
        assert room.make_room(1)
        assert room.stored() == {32, 96}
        assert room.make_room(4)
        assert room.walk(counting(64, 64_000)).depth == 0
        assert room.walk(counting(64, 64_000)).known == 64
        assert (room.stats.checkpoints_evicted, room.stats.kv_blocks_evicted) == (1, 4)
        # 1.0 * 32 / (2 + 2) against 1.0 * 96 / (2 + 6)
        assert room.make_room(1)
        assert room.stored() == {96}

    def test_a_tail_that_starts_inside_a_block_is_dropped_whole(self, room):
        room.add(counting(40, 0))
        room.save(counting(20, 0))
        room.add([*counting(20, 0), *counting(30, 500)])
        free = room.pool.num_free
        assert room.make_room(2)
        # (20, 40]: block 2, and its hold on block 1, whose page the edge above keeps; then the
        # last block of (20, 50]
        assert room.walk(counting(40, 0)).depth == 20
        assert room.walk([*counting(20, 0), *counting(30, 500)]).depth == 48
        assert room.pool.num_free == free + 2
        room.index.check_integrity()

    def test_unpinned_kv_is_evicted_with_its_state(self, room):
        for start, rate in ((0, 1.0), (1000, 0.9)):
            pages = room.add(counting(320, start))
            room.save(counting(320, start), rate)
        room.pool.retain(pages)
        room.refresh()
        assert room.make_room(22) and room.walk(counting(320, 1000)).deepest_checkpoint()
        room.add(counting(320, 2000))
        room.save(counting(320, 2000), 1.0)
        room.pool.release(pages)
        room.evictor.on_release(room.walk(counting(320, 1000)), NO_LOCAL_END)
        assert room.make_room(1) and not room.walk(counting(320, 1000)).deepest_checkpoint()
        assert room.walk(counting(320, 2000)).deepest_checkpoint()

    def test_items_pinned_by_many_requests_are_scanned_once(self):
        room = Room(num_pages=1001)
        for start in range(0, 100_000, 1000):
            room.pool.retain(room.add(counting(96, start)))
        keys = Mock(wraps=room.evictor.tails.key)
        room.evictor.tails.key = keys
        for expected in (200, 0, 0):  # once on the way, once before it goes
            keys.reset_mock()
            assert not room.make_room(401) and keys.call_count <= expected
        held = room.walk(counting(96, 50_000)).pages(6)
        room.pool.release(held)
        keys.reset_mock()
        assert room.make_room(6) and keys.call_count < 10
        assert room.walk(counting(96, 50_000)).depth == 0
        assert (
            sum(room.walk(counting(96, start)).depth for start in range(0, 100_000, 1000))
            == 99 * 96
        )

    def test_a_held_edge_that_grows_can_lose_what_grew(self, room):
        pages = room.add(counting(96, 0))
        room.pool.retain(pages)
        assert not room.make_room(95)
        more = room.pool.allocate(2).reshape(-1, 1)
        room.index.insert("", np.array(counting(128, 0), np.int32), np.concatenate([pages, more]))
        room.pool.release(more)
        assert room.make_room(2)
        assert room.walk(counting(128, 0)).depth == 96

    def test_the_end_of_a_tail_that_a_request_holds_keeps_what_is_before_it(self, room):
        pages = room.add(counting(96, 0))
        room.pool.retain(pages[3])
        assert not room.make_room(5)
        assert room.walk(counting(96, 0)).depth == 64
        assert not room.make_room(1)
        assert room.make_room(3, force=True)  # out of the index; the request keeps its page
        assert room.walk(counting(96, 0)).depth == 0
        assert room.pool.ref_counts[pages[3]] == 1
        room.index.check_integrity()

    @pytest.mark.parametrize("force", [False, True])
    def test_an_item_whose_eviction_fails_stays_in_its_heap(self, room, force):
        pages = room.add(counting(96, 0))
        room.save(counting(96, 0))
        if force:
            room.pool.retain(room.walk(counting(96, 0)).deepest_checkpoint().pages)
        failing = Mock(spec=CacheListener)
        failing.on_evict_state.side_effect = OSError("no space left")
        room.evictor.listeners.append(failing)
        for _ in range(2):
            with pytest.raises(OSError, match="no space left"):
                room.make_room(8, force=force)
        room.evictor.listeners.clear()
        if force:
            room.pool.release(room.walk(counting(96, 0)).deepest_checkpoint().pages)
        assert room.make_room(8)
        assert not room.pool.ref_counts[pages].any() and not room.stored()

    def test_force_takes_a_pinned_state_only_when_nothing_else_is_left(self, room):
        room.add(counting(32, 0))
        room.save(counting(32, 0), 0.001)
        room.add(counting(32, 1000))
        room.save(counting(32, 1000), 9.0)
        pinned = room.walk(counting(32, 0)).deepest_checkpoint()
        room.pool.retain(pinned.pages)
        assert room.make_room(4, force=True)
        assert pinned.pages is not None
        assert room.make_room(2, force=True)
        assert pinned.pages is None

    def test_only_what_is_worth_less_makes_room_for_a_state(self):
        room = Room(num_pages=1 + 2 * (2 + 2) + 2)
        for start, rate in ((0, 1.0), (1000, 2.0)):
            room.add(counting(32, start))
            room.save(counting(32, start), rate)
        assert room.evictor.make_room_for(2, 0.0)  # two are free
        assert not room.evictor.make_room_for(3, 8.0)  # worth as much, used as lately
        assert len(room.stored()) == 1 and room.stats.checkpoints_evicted == 0
        room.rates.now = 1
        assert room.evictor.make_room_for(3, 8.0)  # the first: 1.0 * 32 / 4, but older
        assert room.stats.checkpoints_evicted == 1
        room.rates.now = 0
        assert not room.evictor.make_room_for(11, 1e9)  # there are not as many
        assert room.stats.checkpoints_evicted == 1

    def test_a_state_dropped_leaves_more_to_rebuild_to_the_next_one(self, room):
        """Its key rose: it is noticed when it comes up, before the other is dropped."""
        room.add(counting(64, 0))
        room.save(counting(32, 0), 1.0)
        room.save(counting(64, 0), 1.0)  # 32 tokens: 8.0; without the one at 32: 64 / 6 = 10.7
        room.add(counting(36, 1000))
        room.save(counting(36, 1000), 1.05)  # 1.05 * 36 / 4 = 9.5
        room.evictor.drop_checkpoint(room.walk(counting(32, 0)).deepest_checkpoint())
        room.make_room(1)
        assert room.stored() == {64}

    def test_a_state_covered_since_is_valued_again(self, room):
        """Its KV is no longer charged to it: now it is worth 1.0 * 32 / 2."""
        for start in (0, 1000):
            room.add(counting(64, start))
        low = room.save(counting(32, 0), 1.0)  # 1.0 * 32 / 4
        other = room.save(counting(32, 1000), 1.5)  # 1.5 * 32 / 4
        room.save(counting(64, 0), 9.0)
        room.make_room(1 + 2)  # the tail behind 32 of the other first
        assert low.pages is not None and other.pages is None

    @pytest.mark.parametrize("on_one_edge", [True, False])
    def test_a_state_is_worth_less_once_there_is_one_before_it(self, on_one_edge):
        room = Room(num_pages=1000)
        room.add(counting(320, 0))
        tip = room.save(counting(320, 0))  # 320 / 22
        if not on_one_edge:
            room.add([*counting(160, 0), 7])
        room.add(counting(240, 1000))
        other = room.save(counting(240, 1000))  # 240 / 17
        assert room.evictor.checkpoints.least() == (1, 240 / 17, 0)
        middle = room.save(counting(160, 0))  # now 160 / 12, or to the fork 160 / 12
        room.refresh()
        room.make_room(3)  # without the fork's tail
        assert [c.pages is None for c in (tip, middle, other)] == [True, False, False]

    def test_in_pure_attention_a_tail_is_cut_down_to_its_least_valuable_blocks(self):
        room = Room(PURE)
        room.add(counting(160, 0))
        leaf = room.walk(counting(160, 0)).edges[-1]
        for position, rate in ((64, 0.5), (160, 0.01)):  # a document, and the answer behind it
            room.rates.rates[room.index.watch(leaf, position, Kind.JUNCTION, 0)] = rate
        room.add(counting(160, 1000))
        other = room.walk(counting(160, 1000)).edges[-1]
        room.rates.rates[room.index.watch(other, 160, Kind.JUNCTION, 0)] = 0.1
        room.refresh()
        assert room.make_room(8)
        depths = [room.walk(counting(160, start)).depth for start in (0, 1000)]
        assert depths == [64, 128]  # all of the answer, then the end of what is worth more than it
        assert room.make_room(8)
        depths = [room.walk(counting(160, start)).depth for start in (0, 1000)]
        assert depths == [64, 0]

    def test_in_pure_attention_tails_and_states_are_compared(self):
        room = Room(PURE)
        room.add(counting(2, 1000))
        room.save(counting(2, 1000), 8.0)  # worth 4
        room.add(counting(32, 0))
        tail = room.watch(counting(32, 0), 5 / 16)
        assert room.make_room(1)
        assert (room.stored(), room.walk(counting(32, 0)).depth) == (set(), 32)
        room.save(counting(2, 1000), 8.0)
        room.rates.rates[tail] = 3 / 16
        room.refresh()
        assert room.make_room(1)
        assert (room.stored(), room.walk(counting(32, 0)).depth) == ({2}, 16)


def simulator(spec=HYBRID, num_pages=100, mode="restore"):
    return Simulator(PrefixCache(spec, num_pages, mode))


def prompt(n, seed):
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()


def skipped(sim, tokens, salt=""):
    return sim.cache.match(np.array(tokens, np.int32), salt).skipped_tokens


def serve(sim, tokens, *positions):
    """A whole request that saves states at these positions only (default: its end)."""
    running = sim.start(tokens)
    running.lease.wanted = dict.fromkeys(positions or (len(tokens),), Kind.PROMPT_END)
    if running.done < len(tokens):
        assert sim.forward(running, len(tokens) - running.done)
    sim.finish(running, save=False)
    sim.check()
    return running


def test_what_is_never_used_again_sinks():
    """Long prompts save most per page, but where none comes back the new ones displace the old."""
    sim = simulator(num_pages=1 + (20 + 2) + 3 * (10 + 2))
    valuable = prompt(320, 0)
    serve(sim, valuable)
    kept = []
    for seed in range(1, 40):
        serve(sim, prompt(160, seed))
        kept.append(skipped(sim, valuable))
    assert kept[:3] == [320] * 3
    assert kept[-1] == 0
    assert skipped(sim, prompt(160, 39)) == 160


def test_what_is_held_and_gone_is_not_remembered_for_ever():
    """A system prompt that always some request holds; behind it edges come, are joined and go."""
    cache = PrefixCache(PURE, 100)
    text = np.array(prompt(2000, 1), np.int32)

    def start(tokens):
        lease = cache.acquire(tokens, capacity_tokens=len(tokens))
        cache.restored(lease)
        cache.commit(lease, tokens, len(tokens))
        return lease

    holding = start(text[:512])
    edges = sum(isinstance(each, Edge) for each in gc.get_objects())
    for i in range(200):
        following = start(text[:512])
        cache.release(holding)
        holding = following
        for length in (612 + i % 300, 1000):
            cache.release(start(text[:length]))
            cache.evict(60)
    more = sum(isinstance(each, Edge) for each in gc.get_objects()) - edges
    assert more < 50
    cache.check_integrity()


def test_what_is_held_and_enters_a_queue_meanwhile_is_forced_out_once():
    """As an edge whose last child with KV is forced out."""
    room, gone = Room(PURE), []
    prompts = [counting(320, start) for start in (0, 1000, 2000)]
    for tokens in prompts:
        room.pool.retain(room.add(tokens))
    edges = [room.walk(tokens).edges[-1] for tokens in prompts]
    assert not room.make_room(99)

    class Again(CacheListener):
        def on_evict_blocks(self, edge, start):
            gone.append(edge)
            if edge is edges[0]:
                room.evictor.add(edges[1])

    room.evictor.listeners.append(Again())
    for _ in range(2):
        assert not room.make_room(99, force=True)  # the requests keep their pages
        assert gone == edges
    room.index.check_integrity()


def test_what_lies_under_a_running_request_can_be_had_when_nothing_else_is_left():
    """The running request computed the same prefix twice (no single flight): the tree holds the
    first's blocks, with the second's on top. The second alone must be able to use the pool."""
    sim = simulator(num_pages=1 + 12, mode="memory_only")
    tokens = prompt(180, 1)
    first, second = sim.start(tokens[:64]), sim.start(tokens[:64])
    assert sim.forward(first, 64)
    assert sim.forward(second, 64)
    second.tokens += tokens[64:]
    assert sim.forward(second, 16)
    sim.cancel(first)
    assert sim.cache.stats()["pages_cached"] == 4
    assert sim.forward(second, 100)  # all 12 pages
    sim.check()
    assert sim.cache.stats()["pages_free"] == 0


def test_without_kv_pages_the_tokens_in_the_tree_are_bounded(monkeypatch):
    monkeypatch.setattr(prefix_index, "MIN_KNOWN_TOKENS", 0)
    sim = simulator(STATE_ONLY, num_pages=3)
    for seed in range(12):
        sim.run(prompt(500, seed))
    assert sim.cache.stats()["cached_tokens"] <= 3 * 1024
    assert skipped(sim, prompt(500, 11)) == 500


@pytest.mark.parametrize("step", [10, 70])
def test_no_state_is_overpriced_once_a_request_has_released_blocks_of_its_window(step, monkeypatch):
    """While a request holds them, evicting a state frees less; then its key falls at once."""
    monkeypatch.setattr(ReuseModel, "rate", lambda *args: 0.5)
    window = CacheSpec(
        16, (KVGroup(2, 64), KVGroup(2, 64, window=32)), state_bytes=4000, hidden_bytes=64
    )
    sim = Simulator(PrefixCache(window, 400))
    cache, prices = sim.cache, set()
    running = sim.start(counting(100, 0), declared=[20, 40, 60], chunk=step, room=40)
    running.tokens += [7] * 40

    def check(end=140):
        """Of states on the request's path."""
        for state in [s for s in cache.contents.stored_checkpoints() if s.position <= end]:
            value = cache.policy.state_value(state, cache.allocator.ref_counts)
            assert state.queued <= (1, value, state.last_use)
            prices.add((state.position, state.queued[1]))

    while running.lease.done < 140:
        assert sim.forward(running, step)
        check()
    cache.release(running.lease)
    check()
    again = sim.start([*running.tokens[:60], *counting(40, 500)], chunk=step)
    assert again.lease.skipped_tokens == 60  # inside a block, which was copied
    check(60)
    assert len(prices) > len({position for position, _ in prices})
