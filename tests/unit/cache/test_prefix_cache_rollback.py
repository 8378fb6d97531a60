"""PrefixCache where memory is short: an operation that fails at any of its allocations changes
nothing that anybody holds, and works when it is called again."""

from unittest.mock import Mock

import numpy as np
import pytest
from failing_allocator import FailingAllocator
from matrix import matrix_rows
from simulator import Simulator
from test_prefix_cache_machine import SPECS, some_tokens

from megatron_hybrid.cache.eviction import Evictor
from megatron_hybrid.cache.index.prefix_index import PrefixIndex
from megatron_hybrid.cache.lease import Lease
from megatron_hybrid.cache.matching import PrefixLookup
from megatron_hybrid.cache.pages.allocator import PageAllocator
from megatron_hybrid.cache.pages.lease_pages import LeasePages, held_pages
from megatron_hybrid.cache.policy.reuse import ReuseModel
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.wanted_states import WantedStates

OPERATIONS = {
    "acquire",
    "adopt",
    "resume",
    "fork",
    "restored",
    "extend",
    "commit",
    "reserve_checkpoint",
    "publish_checkpoint",
    "abandon",
    "release",
    "evict",
}


class FailingCache:
    """Every operation fails first, at an allocation drawn at random, and is then called again."""

    def __init__(self, cache: PrefixCache, random: np.random.Generator):
        self.cache, self.random = cache, random
        self.failing = FailingAllocator()
        self.leases: list[Lease] = []
        self.num_failed = 0

    def __getattr__(self, name: str):
        found = getattr(self.cache, name)
        if name not in OPERATIONS:
            return found

        def operation(*args, **kwargs):
            self.leases = [lease for lease in self.leases if not lease.released]
            held = [self.held(lease) for lease in self.leases]
            fail_at = int(self.random.geometric(0.1))
            with self.failing as allocator:
                allocator.arm(fail_at)
                try:
                    result = found(*args, **kwargs)
                except MemoryError:
                    allocator.arm(None)
                else:
                    if name != "commit" or not allocator.has_failed:
                        return self.noted(result)
                    # What it could not make visible comes now.
                    return found(*args, **{**kwargs, "flush": True})
            self.num_failed += 1
            self.cache.check_integrity()
            assert self.cache.stats()["leases"] == len(held), "a lease came or went"
            for lease, (pages, done) in zip(self.leases, held):
                assert not lease.released
                assert pages <= self.held(lease)[0] and lease.done == done
            return self.noted(found(*args, **kwargs))

        return operation

    def noted(self, result):
        if isinstance(result, Lease):
            self.leases.append(result)
        return result

    @staticmethod
    def held(lease) -> tuple[set[int], int]:
        pages = [page for part in held_pages(lease) for page in part.tolist()]
        return set(pages) - {0}, lease.done


@pytest.mark.parametrize(
    "name", matrix_rows(sorted(SPECS), "hybrid with window", "chunks only", "pure attention")
)
def test_invariant_3_an_operation_without_memory_changes_nothing(name):
    random = np.random.default_rng(sorted(SPECS).index(name))
    for num_pages in (14, 40):
        failing = FailingCache(PrefixCache(SPECS[name], num_pages), random)
        sim = Simulator(failing)
        running, parked, prompts = [], [], [[]]
        for _ in range(150):
            random_step(sim, random, running, parked, prompts)
            sim.check()
        for each in running:
            sim.cancel(each)
        sim.check()
        assert not failing.cache.allocator.ref_counts.any()
        assert failing.num_failed > 20


def random_step(sim, random, running, parked, prompts) -> None:
    def draw(n):
        return int(random.integers(n))

    operation = draw(8)
    if operation < 2 and len(running) < 4:
        base = prompts[draw(len(prompts))]
        prompt = (base[: draw(len(base) + 1)] + some_tokens(1 + draw(60), draw(16)))[:150]
        started = sim.start(prompt, chunk=1 + draw(60), room=draw(30))
        if started is not None:
            prompts.append(prompt)
            running.append(started)
    elif operation == 2 and parked:
        resumed = sim.resume(parked.pop(), room=draw(20))
        if resumed is not None:
            running.append(resumed)
    elif running:
        who = draw(len(running))
        request = running[who]
        if operation == 7:
            sim.cancel(running.pop(who))
        elif operation == 6 and request.done:
            parked.append(sim.preempt(running.pop(who)))
        elif operation == 5 and len(running) < 4:
            forked = sim.fork(request)
            if forked is not None:
                running.append(forked)
        elif operation == 4:
            sim.finish(running.pop(who), save=bool(draw(2)))
        else:
            if request.done == len(request.tokens):
                request.tokens.append(draw(2))
            sim.forward(request, 1 + draw(len(request.tokens) - request.done))


class Broken(Exception):
    pass


def tokens(length: int) -> np.ndarray:
    return np.array(some_tokens(length, 5), dtype=np.int32)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("part", "method"),
    [
        (ReuseModel, "observe"),
        (Evictor, "refresh"),
        (PrefixIndex, "touch"),
        (LeasePages, "hold"),
        (LeasePages, "grow"),
        (LeasePages, "open"),
        (PageAllocator, "allocate"),
        (PageAllocator, "retain"),
        (WantedStates, "choose"),
        (PrefixLookup, "note_salt"),
    ],
)
def test_an_acquire_that_breaks_off_leaks_no_page(monkeypatch, part, method, when):
    sim = Simulator(PrefixCache(SPECS["hybrid with window"], 60))
    sim.run(tokens(70).tolist())
    free = sim.cache.allocator.num_free
    original = getattr(part, method)

    def broken(self, *args, **kwargs):
        if when == "after":
            original(self, *args, **kwargs)
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(part, method, broken)
        with pytest.raises(Broken):
            sim.cache.acquire(tokens(50), capacity_tokens=100)
    sim.check()
    assert not sim.cache.allocator.ref_counts.any()
    assert sim.cache.allocator.num_free == free
    assert sim.cache.stats()["leases"] == 0


def test_a_release_needs_no_memory():
    sim = Simulator(PrefixCache(SPECS["hybrid with window"], 60))
    running = sim.start(tokens(70).tolist())
    assert sim.cache.reserve_checkpoint(running.lease, 40) is not None
    with FailingAllocator(1) as allocator:
        sim.cache.release(running.lease)
        assert allocator.has_failed
    sim.check()
    assert not sim.cache.allocator.ref_counts.any()


def test_a_request_that_was_expected_starts_without_memory(monkeypatch):
    """It has a lease by then, which nobody would give back."""
    sim = Simulator(PrefixCache(SPECS["hybrid with window"], 60))
    running = sim.start(tokens(70).tolist())
    sim.forward(running, 70)
    sim.finish(running)
    cache = sim.cache
    cache.expected.add(1, tokens(70))
    assert [found for found in cache.expected.resumed.values() if found is not None]
    monkeypatch.setattr(Evictor, "update", Mock(side_effect=MemoryError))
    cache.expected.discard(1)
    assert not cache.expected
    sim.check()
