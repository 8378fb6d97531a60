"""The policy that knows the trace, against all that any policy could do on tiny traces."""

from functools import partial

import numpy as np
import pytest
import replayed
from matrix import matrix_rows

from benchmarks.replay.engines.clairvoyant import Clairvoyant
from benchmarks.replay.runner import replay
from megatron_hybrid.tools.replay.lru import Ceiling, LeastRecentlyUsed

STATE_BYTES = 6
small_requests = partial(replayed.small_requests, known=4, least=0.5)


def skipped_by(engine, requests):
    return replay(requests, engine).skipped_tokens


def most_skipped(requests, state_bytes, budget):
    """The best over all choices of states to keep, after every prompt and every answer. A choice is
    a set of prefixes; the KV of each is held too, and that of the running request."""
    prompts = [tuple(request.prompt.tolist()) for request in requests]
    wholes = [p + tuple(r.output.tolist()) for p, r in zip(prompts, requests)]

    def useful(prefix):
        """Where paths end or part; a state elsewhere serves nobody better."""
        next_tokens = {
            whole[len(prefix)]
            for whole in wholes
            if whole[: len(prefix)] == prefix and len(whole) > len(prefix)
        }
        return prefix in ends or len(next_tokens) > 1

    ends = set(prompts) | set(wholes)

    def fits(states, running):
        tokens = {whole[:n] for whole in (*states, running) for n in range(1, len(whole) + 1)}
        return len(tokens) + state_bytes * len(states) <= budget

    def subsets(states, running):
        found = {frozenset()}
        for state in states:
            found |= {chosen | {state} for chosen in found if fits(chosen | {state}, running)}
        return found

    best = {frozenset(): 0}
    for prompt, whole in zip(prompts, wholes):
        assert fits((), whole)
        for running, start in ((prompt, 0), (whole, len(prompt))):
            after = {}
            for held, total in best.items():
                hits = [len(s) for s in held if running[: len(s)] == s]
                skipped = 0 if start else max(hits, default=0)
                new = [running[:n] for n in range(max(start, skipped) + 1, len(running) + 1)]
                states = held | {prefix for prefix in new if useful(prefix)}
                for chosen in subsets(states, running):
                    after[chosen] = max(after.get(chosen, 0), total + skipped)
            best = after
    return max(best.values())


def test_never_beyond_what_is_possible_and_often_as_much():
    reached = possible = 0
    for seed in range(12):
        requests = list(small_requests(seed, 5))
        longest = max(len(r.prompt) + len(r.output) for r in requests)
        budget = longest + 2 * STATE_BYTES
        found = sum(skipped_by(Clairvoyant(1, STATE_BYTES, budget), requests))
        best = most_skipped(requests, STATE_BYTES, budget)
        assert found <= best
        reached, possible = reached + found, possible + best
    assert 0.9 * possible < reached


each_kind = pytest.mark.parametrize(
    ("state_bytes", "in_flight"),
    matrix_rows([(size, n) for size in (0, STATE_BYTES) for n in (1, 3)], (0, 1), (STATE_BYTES, 3)),
)


@each_kind
def test_with_memory_for_all_it_is_the_ceiling(state_bytes, in_flight):
    requests = list(small_requests(1, 120))
    engine = Clairvoyant(1, state_bytes, 1e9)
    found = replay(requests, engine, in_flight).skipped_tokens
    assert found == replay(requests, Ceiling(), in_flight).skipped_tokens


@each_kind
def test_books_budget_and_foresight(state_bytes, in_flight):
    """The counts are those of a recount, the budget holds at every moment, and plain LRU, which
    pays the same, is below."""
    requests = list(small_requests(2, 300))

    class Checked(Clairvoyant):
        def begin(self, prompt, message_starts=()):
            handle = super().begin(prompt)
            self.check()
            return handle

        def finish(self, handle, tokens):
            super().finish(handle, tokens)
            self.check()

        def check(self):
            places = {place for path in self._wholes for place in path}
            assert self.num_tokens == sum(p.held_end - p.start for p in places)
            assert self.num_states == sum(p.state is not None for p in places)
            assert self.bytes_held <= self._budget
            for place in places:
                held = place.held_end > place.start
                assert not held or place.parent is None or place.parent.held_end == place.start
                assert place.state is None or place.held_end == place.end

    budget = 3 * max(len(r.prompt) + len(r.output) for r in requests)
    engine = Checked(1, state_bytes, budget)
    found = sum(replay(requests, engine, in_flight).skipped_tokens)
    assert not any(place.pins for path in engine._wholes for place in path)
    other = LeastRecentlyUsed(1, 1, state_bytes, budget)
    assert found > sum(replay(requests, other, in_flight).skipped_tokens) > 0


def test_another_request_than_the_foreseen_one_is_refused():
    engine = Clairvoyant(1, STATE_BYTES, 100)
    engine.foresee(list(small_requests(0, 1)))
    with pytest.raises(ValueError, match="request 0 of 99 tokens"):
        engine.begin(np.zeros(99, np.int32))


def test_a_request_that_never_fits_runs_beside_the_cache():
    requests = list(small_requests(3, 20))
    engine = Clairvoyant(1, STATE_BYTES, 3)
    assert sum(skipped_by(engine, requests)) == 0
