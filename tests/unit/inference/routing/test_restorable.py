"""RestorableIndex: the set built from its deltas equals what a search through the tree finds."""

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulator import Simulator, cached_paths, stored

from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.routing.prefix_hash import PrefixHash
from megatron_hybrid.inference.routing.restorable import Delta, RestorableIndex

FULL = KVGroup(2, 64)
SPECS = {
    "hybrid": CacheSpec(16, (FULL,), state_bytes=3000, hidden_bytes=64),
    "pure attention": CacheSpec(16, (FULL,), state_bytes=0, hidden_bytes=64),
    "two full groups": CacheSpec(16, (FULL, KVGroup(3, 128)), state_bytes=0, hidden_bytes=64),
    "window": CacheSpec(16, (KVGroup(2, 64, window=16), FULL), state_bytes=0, hidden_bytes=64),
    "state only": CacheSpec(16, (), state_bytes=3000, hidden_bytes=64),
}


def key(tokens, salt: str = "") -> int:
    """From the definition: 8 bytes of BLAKE2b of the tokens, keyed with the hash of the salt."""
    text = np.array(tokens, dtype="<i4").tobytes()
    digest = blake2b(text, digest_size=8, key=blake2b(salt.encode()).digest()).digest()
    return int.from_bytes(digest, "little")


def restorable(cache: PrefixCache) -> dict[int, int]:
    """Keys and positions of all that can be resumed, by a walk over the tree."""
    found = {}
    for salt, tokens, edge in cached_paths(cache):
        positions = [checkpoint.position for checkpoint in stored(edge)]
        if cache.mode == "restore" and not cache.spec.needs_state:
            positions += range(edge.start // 16 * 16 + 16, edge.held_end + 1, 16)
        found.update({key(tokens[:p], salt): p for p in positions})
    return found


def told(delta: Delta, known: dict[int, int]) -> dict[int, int]:
    """Apply a delta, with all that it promises."""
    if delta.cleared:
        known = {}
    assert set(delta.removed) <= set(known) and len(set(delta.removed)) == len(delta.removed)
    known = {each: p for each, p in known.items() if each not in delta.removed}
    assert not set(delta.added) & set(known)
    return known | delta.added


class RestorableMachine(RuleBasedStateMachine):
    """A tiny pool and few tokens: prefixes collide, blocks are split, and room runs out."""

    @initialize(
        spec=st.sampled_from(sorted(SPECS)),
        mode=st.sampled_from(["restore", "restore", "memory_only", "off"]),
        num_pages=st.integers(4, 90),
    )
    def make(self, spec, mode, num_pages):
        self.sim = Simulator(PrefixCache(SPECS[spec], num_pages, mode))
        self.index = RestorableIndex(self.sim.cache)
        self.known: dict[int, int] = {}
        self.running = []
        self.texts = [[]]

    @rule(
        of=st.integers(0, 99),
        part=st.floats(0, 1),
        new=st.lists(st.integers(0, 1), max_size=50),
        salt=st.sampled_from(["", "", "other"]),
    )
    def start(self, of, part, new, salt):
        base = self.texts[of % len(self.texts)]
        prompt = (base[: round(part * len(base))] + new)[:120]
        running = self.sim.start(prompt, salt) if prompt else None
        if running is not None:
            self.running.append(running)

    @precondition(lambda self: self.running)
    @rule(who=st.integers(0, 9), n=st.integers(1, 50), save=st.booleans())
    def forward(self, who, n, save):
        running = self.running[who % len(self.running)]
        if running.done == len(running.tokens):
            running.tokens.append(n % 2)
        self.sim.forward(running, min(n, len(running.tokens) - running.done), save=save)

    @precondition(lambda self: self.running)
    @rule(who=st.integers(0, 9))
    def fork(self, who):
        new = self.sim.fork(self.running[who % len(self.running)])
        if new is not None:
            self.running.append(new)

    @precondition(lambda self: self.running)
    @rule(who=st.integers(0, 9))
    def preempt(self, who):
        running = self.running.pop(who % len(self.running))
        if not running.done:
            self.sim.cancel(running)
            return
        again = self.sim.resume(self.sim.preempt(running))
        if again is not None:
            self.running.append(again)

    @precondition(lambda self: self.running)
    @rule(who=st.integers(0, 9), save=st.booleans())
    def finish(self, who, save):
        running = self.running.pop(who % len(self.running))
        self.sim.finish(running, save=save)
        self.texts.append(running.tokens)

    @rule(n=st.integers(0, 12), force=st.booleans())
    def evict(self, n, force):
        pool, evictor = self.sim.cache.allocator, self.sim.cache._evictor
        evictor.make_room(pool.num_free + n, force=force)

    @precondition(lambda self: len(self.texts) > 8)
    @rule()
    def clear(self):
        self.sim.cache.clear()
        self.texts = [[]]

    @rule()
    def ask(self):
        delta, pool = self.index.delta(), self.sim.cache.allocator
        free = (pool.ref_counts == 0) & (pool.cached_counts == 0)
        assert delta.pages_taken == np.count_nonzero(~free[1:])
        self.known = told(delta, self.known)
        assert self.known == restorable(self.sim.cache)

    def teardown(self):
        if hasattr(self, "index"):
            self.ask()


TestRestorableMachine = RestorableMachine.TestCase
TestRestorableMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_the_first_delta_has_the_pages_and_nothing_else():
    index = RestorableIndex(PrefixCache(SPECS["hybrid"], 50))
    delta = index.delta()
    assert (delta.pages_taken, delta.cleared, delta.removed, delta.added) == (0, False, [], {})


@pytest.mark.parametrize("spec", ["hybrid", "pure attention"])
def test_what_comes_and_goes_between_two_deltas_is_not_told(spec):
    sim = Simulator(PrefixCache(SPECS[spec], 50))
    index = RestorableIndex(sim.cache)
    sim.run([1] * 40)
    sim.cache.evict(50)
    delta = index.delta()
    assert not delta.removed and not delta.added and not delta.cleared


def test_a_restored_prefix_after_clear_is_told_as_new():
    sim = Simulator(PrefixCache(SPECS["hybrid"], 50))
    index = RestorableIndex(sim.cache)
    sim.run([1] * 40)
    index.delta()
    sim.cache.clear()
    sim.run([1] * 40)
    delta = index.delta()
    assert delta.cleared and not delta.removed
    assert delta.added == restorable(sim.cache) != {}


def test_an_ended_request_keeps_no_hash():
    sim = Simulator(PrefixCache(SPECS["hybrid"], 200))
    index = RestorableIndex(sim.cache)
    for start in range(5):
        sim.run(range(start, start + 40))
    assert not index._hashes


def test_keys_go_on_where_they_stopped():
    tokens = np.arange(100, dtype=np.int32)
    moving = PrefixHash("a")
    assert moving.keys(tokens[:60], [3, 50]) == [key(tokens[:3], "a"), key(tokens[:50], "a")]
    assert moving.keys(tokens, [50, 100]) == [key(tokens[:50], "a"), key(tokens, "a")]
    assert PrefixHash("").keys(tokens, [100]) != PrefixHash("a").keys(tokens, [100])


def test_a_salt_may_be_no_valid_unicode():
    tokens = np.arange(4, dtype=np.int32)
    assert PrefixHash("\ud800").keys(tokens, [4]) != PrefixHash("?").keys(tokens, [4])
