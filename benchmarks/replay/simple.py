"""SimplePolicy: hyperbolic caching with ghost entries, a candidate to replace the learnt policy.

Hyperbolic caching (Blankstein, Sen, Freedman, ATC 2017) values an item by its uses over its
lifetime. Here an item may also end after each of its uses, as sessions do: the BG/NBD model of
customers who leave unnoticed (Fader, Hardie, Lee, Marketing Science 2005). How likely a next use
is, and how long it takes to come, is counted per class of states, with and without a state stored.
Placement, work and pages are those of `HybridPolicy`.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_hybrid.cache.index.tree import NO_ORIGIN, Checkpoint, Kind, Origin, Path
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.hybrid import HybridPolicy
from megatron_hybrid.cache.policy.tail_distances import TailDistances

STAGES = 4
"""Uses from which on states are no longer told apart by their number."""
PRIOR_USED, PRIOR_GAP = 0.3, 100.0
"""Probability of a next use, and requests until it, before any was observed."""
WEIGHT = 2
"""Weight, in uses, of the mean of all classes as the prior of a class, and of the gap of its class
as the prior of a state's own."""


class Fates:
    """What became of the states of one class.

    Args:
        mean: of all classes, the prior; None: it is the mean itself.
    """

    def __init__(self, mean: Fates | None = None):
        self._mean = mean
        self._entered = self._uses = self._gaps = 0.0
        self.used, self.gap = (mean.used, mean.gap) if mean else (PRIOR_USED, PRIOR_GAP)
        """Probability of a next use; mean of requests until it."""

    def count(self, entered: int, uses: int, gap: int, requests: int) -> None:
        """So many states entered the class, and so many left it by a use after `gap` requests.
        requests: so far."""
        self._entered += entered
        self._uses += uses
        self._gaps += gap
        used, mean_gap = PRIOR_USED, PRIOR_GAP
        if self._mean is not None:
            self._mean.count(entered, uses, gap, requests)
            used, mean_gap = self._mean.used, self._mean.gap
        self.gap = (self._gaps + WEIGHT * mean_gap) / (self._uses + WEIGHT)
        # Little's law: uses per request x gap of them still wait for their next use. Twice as
        # many, since the longest gaps have not ended.
        waiting = min(self._entered - self._uses, 2 * self._uses * self.gap / max(1, requests))
        self.used = (self._uses + WEIGHT * used) / (self._entered - waiting + WEIGHT)


class HyperbolicReuse:
    """Expected uses per request; takes the place of `ReuseModel`. needs_state: as there."""

    def __init__(self, needs_state: bool):
        self.is_covered = Checkpoint.is_covered if needs_state else Checkpoint.is_continued
        self.now = 0
        self.distances = TailDistances()
        self._all = Fates()
        self._fates: dict[tuple, Fates] = {}

    def _fates_of(self, kind: Kind, origin: Origin, uses: int) -> Fates:
        """States of a class: by kind, what their request continued, and uses so far."""
        key = kind, origin.resumed_from, origin.mostly_known, min(uses, STAGES)
        if key not in self._fates:
            self._fates[key] = Fates(self._all)
        return self._fates[key]

    def rate(self, checkpoint: Checkpoint, covered: bool | None = None) -> float:
        """Expected uses per request: uses / lifetime of a state that has not ended, times the
        probability that it has not. The first use only starts the lifetime."""
        fates = self._fates_of(checkpoint.kind, checkpoint.origin, checkpoint.uses)
        uses = max(0, checkpoint.uses - 1) + WEIGHT
        age = self.now - checkpoint.born + WEIGHT * fates.gap
        used_at = checkpoint.last_use - checkpoint.born + WEIGHT * fates.gap
        ended = (1 - fates.used) / fates.used * whole_power(age / used_at, uses)
        return uses / age / (1 + ended)

    def new_rate(self, kind: Kind, origin: Origin) -> float:
        """Of a state that is about to be saved."""
        fates = self._fates_of(kind, origin, 0)
        return fates.used / fates.gap

    def watch(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is new."""
        fates = self._fates_of(checkpoint.kind, checkpoint.origin, 0)
        fates.count(1, 0, 0, self.now)

    def _count_use(self, checkpoint: Checkpoint) -> None:
        kind, origin = checkpoint.kind, checkpoint.origin
        gap = self.now - checkpoint.last_use
        self._fates_of(kind, origin, checkpoint.uses).count(0, 1, gap, self.now)
        checkpoint.uses += 1
        checkpoint.last_use = self.now
        if checkpoint.uses == 1:
            checkpoint.born = self.now  # from here on it is judged by uses of its own
        self._fates_of(kind, origin, checkpoint.uses).count(1, 0, 0, self.now)

    def observe(
        self, path: Path, resumed: Checkpoint | None, prompt_tokens: int
    ) -> tuple[Origin, int]:
        """A prompt was admitted: as `ReuseModel.observe`."""
        self.now += 1
        known = path.checkpoints()
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
                self._count_use(checkpoint)
            elif beyond > 0 and checkpoint.is_fork():
                self._count_use(checkpoint)
                if checkpoint.uses >= 2 and (saved := self.rate(checkpoint) * beyond) > most:
                    lost_fork, most = checkpoint.position, saved
        if deepest.kind > Kind.ANSWER_END:
            return Origin(mostly_known=2 * path.known > prompt_tokens), lost_fork
        return Origin(1, deepest.kind), lost_fork

    def count_exposure(self, checkpoint: Checkpoint) -> None:
        """Nothing is counted before a use."""

    def maintain(self, num_watched: int) -> None:
        """Nothing is due."""

    def check_integrity(self, watched: Iterable[Checkpoint]) -> None:
        """Nothing is kept of single checkpoints."""


class SimplePolicy(HybridPolicy):
    """`HybridPolicy` with `HyperbolicReuse`."""

    def __init__(self, spec: CacheSpec, **parts: bool):
        super().__init__(spec, **{"own_uses": False, **parts})
        self.reuse = HyperbolicReuse(spec.needs_state)


def whole_power(base: float, exponent: int) -> float:
    """base^exponent by products: the same bits on every machine; too large ones are infinite."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
