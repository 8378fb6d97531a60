"""Router: chooses the replica of a request. Pure bookkeeping: no clock, no processes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_hybrid.cache.index.tree import common_prefix
from megatron_hybrid.inference.routing.prefix_hash import PrefixHash
from megatron_hybrid.inference.routing.restorable import Delta

DECODE_TOKENS = 64
"""Prompt tokens that take as long as a request in decode slows its replica down."""
MAX_KEYS = 1 << 18
"""Most keys of either kind of one replica; the least recently used go first (100 bytes each)."""
GRID_TOKENS = 256
"""Distance of the positions by which the router remembers what it sent."""
LOST_SHARE = 0.5
"""Part of the tokens of a known prefix that count as restorable although their state was evicted
or never saved: a cache that knows a prefix saves the next state where prompts part."""
BUSY_WEIGHT = 2
"""Weight of a prompt's own tokens while no replica is idle: what is computed twice also delays the
requests beside it, and evicts what others resume from."""
NOTE_DELTAS = 4
"""Deltas after which the end of an answer has been in one, or is not restorable: it may be saved a
step after the answer is out."""
MAX_NOTES = 1024
"""Most ends of answers of one replica that wait for their delta."""


@dataclass(frozen=True, eq=False)
class Route:
    """Where a request is to go, as the router sees it at this moment."""

    replica: int
    tokens: np.ndarray
    """int32 [L]: the prompt."""
    salt: str
    restorable: tuple[int, ...]
    """Per replica: the deepest position to resume from, once the requests sent there have run."""
    known: tuple[int, ...]
    """Per replica: leading tokens of prompts sent there, a multiple of `GRID_TOKENS`."""
    found: tuple[int | None, ...]
    """Per replica: key of the deepest position that its deltas told; None: there is none."""
    grid: tuple[int, ...]
    """Keys of the prompt's positions at multiples of `GRID_TOKENS`."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the chosen replica has to compute."""
        return len(self.tokens) - self.restorable[self.replica]


@dataclass
class _Replica:
    """What the router knows of a replica."""

    restorable: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Positions told by deltas, by key; the least recently used first."""
    sent: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Keys of the grid of prompts sent there, with the number of those still to be computed; the
    least recently sent first."""
    prefilling: dict[Hashable, Route] = field(default_factory=dict)
    decoding: dict[Hashable, Route] = field(default_factory=dict)
    ended: deque[tuple[int, np.ndarray, str]] = field(
        default_factory=lambda: deque(maxlen=MAX_NOTES)
    )
    """Number of the delta that tells, tokens and salt of requests that have just ended."""
    queued_tokens: int = 0
    """To be computed by requests without a first token."""
    pages_taken: int = 0
    num_deltas: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.prefilling and not self.decoding


class Router:
    """Sends a request where it costs least, in tokens to compute: those of its own prompt behind
    the deepest restorable position there, those of the prompts that wait there, and `decode_tokens`
    for each request in decode there. A tie goes to the replica with the fewest pages taken, then to
    the least number. So a hot prefix on a busy replica spills over to another, which has it then.

    While no replica is idle, tokens that are computed twice also cost others: those of the own
    prompt count `BUSY_WEIGHT` times, and as often again for each request in the shortest queue.

    Knowledge that is stale or lost makes a request slower, never wrong.

    Args:
        num_replicas: at least 1.
        decode_tokens: default `DECODE_TOKENS`.
        max_keys: bounds memory; default `MAX_KEYS`.
    Raises:
        ValueError: there is no replica.
    """

    def __init__(
        self, num_replicas: int, *, decode_tokens: int = DECODE_TOKENS, max_keys: int = MAX_KEYS
    ):
        if num_replicas < 1:
            raise ValueError(f"num_replicas is {num_replicas}; requests need at least 1 replica")
        self._replicas = [_Replica() for _ in range(num_replicas)]
        self._decode_tokens = decode_tokens
        self._max_keys = max_keys
        self._lengths: list[int] = []  # of all restorable prefixes, ascending
        self._num_keys: Counter[int] = Counter()  # by length
        self._sent_to: dict[Hashable, _Replica] = {}

    # ---- the choice ----

    def choose(self, tokens: np.ndarray, salt: str = "") -> Route:
        """The route of a prompt (int32 [L]). Changes nothing; see `note_sent`."""
        grid_positions = range(GRID_TOKENS, len(tokens) + 1, GRID_TOKENS)
        lengths = self._lengths[: bisect_right(self._lengths, len(tokens))]
        positions = sorted({*lengths, *grid_positions})
        key_at = dict(zip(positions, PrefixHash(salt).keys(tokens, positions)))
        keys = [key_at[position] for position in reversed(lengths)]
        grid = tuple(key_at[position] for position in grid_positions)
        restorable, known, found = [], [], []
        for replica in self._replicas:
            told = replica.restorable
            key = next((key for key in keys if key in told), None)
            found.append(key)
            seen, coming = matched(replica.sent, grid)
            known.append(seen)
            position = 0 if key is None else told[key]
            restorable.append(max(position, coming, ended(replica.ended, tokens, salt)))
        number = self._least(len(tokens), restorable, known)
        return Route(number, tokens, salt, tuple(restorable), tuple(known), tuple(found), grid)

    def _least(self, length: int, restorable: Sequence[int], known: Sequence[int]) -> int:
        """Number of the replica of the least cost."""
        if any(replica.is_idle for replica in self._replicas):
            weight = 1
        else:
            weight = BUSY_WEIGHT * (1 + min(len(each.prefilling) for each in self._replicas))
        costs = []
        for number, replica in enumerate(self._replicas):
            lost = max(0, known[number] - restorable[number])
            own = length - restorable[number] - LOST_SHARE * lost
            load = replica.queued_tokens + self._decode_tokens * len(replica.decoding)
            costs.append((own * weight + load, replica.pages_taken, number))
        return min(costs)[-1]

    # ---- requests ----

    def note_sent(self, request: Hashable, route: Route) -> None:
        """A request was sent to `route.replica`. request: any name. Raises ValueError if one of
        this name is under way."""
        if request in self._sent_to:
            raise ValueError(f"request {request!r} is under way already; give each its own name")
        replica = self._sent_to[request] = self._replicas[route.replica]
        replica.prefilling[request] = route
        replica.queued_tokens += route.computed_tokens
        for key in reversed(route.grid):  # of a dropped prefix nothing longer stays
            replica.sent[key] = replica.sent.pop(key, 0) + 1
        while len(replica.sent) > self._max_keys:
            replica.sent.popitem(last=False)
        key = route.found[route.replica]
        if key in replica.restorable:
            replica.restorable.move_to_end(key)

    def note_prefilled(self, request: Hashable) -> None:
        """The first token of a request is out. Raises KeyError if it waits for none."""
        replica = self._sent_to[request]
        replica.decoding[request] = self._end_prefill(replica, request)

    def note_done(self, request: Hashable, output: np.ndarray | None = None) -> None:
        """A request has ended. output: int32 [m], its answer; None: it was cancelled, or failed.
        Raises KeyError if it is not under way."""
        replica = self._sent_to.pop(request)
        route = replica.decoding.pop(request, None) or self._end_prefill(replica, request)
        if output is not None:
            text = np.concatenate([route.tokens, output])
            replica.ended.append((replica.num_deltas + NOTE_DELTAS, text, route.salt))

    def _end_prefill(self, replica: _Replica, request: Hashable) -> Route:
        route = replica.prefilling.pop(request)
        replica.queued_tokens -= route.computed_tokens
        for key in route.grid:
            if replica.sent.get(key):  # it may have been dropped meanwhile
                replica.sent[key] -= 1
        return route

    # ---- replicas ----

    def apply(self, number: int, delta: Delta) -> None:
        """Learn the changes on a replica. Call it with every delta, in order, also with an empty
        one."""
        replica = self._replicas[number]
        if delta.cleared:
            self.cleared(number)
        replica.num_deltas += 1
        replica.pages_taken = delta.pages_taken
        while replica.ended and replica.ended[0][0] <= replica.num_deltas:
            replica.ended.popleft()
        for key in delta.removed:
            if key in replica.restorable:
                self._forget(replica.restorable.pop(key))
        for key, position in delta.added.items():
            if key not in replica.restorable:
                replica.restorable[key] = position
                self._note(position)
        while len(replica.restorable) > self._max_keys:
            self._forget(replica.restorable.popitem(last=False)[1])

    def cleared(self, number: int) -> None:
        """The cache of a replica is empty. Requests under way there stay."""
        replica = self._replicas[number]
        for position in replica.restorable.values():
            self._forget(position)
        replica.restorable.clear()
        replica.ended.clear()
        replica.sent = OrderedDict((key, n) for key, n in replica.sent.items() if n)

    def _note(self, length: int) -> None:
        self._num_keys[length] += 1
        if self._num_keys[length] == 1:
            insort(self._lengths, length)

    def _forget(self, length: int) -> None:
        self._num_keys[length] -= 1
        if not self._num_keys[length]:
            del self._num_keys[length]
            del self._lengths[bisect_left(self._lengths, length)]


def matched(sent: dict[int, int], grid: Sequence[int]) -> tuple[int, int]:
    """Leading tokens of a prompt that were sent to a replica before, and those of them that it has
    still to compute: single flight saves a state where a waiting prompt leaves a running one."""
    seen = bisect_left(grid, True, key=lambda key: key not in sent)
    coming = bisect_left(grid, True, hi=seen, key=lambda key: not sent[key])
    return seen * GRID_TOKENS, coming * GRID_TOKENS


def ended(texts: Sequence[tuple[int, np.ndarray, str]], tokens: np.ndarray, salt: str) -> int:
    """Length of the longest text of a request that has just ended and that a prompt continues."""
    lengths = [
        len(text)
        for _, text, of in texts
        if of == salt
        and len(text) <= len(tokens)
        and text[-1] == tokens[len(text) - 1]
        and common_prefix(text, tokens) == len(text)
    ]
    return max(lengths, default=0)
