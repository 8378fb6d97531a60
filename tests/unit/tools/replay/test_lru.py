"""Plain LRU against a naive one, and the infinite cache."""

import numpy as np
import pytest
from replayed import check_baseline, skipped_tokens, small_requests

from benchmarks.replay.runner import replay
from megatron_hybrid.tools.replay.lru import Ceiling, LeastRecentlyUsed


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
        check_baseline(engine)
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


def test_requests_in_flight_keep_their_kv():
    """Two long requests do not fit side by side: the second waits for the first."""
    engine = LeastRecentlyUsed(1, 1, 0, 100)
    first, second = np.random.default_rng(0).integers(0, 99, (2, 60), np.int32)
    running = engine.begin(first)
    assert engine.begin(second) is None
    engine.finish(running, np.append(first, np.int32(1)))
    assert engine.begin(first[:60]).skipped_tokens == 60  # the failed one cost it nothing
    engine.running = 0
    assert engine.begin(second) is not None


def test_a_prompt_shorter_than_a_block_always_fits():
    """Beside one that fills the cache; an answer that makes it longer is cached once there is
    room."""
    engine = LeastRecentlyUsed(16, 1, 0, 64)
    large, short = np.random.default_rng(0).integers(0, 99, (2, 64), np.int32)
    running, beside = engine.begin(large), engine.begin(short[:9])
    assert beside.skipped_tokens == 0
    engine.finish(beside, short[:12])
    engine.finish(running, large)
    alone = engine.begin(short[:9])
    engine.finish(alone, short[:40])
    assert engine.begin(short[:40]).skipped_tokens == 32
    assert engine.bytes_held <= 64


@pytest.mark.parametrize("state_bytes", [0, 10])
def test_a_prompt_that_never_fits_runs_without_the_cache(state_bytes):
    """Whatever of it is held: it has no room to resume from that."""
    engine = LeastRecentlyUsed(16, 1, state_bytes, 200)
    prompt = np.arange(300, dtype=np.int32)
    assert skipped_tokens(engine, prompt[:97], prompt, prompt[:180])[1] == 0
    assert engine.bytes_held <= engine.budget and engine.tree.num_tokens
    check_baseline(engine)
