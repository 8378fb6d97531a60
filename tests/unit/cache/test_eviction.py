"""Eviction: the order of what goes, the lazy heap, and that room is made or nothing happens."""

import numpy as np
import pytest
from simulator import Simulator

from megatron_hybrid.cache.eviction import (
    EvictionQueue,
    checkpoint_key,
    checkpoint_value,
    rebuild_tokens,
    tail_key,
    tail_start,
)
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.tree import Checkpoint, Edge

FULL = KVGroup(2, 64)
HYBRID = CacheSpec(16, (FULL,), state_bytes=4000, hidden_bytes=64)  # checkpoints of 2 pages
PURE = CacheSpec(16, (FULL,), state_bytes=0, hidden_bytes=64)
STATE_ONLY = CacheSpec(16, (), state_bytes=4000, hidden_bytes=64)


def edge(start, end, checkpoints=(), parent=None, spec=HYBRID):
    parent = parent or Edge(None, 0, np.zeros(start, np.int32), np.zeros((0, 1), np.int32))
    blocks = spec.num_blocks(end) - start // 16
    tokens, pages = np.arange(end - start, dtype=np.int32), np.zeros((blocks, 1), np.int32)
    new = Edge(parent, start, tokens, pages)
    new.first_block = start // 16
    parent.children[start] = new
    for position in checkpoints:
        new.checkpoints[position] = Checkpoint(position, np.zeros(2, np.int32), [])
        new.checkpoints[position].edge = new
    return new


@pytest.mark.parametrize(
    ("start", "end", "checkpoints", "expected"),
    [
        (0, 100, (), 0),  # no state can reach it: all of it
        (20, 100, (), 20),
        (0, 100, (40,), 48),  # the block of the checkpoint stays
        (0, 100, (48,), 48),
        (0, 100, (10, 40), 48),
        (0, 45, (40,), 45),  # the rest of one block frees no page: no tail
        (0, 100, (100,), 100),
    ],
)
def test_tail_start(start, end, checkpoints, expected):
    assert tail_start(edge(start, end, checkpoints), HYBRID) == expected


def test_tail_start_without_blocks_is_the_checkpoint():
    assert tail_start(edge(0, 100, (40,)), STATE_ONLY) == 40


def test_an_edge_with_children_has_no_tail():
    upper = edge(0, 50)
    edge(50, 60, parent=upper)
    assert tail_key(upper, HYBRID) is None


@pytest.mark.parametrize(
    ("above", "on_edge", "position", "expected"),
    [((), (), 80, 80), ((20,), (), 80, 60), ((20,), (60, 80, 90), 80, 20), ((20,), (90,), 90, 70)],
)
def test_rebuild_tokens_counts_from_the_next_best_state(above, on_edge, position, expected):
    lower = edge(50, 100, on_edge, parent=edge(0, 50, above))
    assert rebuild_tokens(lower, position, needs_state=True) == expected
    assert rebuild_tokens(lower, position, needs_state=False) == 1


def test_unreachable_kv_goes_before_any_state():
    kv, state = edge(0, 100), edge(0, 100, (1,))
    kv.last_access = 10**9
    assert tail_key(kv, HYBRID) < checkpoint_key(state.checkpoints[1], HYBRID)


def test_the_least_recent_tail_goes_first():
    old, new = edge(0, 100), edge(0, 100)
    old.last_access, new.last_access = 3, 4
    assert tail_key(old, HYBRID) < tail_key(new, HYBRID)
    assert tail_key(old, PURE) < tail_key(new, PURE)


def test_a_state_is_worth_the_tokens_it_saves_per_page():
    long, short = edge(0, 1000, (1000,)), edge(0, 100, (100,))
    short.checkpoints[100].last_access = 99
    keys = [checkpoint_key(e.checkpoints[e.end], HYBRID) for e in (short, long)]
    assert keys == [(1, 50.0, 99), (1, 500.0, 0)]
    # used since the clock moved on by more than the difference, the short one is worth more
    short.checkpoints[100].clock = 451.0
    assert checkpoint_key(short.checkpoints[100], HYBRID) > keys[1]


def test_checkpoint_value_of_nothing_held():
    assert checkpoint_value(10, 0) == 10


class Item:
    def __init__(self, key):
        self.key, self.queued = key, None


def drain(queue):
    items = []
    while queue.least() is not None:
        items.append(queue.pop())
    return items


class TestEvictionQueue:
    def make(self, *keys):
        queue = EvictionQueue(lambda item: item.key)
        items = [Item(key and (0, key, 0)) for key in keys]
        for item in items:
            queue.add(item)
        return queue, items

    def test_least_key_first_and_first_come_among_equals(self):
        queue, (a, b, c, d) = self.make(3.0, 1.0, 2.0, 1.0)
        assert drain(queue) == [b, d, c, a]

    def test_a_key_that_rose_is_noticed(self):
        queue, (a, b) = self.make(1.0, 2.0)
        a.key = (0, 3.0, 0)
        assert drain(queue) == [b, a]

    def test_a_key_that_fell_is_told(self):
        queue, (a, b) = self.make(2.0, 1.0)
        a.key = (0, 0.5, 0)
        queue.lowered(a)
        assert drain(queue) == [a, b]

    def test_an_item_that_is_none_any_more_is_dropped_and_may_come_back(self):
        queue, (a, b) = self.make(1.0, 2.0)
        a.key = None
        assert queue.least() == (0, 2.0, 0)
        a.key = (0, 5.0, 0)
        queue.add(a)
        queue.add(a)
        assert drain(queue) == [b, a]

    def test_no_key_no_entry(self):
        queue, _ = self.make(None)
        assert queue.least() is None


def simulator(spec=HYBRID, num_pages=100, mode="restore"):
    return Simulator(PrefixCache(spec, num_pages, mode))


def prompt(n, seed):
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()


def skipped(sim, tokens, salt=""):
    return sim.cache.match(np.array(tokens, np.int32), salt).skipped_tokens


def test_kv_without_a_state_goes_first_and_the_newest_last():
    sim = simulator(num_pages=41)
    a, b = prompt(160, 1), prompt(160, 2)
    running = sim.start(a)  # 10 pages, cancelled: no state reaches them
    sim.forward(running, 160, save=False)
    sim.cancel(running)
    sim.run(b)  # 10 + 2
    assert sim.cache.evict(5) == 5
    sim.check()
    assert sim.cache.stats()["kv_blocks_evicted"] == 5
    assert sim.cache.match(np.array(a, np.int32)).shared_tokens == 80
    assert skipped(sim, b) == 160


def test_among_states_the_cheap_to_rebuild_goes_first():
    sim = simulator()
    long, short = prompt(320, 1), prompt(32, 2)
    sim.run(long)
    sim.run(short)
    assert sim.cache.evict(1) == 2
    assert (skipped(sim, long), skipped(sim, short)) == (320, 0)
    assert sim.cache.stats()["checkpoints_evicted"] == 1


@pytest.mark.parametrize("on_one_edge", [True, False])
def test_a_state_is_worth_less_once_there_is_one_below_it(on_one_edge):
    sim = simulator()
    long, other = prompt(320, 1), prompt(240, 2)
    if on_one_edge:
        running = sim.start(long)
        reservations = [sim.cache.reserve_checkpoint(running.lease, p) for p in (320, 160)]
        sim.forward(running, 320, save=False)
        for reservation in reservations:
            sim.publish(running, reservation)
        sim.finish(running)
    else:
        sim.run(long)
        sim.run(long[:160])
    sim.run(other)
    sim.cache.evict(1)
    assert (skipped(sim, long), skipped(sim, other)) == (160, 240)
    sim.cache.evict(12)  # its KV behind 160, then the state at 160
    assert (skipped(sim, long), skipped(sim, other)) == (0, 240)


def test_what_is_used_again_outlives_what_is_not():
    """One page budget for three prompts; A is used between all others and stays."""
    sim = simulator(num_pages=3 * 12 + 1)
    a = prompt(160, 0)
    sim.run(a)
    for seed in range(1, 12):
        sim.run(prompt(160, seed))
        assert sim.run(a).lease.report.skipped_tokens == 160


def test_what_is_never_used_again_sinks():
    """Each victim moves the clock by what it was worth, so even the most valuable goes in time."""
    sim = simulator(num_pages=1 + (20 + 2) + 3 * (10 + 2))
    valuable = prompt(320, 0)
    sim.run(valuable)
    kept = []
    for seed in range(1, 15):
        sim.run(prompt(160, seed))
        kept.append(skipped(sim, valuable))
    assert kept[:5] == [320] * 5
    assert kept[-1] == 0
    assert sim.cache.stats()["checkpoints_no_room"] == 0


def test_old_valuable_states_give_way_to_small_ones_that_keep_coming():
    """A refused checkpoint ages what refused it (Landlord), so nothing is kept for ever."""
    sim = simulator(num_pages=1 + 2 * (20 + 2) + 3)
    for seed in (1, 2):
        sim.run(prompt(320, seed))
    small = prompt(48, 3)
    got = [sim.run(small).lease.report.skipped_tokens for _ in range(30)]
    assert got[-1] == 48
    assert sim.cache.stats()["checkpoints_no_room"] > 0


def test_pinned_things_are_passed_over():
    sim = simulator()
    tokens = prompt(160, 1)
    sim.run(tokens)
    lease = sim.cache.acquire(np.array(tokens, np.int32), capacity_tokens=161)
    assert sim.cache.evict(1000) == 0
    assert skipped(sim, tokens) == 160  # the checkpoint is being restored
    sim.cache.restored(lease)
    assert sim.cache.evict(1000) == 2  # the checkpoint; its blocks are in use
    sim.cache.release(lease)
    sim.check()
    sim.cache.evict(1000)
    assert sim.cache.allocator.num_free == 99
    sim.check()


def test_the_blocks_of_running_requests_stay_in_the_tree():
    sim = simulator()
    tokens = prompt(160, 1)
    long, short = sim.start(tokens), sim.start(tokens[:64])
    sim.forward(long, 160, save=False)
    sim.forward(short, 64, save=False)
    assert sim.cache.evict(1000) == 0
    assert sim.cache.match(np.array(tokens, np.int32)).shared_tokens == 160
    sim.cancel(long)
    assert sim.cache.evict(1) == 1
    assert sim.cache.match(np.array(tokens, np.int32)).shared_tokens == 144
    sim.check()


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


def test_decisions_are_the_same_in_every_run():
    digests = []
    for _ in range(2):
        sim = simulator(num_pages=30)
        for i in range(30):
            base = prompt(100, i % 3)
            sim.run(base[: 10 + 7 * (i % 13)] + prompt(20, i), answer=prompt(i % 5, 99))
        assert sim.cache.stats()["checkpoints_evicted"] > 0
        digests.append(sim.cache.digest())
    assert digests[0] == digests[1]


def test_without_kv_pages_the_tokens_in_the_tree_are_bounded():
    sim = simulator(STATE_ONLY, num_pages=3)
    for seed in range(12):
        sim.run(prompt(500, seed))
    assert sim.cache.stats()["cached_tokens"] <= 3 * 1024
    assert skipped(sim, prompt(500, 11)) == 500


def test_pure_attention_drops_the_least_recent_tail_block_by_block():
    sim = simulator(PURE, num_pages=100)
    a, b = prompt(160, 1), prompt(160, 2)
    sim.run(a)
    sim.run(b)
    assert sim.cache.evict(6) == 6
    # two last hidden states (one token each) are worth least, then the end of a
    assert (skipped(sim, a), skipped(sim, b)) == (96, 159)
