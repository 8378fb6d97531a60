"""PrefixCache under random sequences of operations, against brute force.

Tiny pools and an alphabet of two tokens, so that prefixes collide, blocks are split, and room runs
out all the time. The simulator checks every row that is read or overwritten; this machine checks
decisions: q and p against a plain search through what is cached and, as long as nothing had to go,
through everything that was ever committed; that refusals are right and change nothing; that reports
add up.
"""

import itertools
import os
from unittest.mock import patch

import numpy as np
import pytest
from followed_tree import FollowedTree
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from matrix import matrix_rows
from simulator import Simulator, cached_paths, known_tokens, stored

from megatron_hybrid.cache import prefix_cache
from megatron_hybrid.cache.index.prefix_index import SEQUENCE_TOKENS
from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.policy.placement import NO_INTERVAL
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.report import MissReason

FULL, WIDE = KVGroup(2, 64), KVGroup(3, 128)
WINDOW, ODD_WINDOW = KVGroup(2, 64, window=16), KVGroup(1, 64, window=21)
CHUNK, ODD_CHUNK, ONE = KVGroup(2, 64, chunk=32), KVGroup(1, 64, chunk=21), KVGroup(1, 64, window=1)
SPECS = {
    "hybrid": CacheSpec(16, (FULL,), state_bytes=3000, hidden_bytes=64),
    "pure attention": CacheSpec(16, (FULL,), state_bytes=0, hidden_bytes=64),
    "two full groups": CacheSpec(16, (FULL, WIDE), state_bytes=3000, hidden_bytes=64),
    "hybrid with window": CacheSpec(16, (WINDOW, FULL), state_bytes=2000, hidden_bytes=64),
    "windows only": CacheSpec(16, (WINDOW, ODD_WINDOW), state_bytes=0, hidden_bytes=64),
    "chunks only": CacheSpec(16, (CHUNK, ODD_CHUNK), state_bytes=0, hidden_bytes=64),
    "chunks": CacheSpec(16, (ODD_CHUNK, FULL, CHUNK, ONE), state_bytes=0, hidden_bytes=64),
    "state only": CacheSpec(16, (), state_bytes=3000, hidden_bytes=64),
    "all": CacheSpec(
        16, (FULL, ODD_WINDOW, WIDE, WINDOW, ODD_CHUNK), state_bytes=900, hidden_bytes=16
    ),
}
MODES = ("restore", "restore", "restore", "memory_only", "off")
fraction = st.floats(0, 1)
which = st.integers(0, 1000)
length = st.integers(0, 60)
pattern = st.integers(0, 15)


def some_tokens(length: int, pattern: int) -> list[int]:
    """One of a few token sequences of this length, so that prefixes meet again."""
    return [(pattern >> i % 4) & 1 for i in range(length)]


def fate(checkpoint):
    """All that is known of a checkpoint."""
    names = set(checkpoint.__slots__) - {"edge", "pages", "local_pages", "queued"}
    return checkpoint.pages is None, *(getattr(checkpoint, name) for name in sorted(names))


class PrefixCacheMachine(RuleBasedStateMachine):
    @initialize(
        name=st.sampled_from(sorted(SPECS)),
        mode=st.sampled_from(MODES),
        num_pages=st.one_of(st.integers(2, 60), st.integers(60, 200)),
        known_limit=st.sampled_from([100, 1500, 1 << 20]),
        opportunistic_tokens=st.sampled_from([10, 10, NO_INTERVAL]),
    )
    def make(self, name, mode, num_pages, known_limit=1 << 20, opportunistic_tokens=NO_INTERVAL):
        self.spec = SPECS[name]
        with patch.object(prefix_cache, "known_limit", return_value=known_limit):
            self.cache = PrefixCache(self.spec, num_pages, mode)
        self.cache.policy.opportunistic_tokens = opportunistic_tokens
        self.sim = Simulator(self.cache)
        self.followed = FollowedTree()
        self.running = []
        self.parked = []
        self.prompts = [[]]
        self.committed: set[tuple] = set()
        self.saved: set[tuple] = set()
        self.cleared = False

    def teardown(self):
        if hasattr(self, "cache"):
            for running in self.running:
                self.sim.cancel(running)
            self.sim.check()
            assert not self.cache.allocator.ref_counts.any()

    # ---- operations ----

    @rule(
        of=which,
        part=fraction,
        length=length,
        pattern=pattern,
        salt=st.sampled_from(["", "", "", "other"]),
        room=st.integers(0, 30),
        chunk=st.sampled_from([None, 1, 5, 40]),
        declared=st.lists(st.integers(0, 60), max_size=2),
        log_probs=st.sampled_from([None] * 9 + ["prompt_log_probs"]),
    )
    def start(self, **drawn):
        self.begin(**drawn)

    def begin(
        self, of, part, length, pattern, salt="", room=0, chunk=None, declared=(), log_probs=None
    ):
        base = self.prompts[of % len(self.prompts)]
        prompt = (base[: round(part * len(base))] + some_tokens(length, pattern))[:150]
        if not prompt:
            return None
        q, p = self.expected_match(prompt, salt, log_probs)
        array = np.array(prompt, dtype=np.int32)
        before = self.snapshot()
        match = self.cache.match(array, salt, recompute_reason=log_probs)
        assert self.snapshot() == before, "match has a side effect"
        assert (match.prompt_tokens, match.shared_tokens, match.skipped_tokens) == (
            len(prompt),
            q,
            p,
        )
        options = {"declared": declared, "recompute_reason": log_probs}
        held_back = self.cache.stats()["held_back"]
        running = self.sim.start(prompt, salt, chunk=chunk, room=room, **options)
        if running is None and self.cache.stats()["held_back"] > held_back:
            assert self.running, "held back when alone"
            self.check_only_evicted(before, self.snapshot())
            return None
        if running is None:
            assert self.snapshot() == before, "a refused request changed something"
            assert self.running or not self.cache.fits(len(prompt) + room, chunk)
            return None
        lease = running.lease
        report = lease.report
        if (report.shared_tokens, report.skipped_tokens) != (q, p):
            assert not self.running  # alone, and what it would have gone on from was in the way
            size = self.spec.block_size_tokens
            assert report.shared_tokens == q // size * size and report.skipped_tokens <= p
        lost = report.skipped_tokens < p
        assert report.miss_reason is (MissReason.NO_ROOM if lost else match.miss_reason)
        self.check_report(report, log_probs)
        assert lease.checkpoint_pages is None and not lease.copies
        self.prompts.append(prompt)
        self.running.append(running)
        return running

    @rule(of=which, part=fraction, request_id=st.integers(0, 3), comes=st.booleans())
    def wait(self, of, part, request_id, comes):
        prompt = self.prompts[of % len(self.prompts)]
        if comes:
            tokens = np.array(prompt[: round(part * len(prompt))], dtype=np.int32)
            self.cache.expected.add(request_id, tokens)
        else:
            self.cache.expected.discard(request_id)
        known = [found for found in self.cache.expected.resumed.values() if found is not None]
        assert self.cache.policy.reuse.num_waiting == len(known)
        assert all(found.waiting == known.count(found) for found in known)

    @rule(
        of=which,
        part=fraction,
        length=length,
        pattern=pattern,
        chunk=st.integers(1, 60),
        answer=st.integers(0, 30),
    )
    def serve(self, of, part, length, pattern, chunk, answer):
        """A whole request in one step, beside those that are running."""
        running = self.begin(of, part, length, pattern, chunk=chunk)
        if running is None:
            return
        while running.done < len(running.tokens):
            if not self.sim.forward(running, min(chunk, len(running.tokens) - running.done)):
                break
        else:
            for token in some_tokens(answer, pattern):
                running.tokens.append(token)
                if not self.sim.forward(running, 1):
                    break
        self.finish(self.running.index(running), save=True)

    @precondition(lambda self: self.running)
    @rule(who=which, n=st.integers(1, 50), new=st.integers(0, 1), save=st.booleans())
    def forward(self, who, n, new, save):
        running = self.running[who % len(self.running)]
        if running.done == len(running.tokens):
            running.tokens.append(new)
        n = min(n, len(running.tokens) - running.done)
        before = self.snapshot()
        if not self.sim.forward(running, n, save=save):
            assert self.snapshot() == before, "a refused extension changed something"
            capacity = max(running.done + n, running.lease.capacity_tokens)
            alone = len(self.running) == 1 and not running.lease.reservations
            assert not alone or not self.cache.fits(capacity, n)
            return
        assert running.done <= len(running.tokens)

    @precondition(lambda self: self.running)
    @rule(who=which, length=length, pattern=pattern)
    def decode(self, who, length, pattern):
        running = self.running[who % len(self.running)]
        if running.done == len(running.tokens):
            for token in some_tokens(length, pattern):
                running.tokens.append(token)
                if not self.sim.forward(running, 1):
                    running.tokens.pop()
                    return

    @precondition(lambda self: self.running)
    @rule(who=which, ahead=st.integers(0, 20))
    def reserve(self, who, ahead):
        running = self.running[who % len(self.running)]
        lease = running.lease
        position = min(
            lease.done + ahead, lease.capacity_tokens, lease.local_end, len(running.tokens)
        )
        if position:
            self.cache.reserve_checkpoint(lease, position)

    @precondition(lambda self: self.running)
    @rule(who=which, publish=st.booleans())
    def settle(self, who, publish):
        running = self.running[who % len(self.running)]
        for reservation in list(running.lease.reservations):
            if not publish:
                self.cache.abandon(reservation)
            elif reservation.position <= running.done:
                self.sim.publish(running, reservation)

    @precondition(lambda self: self.running)
    @rule(who=which)
    def fork(self, who):
        running = self.running[who % len(self.running)]
        before = self.snapshot()
        new = self.sim.fork(running)
        if new is None:
            assert self.snapshot() == before, "a refused fork changed something"
            return
        full = running.done // self.spec.block_size_tokens
        assert np.array_equal(new.lease.block_table[:full], running.lease.block_table[:full])
        self.running.append(new)

    @precondition(lambda self: self.running)
    @rule(who=which, save=st.booleans())
    def finish(self, who, save):
        running = self.running.pop(who % len(self.running))
        self.sim.finish(running, save=save)
        self.prompts.append(running.tokens)
        if running.done and self.cache.mode != "off":
            self.committed.add((running.salt, *running.tokens[: running.done]))
            self.saved.update((running.salt, *running.tokens[:p]) for p in running.saved)

    @precondition(lambda self: self.running)
    @rule(who=which)
    def preempt(self, who):
        running = self.running.pop(who % len(self.running))
        if running.done:
            self.parked.append(self.sim.preempt(running))
        else:
            self.sim.cancel(running)

    @precondition(lambda self: self.parked)
    @rule(who=which, room=st.integers(0, 30), chunk=st.sampled_from([None, 1, 5, 40]))
    def resume(self, who, room, chunk):
        parked = self.parked.pop(who % len(self.parked))
        before = self.snapshot()
        running = self.sim.resume(parked, room=room, chunk=chunk)
        if running is None:
            assert self.snapshot() == before, "a refused resumption changed something"
            assert self.running or not self.cache.fits(parked.done + room, chunk)
            return
        self.running.append(running)

    @precondition(lambda self: self.running)
    @rule(who=which)
    def cancel(self, who):
        self.sim.cancel(self.running.pop(who % len(self.running)))

    @rule(n=st.integers(0, 12))
    def evict(self, n):
        refs = self.cache.allocator.ref_counts.copy()
        freed = self.cache.evict(n)
        assert freed >= 0
        assert np.array_equal(refs, self.cache.allocator.ref_counts)

    @precondition(lambda self: len(self.prompts) > 25)
    @rule()
    def clear(self):
        self.cache.clear()
        self.cleared = True
        assert self.cache.allocator.num_evictable == 0

    @rule(limit=st.sampled_from([1, 3, 1000]))
    def follow(self, limit):
        self.followed.ask(self.cache.contents.changes, limit)
        self.followed.check(self.cache)

    # ---- what must hold ----

    @invariant()
    def memory_is_right(self):
        if hasattr(self, "sim"):
            self.sim.check()

    @invariant()
    def holders_are_right(self):
        if not hasattr(self, "sim"):
            return
        refs = np.zeros_like(self.cache.allocator.ref_counts)
        for running in self.running:
            lease = running.lease
            np.add.at(refs, lease.block_table.ravel(), 1)
            for table in lease.local_tables:
                np.add.at(refs, table[table != 0], 1)
            for reservation in lease.reservations:
                np.add.at(refs, reservation.pages, 1)
                for pages in reservation.local_pages:
                    np.add.at(refs, pages.ravel(), 1)
        assert np.array_equal(refs, self.cache.allocator.ref_counts)

    @invariant()
    def local_pages_are_bounded(self):
        """By the forward that there is room for, not by the length of the request."""
        for running in self.running if hasattr(self, "sim") else ():
            lease = running.lease
            room = max(1, lease.local_end - lease.done)
            for group, table in zip(self.spec.local_groups, lease.local_tables):
                assert (table[:, 0] != 0).sum() <= self.spec.max_local_blocks(group, room)

    @invariant()
    def nothing_is_lost_without_need(self):
        """Until something was evicted, all that was ever finished is found in full."""
        if not hasattr(self, "sim") or self.cleared or self.cache.stats()["kv_blocks_evicted"]:
            return
        if not self.spec.kv_pages_per_block and self.cache.stats()["tokens_forgotten"]:
            return
        for salt, *prompt in self.committed:
            match = self.cache.match(np.array(prompt, dtype=np.int32), salt)
            assert known_tokens(self.cache, prompt, salt) == len(prompt)
            if self.cache.mode == "restore" and not self.cache.stats()["checkpoints_evicted"]:
                saved = [p for p in range(len(prompt) + 1) if (salt, *prompt[:p]) in self.saved]
                assert match.skipped_tokens >= max(saved, default=0)

    def expected_match(self, prompt, salt, log_probs):
        """q and p by a search through all that is in the tree."""
        q, restorable = 0, {0}
        for of, path, edge in cached_paths(self.cache):
            if of == salt and edge.held_end > edge.start:
                pairs = zip(prompt, path[: edge.held_end])
                q = max(q, len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]))
                positions = [checkpoint.position for checkpoint in stored(edge)]
                restorable |= {p for p in positions if path[:p] == tuple(prompt[:p])}
        if self.cache.mode == "off":
            return 0, 0
        forced = self.cache.mode == "memory_only" or log_probs
        p = 0 if forced else max(p for p in restorable if p <= q)
        if not self.spec.kv_pages_per_block:
            return p, p
        if forced:
            return q, 0
        if not self.spec.needs_state and p < len(prompt):
            p = min(q, len(prompt) - 1)
        return q, p

    def check_report(self, report, log_probs):
        assert report.skipped_tokens <= report.shared_tokens <= report.prompt_tokens
        assert report.skipped_tokens + report.computed_tokens == report.prompt_tokens
        reason = report.miss_reason
        assert reason is not MissReason.SALT, "a tenant learns what others asked"
        if report.skipped_tokens == report.prompt_tokens:
            assert reason is None
        elif report.skipped_tokens < report.shared_tokens or not report.shared_tokens:
            assert reason is not None
        if report.shared_tokens or self.cache.mode == "off":
            if self.cache.mode != "restore":
                assert reason is MissReason.MODE
            elif log_probs:
                assert reason is MissReason.PROMPT_LOG_PROBS

    @staticmethod
    def check_only_evicted(before, after):
        """Of two snapshots: what is known is the same, and so is what requests hold."""
        (tree, leases, counts, *_), (tree_after, leases_after, counts_after, *_) = before, after
        assert (leases, counts[0]) == (leases_after, counts_after[0])
        for (edge, _), (edge_after, _) in zip(tree, tree_after, strict=True):
            salt, path, start, held_end, pages, used = edge
            assert edge_after[:3] == (salt, path, start) and edge_after[5] == used
            assert edge_after[3] <= held_end and edge_after[4] == pages[: len(edge_after[4])]

    def snapshot(self):
        """All that decides the future, save the count of refusals."""
        pool = self.cache.allocator
        tree = [
            (
                (salt, path, edge.start, edge.held_end, edge.pages(16).tolist(), edge.last_access),
                [fate(edge.checkpoints[p]) for p in sorted(edge.checkpoints)],
            )
            for salt, path, edge in cached_paths(self.cache)
        ]
        leases = [
            (r.lease.block_table.tolist(), r.done, len(r.lease.reservations)) for r in self.running
        ]
        counts = pool.ref_counts.tolist(), pool.cached_counts.tolist(), pool.num_free
        return tree, leases, counts, self.cache.digest(), self.cache.index.tick


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(
    max_examples=int(os.environ.get("CACHE_EXAMPLES", "25")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize(
    ("name", "mode"),
    matrix_rows(
        itertools.product(sorted(SPECS), ["restore", "memory_only"]),
        *((name, "restore") for name in ("all", "chunks only", "pure attention", "state only")),
    ),
)
def test_long_random_run(name, mode):
    """The same operations, drawn plainly: hypothesis' short examples seldom fill a pool."""
    random = np.random.default_rng(sorted(SPECS).index(name))
    for num_pages in (12, 30, 80):
        machine = PrefixCacheMachine()
        machine.make(name, mode, num_pages)
        for step in range(LONG_RUN_STEPS):
            random_step(machine, random)
            if step % 4 == 0:
                machine.follow(1 + step)
            machine.memory_is_right()
            machine.holders_are_right()
            machine.local_pages_are_bounded()
            machine.nothing_is_lost_without_need()
        machine.teardown()


LONG_RUN_STEPS = 60


def test_tokens_without_a_state_are_forgotten_where_they_are_all_that_is_kept():
    """Where nothing attends to everything, the bound on known tokens takes what no state needs."""
    machine = PrefixCacheMachine()
    machine.make(name="chunks only", mode="restore", num_pages=7, known_limit=100 + SEQUENCE_TOKENS)
    machine.serve(of=0, part=0.0, length=51, pattern=1, chunk=1, answer=0)
    machine.nothing_is_lost_without_need()
    machine.serve(of=0, part=0.0, length=50, pattern=0, chunk=1, answer=0)
    machine.nothing_is_lost_without_need()
    stats = machine.cache.stats()
    assert (stats["tokens_forgotten"], stats["checkpoints_evicted"]) == (51, 0)
    assert stats["known_tokens"] == 50
    machine.teardown()


def random_step(machine: PrefixCacheMachine, random: np.random.Generator) -> None:
    def draw(n):
        return int(random.integers(n))

    start = {
        "of": draw(1000),
        "part": random.choice([0.0, 1.0, float(random.random())]),
        "length": draw(60),
        "pattern": draw(16),
        "chunk": 1 + draw(60),
    }
    operation = draw(14)
    if operation < 4:
        machine.serve(**start, answer=draw(30))
    elif operation < 6 and len(machine.running) < 5:
        declared = [draw(60)] if draw(2) else []
        machine.begin(**start, room=draw(30), declared=declared)
    elif operation == 6:
        machine.evict(draw(8))
    elif operation == 12 and machine.parked:
        machine.resume(draw(1000), draw(30), [None, 1, 5, 40][draw(4)])
    elif machine.running:
        who = draw(1000)
        if operation == 7:
            machine.forward(who, 1 + draw(50), draw(2), bool(draw(2)))
        elif operation == 8:
            machine.decode(who, draw(60), draw(16))
        elif operation == 9:
            machine.reserve(who, draw(20))
            machine.forward(who, 1 + draw(20), draw(2), True)
            machine.settle(who, bool(draw(3)))
        elif operation == 10 and len(machine.running) < 5:
            machine.fork(who)
        elif operation == 13:
            machine.preempt(who)
        elif draw(2):
            machine.finish(who, bool(draw(2)))
        else:
            machine.cancel(who)
