"""`python -m benchmarks.replay.replicas`: requests split over replicas, against one cache with all
of their memory.

Each replica is a `PrefixCache` with its part of the pool, called as by its engine. A router sends
it requests, of which one ends before the next begins: docs/measured/replay.md, "More than one
replica".
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import numpy as np

from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.sweep import GB
from benchmarks.replay.table import header
from benchmarks.replay.workloads import WORKLOADS, add_seeds
from megatron_hybrid.cache.eviction import CacheListener
from megatron_hybrid.cache.index.tree import Checkpoint
from megatron_hybrid.cache.lease import Lease
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.protocol import Request

GEOMETRY = "nemotron-h-8b"
BUDGETS = slice(2)
"""Of each workload's sizes; the ample one tells nothing."""
SEEDS = (1, 2)
REPLICAS = 2
BLOCK_TOKENS = 16


def block_keys(tokens: np.ndarray) -> list[bytes]:
    """Return keys of the whole blocks of a prompt (int32 [L]), each of all tokens up to its end."""
    data, found = memoryview(np.ascontiguousarray(tokens)).cast("B"), []
    chain, size = blake2b(digest_size=8), BLOCK_TOKENS * tokens.itemsize
    for end in range(size, len(data) + 1, size):
        chain.update(data[end - size : end])
        found.append(chain.digest())
    return found


class Replica(CacheListener):
    """A cache, and what it tells a router that counts in blocks: the whole blocks before the saved
    states of a hybrid."""

    def __init__(self, spec: CacheSpec, budget_bytes: float):
        self.engine = Ours(spec, budget_bytes)
        self._states: Counter[bytes] = Counter()  # which a block lies before
        self._keys: dict[Checkpoint, list[bytes]] = {}
        self.engine.cache.watch(self)

    def matched_tokens(self, keys: Sequence[bytes]) -> int:
        """Count leading tokens of a prompt that are in its blocks. keys: of `block_keys`."""
        absent = (number for number, key in enumerate(keys) if key not in self._states)
        return BLOCK_TOKENS * next(absent, len(keys))

    @property
    def pages_taken(self) -> int:
        pool = self.engine.cache.allocator
        return pool.num_pages - pool.num_free

    def on_publish_state(self, lease: Lease, checkpoint: Checkpoint) -> None:
        self._keys[checkpoint] = block_keys(lease.tokens[: checkpoint.position])
        self._states.update(self._keys[checkpoint])

    def on_evict_state(self, checkpoint: Checkpoint) -> None:
        for key in self._keys.pop(checkpoint):
            self._states[key] -= 1
            if not self._states[key]:
                del self._states[key]

    def on_clear(self) -> None:
        self._states.clear()
        self._keys.clear()


Rule = Callable[[Sequence[Replica], np.ndarray, int], Replica]
"""Chooses the replica of a request, from all of them, the prompt, and the request's number."""


def by_chains(replicas: Sequence[Replica], prompt: np.ndarray, number: int) -> Replica:
    """Choose by the most tokens known; of equal ones, by the fewest pages taken."""
    keys = block_keys(prompt)
    return min(replicas, key=lambda each: (-each.matched_tokens(keys), each.pages_taken))


def at_random(replicas: Sequence[Replica], prompt: np.ndarray, number: int) -> Replica:
    """Choose any."""
    return replicas[np.random.default_rng(number).permutation(len(replicas))[0]]


def in_turn(replicas: Sequence[Replica], prompt: np.ndarray, number: int) -> Replica:
    """Choose one after the other."""
    return replicas[number % len(replicas)]


RULES: dict[str, Rule] = {
    "block hashes": by_chains,
    "at random": at_random,
    "round robin": in_turn,
}


def skipped_percent(
    requests: Iterable[Request], budget_gb: float, num_replicas: int = 1, rule: Rule = in_turn
) -> float:
    """Replay requests through replicas that have a pool of budget_gb together. Returns which part
    of all prompt tokens they skip."""
    spec = GEOMETRIES[GEOMETRY].spec("exact")
    replicas = [Replica(spec, budget_gb * GB / num_replicas) for _ in range(num_replicas)]
    total = skipped = 0
    for number, request in enumerate(requests):
        engine = rule(replicas, request.prompt, number).engine
        running = engine.begin(request.prompt)
        engine.finish(running, np.concatenate([request.prompt, request.output]))
        total += len(request.prompt)
        skipped += running.skipped_tokens
    return 100 * skipped / total


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay.replicas",
        description="Requests split over replicas, against one cache with all of their memory.",
    )
    parser.add_argument(
        "--workloads",
        choices=WORKLOADS,
        default=["chat", "agent"],
        help="Replay these workloads. The default is both.",
        nargs="+",
        metavar="NAME",
    )
    add_seeds(parser, SEEDS)
    options = parser.parse_args(arguments)
    print(header("workload, GB, seed", ["one cache, %", *RULES]))
    for name in options.workloads:
        for budget in WORKLOADS[name].budgets_gb[BUDGETS]:
            for seed in options.seeds:
                requests = list(WORKLOADS[name].generate(seed=seed))
                one = skipped_percent(requests, budget)
                split = [
                    skipped_percent(requests, budget, REPLICAS, rule) for rule in RULES.values()
                ]
                columns = [f"{one:.1f}", *(f"{percent - one:+.1f}" for percent in split)]
                print(f"| {name}, {budget:g}, {seed} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
