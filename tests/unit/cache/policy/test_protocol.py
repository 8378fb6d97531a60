"""Any policy leaves the cache whole, also one that decides by whim; two methods make a policy."""

import random
from collections import OrderedDict

import numpy as np
import pytest
from hybrid_extras.lru import LRUPolicy
from simulator import Simulator

from megatron_hybrid.cache.index.tree import NO_ORIGIN, Kind
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.policy.protocol import Policy
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.tools.replay.ours import Ours

FULL = KVGroup(2, 64)
SPECS = {
    "hybrid": CacheSpec(16, (FULL,), state_bytes=4000, hidden_bytes=64),
    "window": CacheSpec(16, (FULL, KVGroup(2, 64, window=32)), state_bytes=4000, hidden_bytes=64),
    "pure": CacheSpec(16, (FULL,), state_bytes=0, hidden_bytes=64),
    "states only": CacheSpec(16, (), state_bytes=4000, hidden_bytes=64),
}


class EndsOnly(Policy):
    """The least that a policy has to say."""

    def __init__(self, spec):
        self.spec = spec

    def positions(self, prompt):
        return ({prompt.length: Kind.PROMPT_END} if prompt.skipped < prompt.length else {}), {}

    def on_request(self, path, resumed, prompt_tokens):
        self.now += 1
        return NO_ORIGIN, 0


class Whim(EndsOnly):
    """Answers at random, and differently each time."""

    interval_tokens = 48

    def __init__(self, spec, seed):
        super().__init__(spec)
        self._random = random.Random(seed)
        self.asked = set()

    def _whim(self, name, *choices):
        self.asked.add(name)
        return self._random.choice(choices)

    def positions(self, prompt):
        places = range(prompt.skipped + 1, prompt.length + 1)
        few = self._random.sample(places, min(3, len(places)))
        return {p: self._random.choice(list(Kind)) for p in few[1:]}, dict.fromkeys(
            few[:1], Kind.TAIL
        )

    def state_value(self, checkpoint, ref_counts):
        return self._whim("state_value", 0.0, 1.0, 2.0)

    def tail_value(self, edge):
        return self._whim("tail_value", None, 0.0, 1.5)

    def equal_start(self, edge, start):
        return self._whim("equal_start", start, (edge.held_end - 1) // 16 * 16)

    def new_value(self, new):
        return self._whim("new_value", 0.0, 1.0, float("inf"))

    def replaces(self, new):
        return new.previous is not None and self._whim("replaces", True, False)

    def victim(self, evictable):
        found = list(evictable.candidates())
        if not found or self._whim("victim", True, False):
            return evictable.least()
        return self._random.choice(found), (1, self._random.random(), 0)

    def admission_value(self, running, held_back):
        return self._whim("admission_value", 0.0, 5.0, float("inf"))

    def maintain(self, evictable):
        evictable.refresh(3)


def prompt(rng):
    """Of few kinds of starts, so that prompts share and leave each other."""
    start = np.random.default_rng(rng.randrange(4)).integers(0, 99, 120).tolist()
    return [*start[: rng.randrange(1, 121)], *(rng.randrange(99) for _ in range(rng.randrange(40)))]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_can_break_the_cache(name, seed):
    policy, rng = Whim(SPECS[name], seed), random.Random(seed)
    sim = Simulator(PrefixCache(SPECS[name], 40, policy=policy))
    running = []
    for _ in range(120):
        if len(running) < 3 and (request := sim.start(prompt(rng), chunk=40)):
            running.append(request)
        if running:
            request = running[rng.randrange(len(running))]
            left = len(request.tokens) - request.lease.done
            if left and sim.forward(request, min(40, left)):
                continue
            running.remove(request)
            sim.finish(request)
        sim.check()
    for request in running:
        sim.cancel(request)
    sim.check()
    assert "victim" in policy.asked and policy.asked & {"admission_value", "new_value"}
    assert sim.cache.num_evicted


@pytest.mark.parametrize("name", SPECS)
def test_two_methods_make_a_policy(name):
    """The end of a prompt is restored, and what was used longest ago goes."""
    sim = Simulator(PrefixCache(SPECS[name], 60, policy=EndsOnly(SPECS[name])))
    tokens = [np.random.default_rng(seed).integers(0, 999, 64).tolist() for seed in range(70)]
    for each in tokens:
        sim.run(each)
        assert sim.cache.match(np.array(each, np.int32)).skipped_tokens >= 63
    assert not sim.cache.match(np.array(tokens[0], np.int32)).skipped_tokens
    sim.check()


@pytest.mark.parametrize("room", [1, 5, 12])
def test_whole_prompts_go_as_from_an_lru_list(room):
    """A list of all that was served, the oldest first."""
    hybrid, length = SPECS["hybrid"], 64
    prompt_pages = length // 16 + hybrid.checkpoint_pages  # with the state at its end
    engine = Ours(hybrid, room * prompt_pages * hybrid.page_bytes, LRUPolicy(hybrid))
    cached = OrderedDict()
    for number in np.random.default_rng(room).zipf(1.3, 400) % 20:
        tokens = np.random.default_rng(number).integers(0, 50_000, length).astype(np.int32)
        running = engine.begin(tokens)
        engine.finish(running, tokens)
        assert running.skipped_tokens == (length if number in cached else 0)
        cached[number] = None
        cached.move_to_end(number)
        if len(cached) > room:
            cached.popitem(last=False)
    engine.cache.check_integrity()
    assert engine.cache.stats()["checkpoints_evicted"] > 0
