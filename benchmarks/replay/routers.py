"""Routers in front of replicas, as servers have them: by chains of block hashes and load, by the
load of two, in turn."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from megatron_hybrid.cache.index.tree import Checkpoint
from megatron_hybrid.cache.listener import CacheListener
from megatron_hybrid.cache.pages.lease import Lease
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.tools.replay.ours import Ours, Running
from megatron_hybrid.tools.replay.request import Request

BLOCK_TOKENS = 16
DECODE_TOKENS = 64
"""Prompt tokens that take as long as a request in decode slows its replica down."""


def block_keys(tokens: np.ndarray) -> list[bytes]:
    """Keys of the whole blocks of a prompt (int32 [L]), each of all tokens up to its end."""
    data, found = memoryview(np.ascontiguousarray(tokens)).cast("B"), []
    chain, size = blake2b(digest_size=8), BLOCK_TOKENS * tokens.itemsize
    for end in range(size, len(data) + 1, size):
        chain.update(data[end - size : end])
        found.append(chain.digest())
    return found


class ResumableBlocks(CacheListener):
    """Whole blocks before the saved states of a hybrid's cache: what a replica tells a router that
    counts in blocks."""

    def __init__(self, cache: PrefixCache):
        self._states: Counter[bytes] = Counter()  # which a block lies before
        self._keys: dict[Checkpoint, list[bytes]] = {}
        cache.watch(self)

    def matched_tokens(self, keys: Sequence[bytes]) -> int:
        """Leading tokens of a prompt that are in its blocks. keys: of `block_keys`."""
        absent = (number for number, key in enumerate(keys) if key not in self._states)
        return BLOCK_TOKENS * next(absent, len(keys))

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


@dataclass(eq=False)
class Sent:
    """A request on its way."""

    request: Request
    session: deque[Request]
    """The turns after this one."""
    new_tokens: int
    """That its replica seemed to have to compute."""
    handle: Running | None = None


@dataclass(eq=False)
class Server:
    """One replica."""

    engine: Ours
    blocks: ResumableBlocks
    queue: deque[Sent] = field(default_factory=deque)
    prefilling: Sent | None = None
    decoding: int = 0
    computed_tokens: int = 0

    @property
    def is_idle(self) -> bool:
        return self.prefilling is None and not self.queue and not self.decoding

    @property
    def load(self) -> int:
        """In prompt tokens."""
        waiting = sum(sent.new_tokens for sent in self.queue)
        running = 0 if self.prefilling is None else self.prefilling.new_tokens
        return waiting + running + DECODE_TOKENS * self.decoding


Rule = Callable[[Sequence[Server], Sequence[int], int], int]
"""Number of the replica of a request, from all replicas, the prompt tokens that each would have to
compute, and the request's number."""


def by_chains(servers: Sequence[Server], new_tokens: Sequence[int], number: int) -> int:
    """Least tokens to compute and load; of equal ones, the fewest pages taken."""
    pools = [server.engine.cache.allocator for server in servers]
    return min(
        range(len(servers)),
        key=lambda i: (new_tokens[i] + servers[i].load, pools[i].num_pages - pools[i].num_free),
    )


def power_of_two(servers: Sequence[Server], new_tokens: Sequence[int], number: int) -> int:
    """The less loaded of two that are drawn."""
    first, *others = np.random.default_rng(number).permutation(len(servers))[:2].tolist()
    return min([first, *others], key=lambda i: servers[i].load)


def in_turn(servers: Sequence[Server], new_tokens: Sequence[int], number: int) -> int:
    """Round robin."""
    return number % len(servers)


RULES: dict[str, Rule] = {
    "chains and load": by_chains,
    "power of two": power_of_two,
    "round robin": in_turn,
}
