"""ReuseModel: expected uses of a state, learnt while serving from the fate of similar states.

Time is counted in admitted requests. Every position whose state is, was or could have been saved is
watched as long as its tokens are known (`Checkpoint`, stored or not; without a state it is a ghost
entry). Each request that it would serve is a use.

The rate of a state is its uses over its lifetime (hyperbolic caching: Blankstein, Sen, Freedman,
ATC 2017), times the probability that its last use was not the final one: sessions end unnoticed
(the BG/NBD model of customers: Fader, Hardie, Lee, Marketing Science 2005). Two numbers per fate
replace what a young state has not shown yet: how likely a next use is, and how long it takes.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from megatron_hybrid.cache.index.tree import (
    NO_ORIGIN,
    Checkpoint,
    Edge,
    Kind,
    Origin,
    Path,
    unless_opportunistic,
)

PRIOR_PROBABILITY = 0.3
"""Probability of a next use before any was observed."""
PRIOR_GAP = 100.0
"""Requests until a next use before any was observed."""
WEIGHT = 2
"""Weight of a prior in uses: that of all fates in one fate, and that of a fate in one state."""
MEMORY = 1000
"""States of one fate after which its counts are halved, so that new traffic is learnt."""
MOST_PROBABLE = 0.9
"""Upper bound of the probability of a next use: traffic that never ended so far may change."""
WINDOW = 256
"""Observed distances from the ends of prompts that are remembered."""
PRIOR_DISTANCES = (0, 32, 128, 512)
"""Distances that count as observed at first."""


@dataclass(frozen=True)
class PolicyFlags:
    """The parts of `HybridPolicy`, each of which can be left out to measure its contribution, as
    benchmarks/replay/ablations.py does."""

    # eviction
    work: bool = True
    """Candidates that take more work to recompute are worth more."""
    exclusive_kv: bool = True
    """A state is charged for KV that no other state needs."""
    refresh: bool = True
    """Values are recomputed in rotation."""
    price: bool = True
    """A new state evicts only candidates of a lesser value, or is not saved."""
    # placement
    junctions: bool = True
    """States at junctions."""
    lost_forks: bool = True
    """States saved again at forks that lost theirs."""
    tails: bool = True
    """States at the usual distance before the end of a prompt at which successors leave it."""
    prompt_ends: bool = True
    """States at the ends of prompts."""
    intervals: bool = True
    """States at equal distances in long prompts and answers."""
    opportunistic: bool = True
    """States every 256 tokens while pages are free."""
    # expected uses
    fork_uses: bool = True
    """A fork that could have served counts as used."""
    resumed_from: bool = True
    """Sessions are distinguished by the kind of end that they resume."""
    mostly_known: bool = True
    """Requests are distinguished by whether more of their tokens were known than new."""


ALL_FLAGS = PolicyFlags()


class TailDistances:
    """Histogram of the distances before the end of a prompt at which successors leave it. It is 0
    for those that continue from the end.

    If a different question follows a document each time, a state at the very end serves no other
    prompt, but one at the usual distance before the end serves most.
    """

    def __init__(self):
        self._recent: deque[int] = deque(PRIOR_DISTANCES, WINDOW)

    def observe(self, distance: int) -> None:
        """Note that a prompt left another one `distance` tokens before the end of that one."""
        self._recent.append(distance)

    def observe_path(self, path: Path, known: list[Checkpoint]) -> None:
        """Observe how far before the nearest end of a known prompt a new prompt leaves it. The end
        may lie beyond forks; then it is that of the newest branch.

        Args:
            path: its known tokens, at least one.
            known: the checkpoints on it.
        """
        edge = path.edges[-1]
        ends = _prompt_ends(edge, path.known)
        if not ends and any(checkpoint.kind == Kind.PROMPT_END for checkpoint in known):
            ends = [path.known]
        elif path.known < edge.end:
            while not ends and edge.children:
                edge = next(reversed(edge.children.values()))
                ends = _prompt_ends(edge, edge.start)
        if ends:
            self.observe(min(ends) - path.known)

    def weights(self) -> Iterator[tuple[int, float]]:
        """Yield (distance, share of the prompts that part at it or later), ascending distances."""
        sooner = 0
        for distance, count in sorted(Counter(self._recent).items()):
            sooner += count
            yield distance, sooner / len(self._recent)


def _prompt_ends(edge: Edge, start: int) -> list[int]:
    """List the positions on an edge, from `start` on, where prompts ended."""
    ends = [c.position for c in edge.checkpoints.values() if c.kind == Kind.PROMPT_END]
    return [position for position in ends if position >= start]


class FateCounts:
    """Counts of the uses of the states of one fate, which are expected to have similar ones.

    Args:
        mean: counts of all fates, the prior; by default these are the counts of all.
    """

    def __init__(self, mean: FateCounts | None = None):
        self._mean = mean
        self._states = self._uses = self._gaps = self._since = 0.0
        self._expected: tuple[int, float, float] = -1, PRIOR_PROBABILITY, PRIOR_GAP

    def add_state(self, now: int) -> None:
        """Count a state that has this fate from now on. now: admitted requests."""
        self._states += 1
        if self._states > MEMORY:
            self._states, self._uses, self._gaps = self._states / 2, self._uses / 2, self._gaps / 2
            self._since = (self._since + now) / 2
        self._changed()
        if self._mean is not None:
            self._mean.add_state(now)

    def add_use(self, gap: int) -> None:
        """Count a use of one of the states, `gap` requests after it got this fate."""
        self._uses += 1
        self._gaps += gap
        self._changed()
        if self._mean is not None:
            self._mean.add_use(gap)

    def _changed(self) -> None:
        self._expected = -1, 0.0, 0.0

    def expected(self, now: int) -> tuple[float, float]:
        """Fit the probability of a next use and the mean requests until it, once per request."""
        fitted, probability, gap = self._expected
        if fitted != now:
            prior, prior_gap = PRIOR_PROBABILITY, PRIOR_GAP
            if self._mean is not None:
                prior, prior_gap = self._mean.expected(now)
            gap = (self._gaps + WEIGHT * prior_gap) / (self._uses + WEIGHT)
            # Little's law: uses per request x gap of them wait for a next use that will come.
            # Twice as many, since the longest gaps have not ended yet.
            coming = 2 * self._uses * gap / max(1.0, now - self._since)
            pending = max(0.0, min(self._states - self._uses, coming))
            probability = (self._uses + WEIGHT * prior) / (self._states - pending + WEIGHT)
            probability = min(probability, MOST_PROBABLE)
            self._expected = now, probability, gap
        return probability, gap


class ReuseModel:
    """Expected uses per request.

    Args:
        parts: of the policy.
    """

    def __init__(self, parts: PolicyFlags = ALL_FLAGS):
        self.now = 0
        """Requests admitted so far."""
        self.num_waiting = 0
        """Requests that wait and have a known use."""
        self.distances = TailDistances()
        self._parts = parts
        self._all = FateCounts()
        self.counts: defaultdict[tuple[Kind, Origin, bool], FateCounts] = defaultdict(
            partial(FateCounts, self._all)
        )
        """Counts by kind, origin of the request that saved the state, and whether it was used."""

    def _counts_of(self, checkpoint: Checkpoint) -> FateCounts:
        return self.counts[checkpoint.kind, checkpoint.origin, checkpoint.uses > 0]

    def new_rate(self, kind: Kind, origin: Origin) -> float:
        """Return the expected uses per request of a state that is about to be saved."""
        probability, gap = self.counts[kind, origin, False].expected(self.now)
        return probability / gap

    def rate(self, checkpoint: Checkpoint) -> float:
        """Return the expected uses per request of a watched position.

        This is uses / lifetime, both with a prior of `WEIGHT` uses at the mean gap of its fate, x
        P(its last use was not the final one). If it was not, the time without use had the
        likelihood (time to the last use / lifetime) ^ uses. Before its first use a state's lifetime
        is its age; the first use starts it anew.
        """
        probability, gap = self._counts_of(checkpoint).expected(self.now)
        uses = (checkpoint.uses or 1) - 1 + WEIGHT
        prior = WEIGHT * gap - checkpoint.born
        lifetime = prior + self.now
        ended = (1 - probability) / probability
        ended *= whole_power(lifetime / (prior + checkpoint.last_use), uses)
        rate = uses / lifetime / (1 + ended)
        return max(rate, checkpoint.waiting / self.num_waiting) if checkpoint.waiting else rate

    def watch(self, checkpoint: Checkpoint) -> None:
        """Count a new checkpoint."""
        self._counts_of(checkpoint).add_state(self.now)

    def count_use(self, checkpoint: Checkpoint) -> None:
        """Count a request that resumed from this checkpoint, or would have if it were stored."""
        self._counts_of(checkpoint).add_use(self.now - checkpoint.last_use)
        checkpoint.uses += 1
        checkpoint.last_use = self.now
        if checkpoint.uses == 1:
            checkpoint.born = self.now
        self._counts_of(checkpoint).add_state(self.now)

    def observe(
        self, path: Path, resumed: Checkpoint | None, prompt_tokens: int
    ) -> tuple[Origin, int]:
        """Count the states that an admitted prompt used or would have used, and its distance from
        the end of the prompt that it leaves. Call it before the path changes.

        Counterfactual credit: the deepest known position, and every fork deeper than the resumed
        one, count as used (such as a system prompt, when every chat after it lost its own state).

        Args:
            path: the known tokens of the prompt.
            resumed: the state that it is restored from.
            prompt_tokens: its length.

        Returns:
            The origin of the request, and the position of the most valuable fork that lost its
            state (`Lease.lost_fork`).
        """
        self.now += 1
        parts = self._parts
        known = [c for c in path.checkpoints() if c.kind is not Kind.OPPORTUNISTIC]
        if resumed is not None and resumed.kind is Kind.OPPORTUNISTIC:
            resumed.uses, resumed.last_use = resumed.uses + 1, self.now
            resumed = unless_opportunistic(resumed)
        if path.edges:
            self.distances.observe_path(path, known)
        if not known:
            return NO_ORIGIN, 0
        deepest = max(known, key=lambda checkpoint: checkpoint.position)
        start = resumed.position if resumed else 0
        lost_fork, most = 0, 0.0
        for checkpoint in known:
            beyond = checkpoint.position - start
            if checkpoint is deepest or checkpoint is resumed:
                self.count_use(checkpoint)
            elif beyond > 0 and parts.fork_uses and checkpoint.is_fork():
                self.count_use(checkpoint)
                if checkpoint.uses >= 2 and parts.lost_forks:
                    saved = self.rate(checkpoint) * beyond
                    if saved > most:
                        lost_fork, most = checkpoint.position, saved
        return self._origin(deepest, 2 * path.known > prompt_tokens), lost_fork

    def _origin(self, deepest: Checkpoint, mostly_known: bool) -> Origin:
        """Return the origin of a request with this deepest known position."""
        parts = self._parts
        if deepest.kind > Kind.ANSWER_END:
            return Origin(mostly_known=mostly_known and parts.mostly_known)
        return Origin(deepest.kind if parts.resumed_from else Kind.PROMPT_END)


def whole_power(base: float, exponent: int) -> float:
    """Compute base^exponent by products, which give all ranks the same bits. It is infinity if it
    is too large."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
