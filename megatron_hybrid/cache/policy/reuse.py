"""ReuseModel: expected uses of a state, learnt while serving from the fate of similar states.

Time is counted in admitted requests. Every position whose state is, was or could have been saved is
watched as long as its tokens are known (`Checkpoint`, stored or not; without a state it is a ghost
entry). Each request that it would serve is a use, the time in between is exposure (time at risk).
Uses / exposure by class and age is a hazard rate. From the hazards of a class follows, for each
age, the largest rate of uses per request up to any moment of giving up (the Gittins index of the
waiting time, Gittins 1979; hit density by age and class as in LHD, Beckmann et al. 2018). The ends
of sessions are learnt turn by turn (sessions.py).

Shape letters: C classes, A ages; G groups of sessions, K classes of turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from megatron_hybrid.cache.index.tree import NO_ORIGIN, Checkpoint, Kind, Origin, Path
from megatron_hybrid.cache.policy.exposure_clock import ExposureClock
from megatron_hybrid.cache.policy.hazards import (
    AGES,
    LEAST,
    age_class,
    best_rates,
    count_by_age,
    exposure_beyond,
    hazards,
    ordered_sum,
    shrink_to_prior,
)
from megatron_hybrid.cache.policy.parts import ALL_PARTS, Parts
from megatron_hybrid.cache.policy.sessions import (
    OWN_WEIGHT,
    TURN_CLASSES,
    session_hazards,
    turn_class,
)
from megatron_hybrid.cache.policy.tail_distances import TailDistances

_PRIOR_RATE = 1e-3
"""Prior of the uses per request of a state."""
_PRIOR_GAP = 100.0
"""Prior of the requests between two uses of one state."""
_CLASS_WEIGHT = 0.6
"""Weight, in uses, of the prior that a class is like the one that differs only in `covered`."""
_AGE_WEIGHT = 3.0
"""Weight, in uses, of the prior at each age: from younger ages, and from the class that differs
only in `covered`."""
_MEMORY = 1000
"""Requests after which an observation counts half."""
_NO_FADING = 10**9
_NO_OWN_WAITS = 1e9
"""The same, and `OWN_WEIGHT`, where these parts are left out."""

_REFIT_INTERVAL = 16, 128
"""Requests between two fits of the rates, at least and at most; in between a sixteenth of all
requests so far."""

_MOSTLY_KNOWN = 8 * len(Kind)
_CONTINUED = _MOSTLY_KNOWN + 2 * len(Kind)
_REPEATED = _CONTINUED + 2 * len(Kind)
"""First classes of each section. From 0 on: by kind, used, passed and covered. Of states neither
used nor passed: by kind and covered, of requests whose tokens were mostly known, and of those that
continue a session (their ends have classes of their own: `_SESSIONS`). Of states used repeatedly:
by passed and covered."""
_OWN_GAPS = slice(_REPEATED, _REPEATED + 4)
_SESSION_GROUPS = 8
_SESSIONS = slice(_OWN_GAPS.stop, _OWN_GAPS.stop + _SESSION_GROUPS * TURN_CLASSES)
"""Ends in sessions: groups by kind, kind of end resumed and covered; in each by number of turns."""
CLASSES = _SESSIONS.stop


def class_of(checkpoint: Checkpoint, covered: bool, own_gap: bool = True) -> int:
    """States of one class share their hazards. covered: whether a deeper state is, or shall be,
    stored beneath it (`ReuseModel.is_covered`). own_gap: as in `Parts`.

    Used at most once: by kind, used, passed by a later request, and covered. Neither used nor
    passed: also by whether its request brought more tokens than were known (a document that others
    will ask about) or fewer (a question about a known one), or continued a session. Then ends of
    prompts and answers also by the number of turns, and by the kind of end resumed: a client that
    continues prompts and not answers (a chat that drops its thinking) will do so again. Used more
    often: by its own rate; see `time_scale`.
    """
    uses, passed = checkpoint.uses, checkpoint.passed
    if uses >= 2 and own_gap:
        return _REPEATED + 2 * passed + covered
    if uses or passed:
        return 8 * checkpoint.kind + 4 * (uses > 0) + 2 * passed + covered
    return _new_class(checkpoint.kind, checkpoint.origin, covered)


def _new_class(kind: int, origin: Origin, covered: bool) -> int:
    """Class of a state that was neither used nor passed. origin: of its request."""
    turns, resumed_from, mostly_known = origin
    if not turns:
        return (_MOSTLY_KNOWN + 2 * kind if mostly_known else 8 * kind) + covered
    if kind > Kind.ANSWER_END:
        return _CONTINUED + 2 * kind + covered
    group = 4 * kind + 2 * resumed_from + covered
    return _SESSIONS.start + TURN_CLASSES * group + turn_class(turns)


def time_scale(checkpoint: Checkpoint) -> float:
    """Factor of the ages of a state that was used repeatedly: they are measured in its own mean gap
    / 32, so that frequent and rare states share one class. The gap is the mean of a Gamma
    posterior."""
    if checkpoint.uses < 2:
        return 1.0
    return 32.0 * (checkpoint.uses + 1) / (checkpoint.last_use - checkpoint.born + _PRIOR_GAP)


class ReuseModel:
    """Uses and exposure by class and age, and the rates that follow.

    Args:
        needs_state: False: KV alone resumes, so each watched position stands for the KV before it.
        parts: of the policy.
    """

    def __init__(self, needs_state: bool = True, parts: Parts = ALL_PARTS):
        self.is_covered = Checkpoint.is_covered if needs_state else Checkpoint.is_continued
        """Whether a deeper position than a checkpoint serves requests that continue past it."""
        self.now = 0
        """Requests admitted so far."""
        self.distances = TailDistances()
        self._parts = parts
        self._class_of, self._time_scale = class_of, time_scale
        if not (parts.covered and parts.own_gap):
            self._class_of = lambda checkpoint, covered: class_of(
                checkpoint, covered and parts.covered, parts.own_gap
            )
        if not parts.own_gap:
            self._time_scale = lambda checkpoint: 1.0
        self._fitted = 0
        self._clock = ExposureClock()
        self._uses_CA, self._risk_CA = np.zeros((2, CLASSES, AGES))
        # Not counted yet, flat: (class, age) and (class, from age, to age).
        self._uses: list[float] = []
        self._spans: list[float] = []
        self._back_GKA = np.ones((_SESSION_GROUPS, TURN_CLASSES, AGES))
        self._rate_CA: list[list[float]] = []  # a list: single look-ups in numpy are slow
        self.refit()

    def observe(
        self, path: Path, resumed: Checkpoint | None, prompt_tokens: int
    ) -> tuple[Origin, int]:
        """A prompt was admitted. Counts the states that it used or would have used, and its
        distance from the end of the prompt that it leaves. Call it before the path changes.

        Counterfactual credit: the deepest known position, and every fork deeper than the resumed
        one, count as used (such as a system prompt, when every chat behind it lost its own state).

        Args:
            path: the known tokens of the prompt.
            resumed: the state that it is restored from.
            prompt_tokens: its length.

        Returns:
            The origin of the request, and the position of the most valuable fork that lost its
            state (`Lease.lost_fork`).
        """
        self.now += 1
        parts, known = self._parts, path.checkpoints()
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
                self.count_use(checkpoint, resumed)
                continue
            if beyond > 0 and parts.fork_uses and checkpoint.is_fork():
                self.count_use(checkpoint, resumed)
                if checkpoint.uses >= 2 and parts.lost_forks:
                    saved = self.rate(checkpoint) * beyond
                    if saved > most:
                        lost_fork, most = checkpoint.position, saved
            self.mark_passed(checkpoint)
        return self._origin(deepest, 2 * path.known > prompt_tokens), lost_fork

    def _origin(self, deepest: Checkpoint, mostly_known: bool) -> Origin:
        """Origin of a request with this deepest known position."""
        parts = self._parts
        if deepest.kind > Kind.ANSWER_END:
            return Origin(mostly_known=mostly_known and parts.mostly_known)
        if not parts.turns:
            return NO_ORIGIN
        resumed_from = deepest.kind if parts.resumed_from else Kind.PROMPT_END
        return Origin(deepest.origin.turns + 1, resumed_from)

    def rate(self, checkpoint: Checkpoint, covered: bool | None = None) -> float:
        """Expected uses per request. covered: as in `class_of` (default: as it is now)."""
        if covered is None:
            covered = self.is_covered(checkpoint)
        rate_A = self._rate_CA[self._class_of(checkpoint, covered)]
        age = self.now - checkpoint.last_use
        if checkpoint.uses < 2:
            return rate_A[age_class(age)]
        scale = self._time_scale(checkpoint)
        return rate_A[age_class(age * scale)] * scale

    def new_rate(self, kind: Kind, origin: Origin) -> float:
        """Expected uses per request of a state that is about to be saved."""
        return self._rate_CA[_new_class(kind, origin, False)][0]

    def count_use(self, checkpoint: Checkpoint, resumed: Checkpoint | None = None) -> None:
        """A request resumed from this checkpoint, or would have if its state were stored. resumed:
        the checkpoint that it did resume from."""
        self.count_exposure(checkpoint)
        cls = self._class_of(checkpoint, self.is_covered(checkpoint))
        # The use came between two whole ages; the exposure ends at the later one.
        age = (self.now - checkpoint.last_use - 0.5) * self._time_scale(checkpoint)
        self._uses += (cls, age)
        checkpoint.uses += 1
        if resumed is not None and resumed is not checkpoint:
            if checkpoint.served_by != resumed.position:
                checkpoint.served_by, checkpoint.served_count = resumed.position, 0
            checkpoint.served_count += 1
        checkpoint.last_use = checkpoint.counted = self.now
        self._clock.add(checkpoint)

    def watch(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is new."""
        self._clock.add(checkpoint)

    def mark_passed(self, checkpoint: Checkpoint) -> None:
        """A request went past this checkpoint."""
        if not checkpoint.passed and self._parts.passed:
            self.count_exposure(checkpoint)
            checkpoint.passed = True

    def count_exposure(self, checkpoint: Checkpoint) -> None:
        """Count the exposure of a checkpoint up to now. Call it before its class changes."""
        self._count(checkpoint, self.now)

    def _count(self, checkpoint: Checkpoint, until: int) -> None:
        """Count the exposure since the last count. `until` before that takes exposure back."""
        if checkpoint.counted == until:
            return
        cls = self._class_of(checkpoint, self.is_covered(checkpoint))
        scale = self._time_scale(checkpoint)
        start = (checkpoint.counted - checkpoint.last_use) * scale
        end = (until - checkpoint.last_use) * scale
        self._spans += (cls, start, end)
        checkpoint.counted = until

    def maintain(self, num_watched: int) -> None:
        """Once per request: count the exposure of the checkpoints that are due, and refit now and
        then. num_watched: number of watched checkpoints."""
        for age, checkpoints in self._clock.due(self.now):
            # The next visit comes after `age` more requests. Half of them are counted in advance,
            # so that the sum over all checkpoints is neither late nor early.
            for checkpoint in checkpoints:
                self._count(checkpoint, self.now + age // 2)
        first, most = _REFIT_INTERVAL
        if self.now - self._fitted >= min(max(first, self.now // 16), most):
            self._clock.compact(num_watched)
            with suppress(MemoryError):  # the next request tries again
                self.refit()

    def check_integrity(self, watched: Iterable[Checkpoint]) -> None:
        """Raises RuntimeError unless the exposure of each of these will be counted. watched: all
        checkpoints in the tree."""
        self._clock.check_integrity(watched)

    def refit(self) -> None:
        """Compute the rates from the counts."""
        uses_CA, counted_CA = self.counts()
        # Exposure taken back may weigh more now than when it was counted in advance.
        risk_CA = np.maximum(counted_CA, 0)
        mean = mean_rate(uses_CA, risk_CA)
        hazard_CA, plain = np.empty_like(uses_CA), slice(_OWN_GAPS.stop)
        hazard_CA[plain] = class_hazards(uses_CA[plain], risk_CA[plain], mean)
        hazard_GKA, self._back_GKA = session_hazards(
            *(c_CA[_SESSIONS].reshape(self._back_GKA.shape) for c_CA in (uses_CA, risk_CA)),
            self._back_GKA,
            mean,
            OWN_WEIGHT if self._parts.own_waits else _NO_OWN_WAITS,
        )
        hazard_CA[_SESSIONS] = hazard_GKA.reshape(-1, AGES)
        rate_CA = best_rates(hazard_CA) if self._parts.gittins else hazard_CA
        self._rate_CA = rate_CA.tolist()
        memory = _MEMORY if self._parts.fading else _NO_FADING
        kept = memory / (memory + self.now - self._fitted)
        uses_CA *= kept
        counted_CA *= kept
        self._fitted = self.now

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Uses, and exposure in requests, float64 [C, A] each: the model's own arrays, in which old
        counts have faded."""
        uses, spans = np.array(self._uses).reshape(-1, 2), np.array(self._spans).reshape(-1, 3)
        class_N, start_N, end_N = spans[:, 0].astype(int), spans[:, 1], spans[:, 2]
        at_risk = exposure_beyond(class_N, start_N, CLASSES)
        at_risk -= exposure_beyond(class_N, end_N, CLASSES)
        used = count_by_age(uses[:, 0].astype(int), uses[:, 1], CLASSES)
        self._uses_CA += used
        self._risk_CA += at_risk
        self._uses, self._spans = [], []
        return self._uses_CA, self._risk_CA


def mean_rate(uses_CA: np.ndarray, risk_CA: np.ndarray) -> float:
    """Uses / exposure of all states whose ages are in requests."""
    uses, risk = (
        ordered_sum(ordered_sum(counts_CA.T)) - ordered_sum(ordered_sum(counts_CA[_OWN_GAPS].T))
        for counts_CA in (uses_CA, risk_CA)
    )
    return float(shrink_to_prior(uses, risk, _PRIOR_RATE, 1))


def class_hazards(uses_CA: np.ndarray, risk_CA: np.ndarray, mean: float) -> np.ndarray:
    """Hazards, uses per request, [C, A]. A class and the one that differs only in `covered` share
    the shape over ages; the class alone determines the factor (proportional hazards, Cox 1972).
    Both together are the prior of the class's own counts at each age."""
    other_C = np.arange(len(uses_CA)) ^ 1
    both_uses_CA, both_risk_CA = uses_CA + uses_CA[other_C], risk_CA + risk_CA[other_C]
    base_C = np.full(len(uses_CA), mean)
    base_C[_OWN_GAPS] = 1 / 32  # in units of its own mean gap / 32
    mean_C = shrink_to_prior(ordered_sum(both_uses_CA.T), ordered_sum(both_risk_CA.T), base_C, 1)
    both_CA = hazards(both_uses_CA, both_risk_CA, mean_C, _AGE_WEIGHT)
    higher_C = shrink_to_prior(
        ordered_sum(uses_CA.T), ordered_sum((risk_CA * both_CA).T), 1, _CLASS_WEIGHT
    )
    prior_CA = np.maximum(both_CA * higher_C[:, None], LEAST)
    return shrink_to_prior(uses_CA, risk_CA, prior_CA, _AGE_WEIGHT)
