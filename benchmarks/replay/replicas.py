"""`python -m benchmarks.replay.replicas`: requests split over replicas, against one cache with all
of their memory.

Each replica is a `PrefixCache` with its part of the pool, called as by its engine, behind one of
`routers`: docs/measured/replay.md, "More than one replica".
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from statistics import mean

import numpy as np

from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.routers import (
    RULES,
    ResumableBlocks,
    Rule,
    Sent,
    Server,
    block_keys,
    by_chains,
)
from benchmarks.replay.sweep import GB
from benchmarks.replay.table import header
from benchmarks.replay.workloads import WORKLOADS, add_seeds, draw_tokens
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.commands.arguments import whole_number
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.request import Request

GEOMETRY = "nemotron-h-8b"
BUDGETS = slice(2)
"""Of each workload's sizes; the ample one tells nothing."""
SEEDS = (1, 2)
HOT_PER_SECOND = (25, 50, 75)
"""Requests behind one hot prefix: they keep two replicas busy for 3, 6 and 8 tenths of the time."""
HOT_GB = 8


@dataclass(frozen=True)
class Clock:
    """Speed of one replica, which computes one prompt after the other, beside all its decodes."""

    prompt_tokens_per_second: float = inf
    answer_tokens_per_second: float = inf
    """Of each request."""


HOT_CLOCK = Clock(prompt_tokens_per_second=10_000)
"""Answers take no time, so that a replica without a prompt is idle."""


@dataclass
class Result:
    prompt_tokens: int = 0
    skipped_tokens: int = 0
    computed_tokens: list[int] = field(default_factory=list)
    """Per replica."""
    seconds: float = 0.0
    unfair_seconds: float = 0.0
    """While a request waited on one replica and another one had nothing to do."""

    @property
    def skipped_percent(self) -> float:
        return 100 * self.skipped_tokens / self.prompt_tokens

    @property
    def imbalance(self) -> float:
        """Most computed tokens of a replica, over the mean."""
        return max(self.computed_tokens) / max(1, mean(self.computed_tokens))


class Fleet:
    """Replicas behind a router, under a simulated clock. Without one a request ends before the
    next begins.

    Args:
        budget_bytes: of all replicas together.
    """

    def __init__(
        self, spec: CacheSpec, budget_bytes: float, num_replicas: int, rule: Rule, clock: Clock
    ):
        engines = [Ours(spec, budget_bytes / num_replicas) for _ in range(num_replicas)]
        self.servers = [Server(engine, ResumableBlocks(engine.cache)) for engine in engines]
        self._rule = rule
        self._clock = clock
        self._events: list[tuple[float, int, Callable, tuple]] = []
        self._order, self._numbers = count(), count()
        self._now = 0.0
        self._result = Result()

    def run(self, requests: Sequence[Request]) -> Result:
        """A turn of a session arrives when it is due and the turn before has ended."""
        sessions: dict[int | str, deque[Request]] = {}
        for request in requests:
            sessions.setdefault(request.session, deque()).append(request)
        for session in sessions.values():
            self._at(session[0].arrival, self._arrive, session)
        result = self._result
        while self._events:
            then, _, happens, arguments = heapq.heappop(self._events)
            if any(server.queue for server in self.servers) and any(
                server.is_idle for server in self.servers
            ):
                result.unfair_seconds += then - self._now
            self._now = then
            happens(*arguments)
        result.seconds = self._now
        result.computed_tokens = [server.computed_tokens for server in self.servers]
        return result

    def _at(self, when: float, happens: Callable, *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), happens, arguments))

    def _arrive(self, session: deque[Request]) -> None:
        request = session.popleft()
        keys = block_keys(request.prompt)
        new_tokens = [
            len(request.prompt) - server.blocks.matched_tokens(keys) for server in self.servers
        ]
        number = self._rule(self.servers, new_tokens, next(self._numbers))
        server, sent = self.servers[number], Sent(request, session, new_tokens[number])
        server.queue.append(sent)
        self._start(number)
        if sent in server.queue:
            server.engine.cache.expected.add(id(sent), request.prompt)

    def _start(self, number: int) -> None:
        """Begin the next prompt, if none is being computed and there is room for it."""
        server = self.servers[number]
        if server.prefilling is not None or not server.queue:
            return
        sent = server.queue[0]
        prompt = sent.request.prompt
        sent.handle = server.engine.begin(prompt)
        if sent.handle is None:
            if server.is_idle:
                raise RuntimeError(f"no room for a prompt of {len(prompt)} tokens, which is alone")
            return
        server.prefilling = server.queue.popleft()
        server.engine.cache.expected.discard(id(sent))
        computed = len(prompt) - sent.handle.skipped_tokens
        server.computed_tokens += computed
        self._result.prompt_tokens += len(prompt)
        self._result.skipped_tokens += sent.handle.skipped_tokens
        duration = computed / self._clock.prompt_tokens_per_second
        self._at(self._now + duration, self._prefilled, number)

    def _prefilled(self, number: int) -> None:
        server = self.servers[number]
        sent, server.prefilling = server.prefilling, None
        server.decoding += 1
        duration = len(sent.request.output) / self._clock.answer_tokens_per_second
        self._at(self._now + duration, self._ended, number, sent)
        self._start(number)

    def _ended(self, number: int, sent: Sent) -> None:
        server, request = self.servers[number], sent.request
        server.decoding -= 1
        server.engine.finish(sent.handle, np.concatenate([request.prompt, request.output]))
        if sent.session:
            self._at(max(self._now, sent.session[0].arrival), self._arrive, sent.session)
        self._start(number)


def serve(
    requests: Sequence[Request],
    budget_gb: float,
    num_replicas: int = 2,
    rule: Rule = by_chains,
    clock: Clock | None = None,
) -> Result:
    """Replay requests through replicas with a pool of budget_gb together. clock: default: none, one
    request at a time."""
    spec = GEOMETRIES[GEOMETRY].spec("exact")
    return Fleet(spec, budget_gb * GB, num_replicas, rule, clock or Clock()).run(requests)


def hot_prefix(
    per_second: float, limit: int = 600, seed: int = 10, length: int = 8000
) -> list[Request]:
    """Independent requests behind one prefix, each with 50 to 400 tokens of its own and an answer
    of 20 to 100, at random moments."""
    rng = np.random.default_rng(seed)
    prefix, arrival, requests = draw_tokens(rng, length), 0.0, []
    for i in range(limit):
        arrival += rng.exponential(1 / per_second)
        prompt = np.concatenate([prefix, draw_tokens(rng, rng.integers(50, 401))])
        requests.append(Request(prompt, draw_tokens(rng, rng.integers(20, 101)), i, 0, arrival))
    return requests


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay.replicas",
        description="Requests split over replicas, against one cache with all of their memory.",
    )
    add, names = parser.add_argument, {"nargs": "+", "metavar": "NAME"}
    add(
        "--workloads",
        choices=WORKLOADS,
        default=["chat", "agent"],
        help="Replay these workloads. The default is both.",
        **names,
    )
    add_seeds(parser, SEEDS)
    add(
        "--replicas",
        type=whole_number,
        default=2,
        metavar="N",
        help="Split the requests over N replicas. The default is %(default)s.",
    )
    add(
        "--speed",
        type=float,
        default=inf,
        metavar="TOKENS",
        help="Let a replica compute this many prompt tokens a second. The default is no limit.",
    )
    add(
        "--answer-speed",
        type=float,
        default=inf,
        metavar="TOKENS",
        help="Let a replica generate this many tokens a second. The default is no limit.",
    )
    options = parser.parse_args(arguments)
    clock, number = Clock(options.speed, options.answer_speed), options.replicas
    faster = Clock(number * options.speed, options.answer_speed)
    print(
        header("workload, GB, seed", ["one cache, %", *RULES, *(f"{r}: max/mean" for r in RULES)])
    )
    for name in options.workloads:
        for budget in WORKLOADS[name].budgets_gb[BUDGETS]:
            for seed in options.seeds:
                requests = list(WORKLOADS[name].generate(seed=seed))
                one = serve(requests, budget, 1, clock=faster).skipped_percent
                split = [serve(requests, budget, number, rule, clock) for rule in RULES.values()]
                columns = [f"{one:.1f}", *(f"{r.skipped_percent - one:+.1f}" for r in split)]
                columns += [f"{result.imbalance:.2f}" for result in split]
                print(f"| {name}, {budget:g}, {seed} | {' | '.join(columns)} |", flush=True)
    print(f"\n{header('one hot prefix, requests a second', RULES)}")
    for per_second in HOT_PER_SECOND:
        requests = hot_prefix(per_second)
        split = [serve(requests, HOT_GB, number, rule, HOT_CLOCK) for rule in RULES.values()]
        columns = [f"{r.unfair_seconds:.2f} of {r.seconds:.1f} s" for r in split]
        print(f"| {per_second} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
