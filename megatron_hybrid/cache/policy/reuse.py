"""How likely is a state used again? Learnt while serving, from what became of states like it.

Time is counted in admitted requests. Every position whose state is saved, was saved or might have
been is watched for as long as its tokens are known (`Checkpoint`, stored or not): each request that
it would serve is a use, all the time in between is time at risk. Uses / time at risk by class and
age is a hazard rate. From the hazards of a class follows, for each age, the best rate of uses per
request that holding such a state from now on can bring, if it is given up at the best moment (the
Gittins index of its waiting time, Gittins 1979; hit density by age and class as in LHD, Beckmann et
al. 2018). Where sessions end is learnt turn by turn (sessions.py).

Shape letters: C classes, A ages; G groups of sessions, K classes of turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from megatron_hybrid.cache.index.tree import NO_ORIGIN, Checkpoint, Edge, Kind, Origin, Path
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
"""Uses per request of a state before anything is known."""
_PRIOR_GAP = 100.0
"""Requests between uses that a state which was used once is credited with."""
_CLASS_WEIGHT = 0.6
"""Uses that speak for a class being like the one that differs only in being covered."""
_AGE_WEIGHT = 3.0
"""Uses that speak, at each age, for what is expected there: from younger ones, and from the class
that differs only in being covered."""
_MEMORY = 1000
"""Requests after which an observation counts half."""
_NO_FADING = 10**9
_NO_OWN_WAITS = 1e9
"""The same, and `OWN_WEIGHT`, where these parts are left out."""

_REFIT_INTERVAL = 16, 128
"""Requests from one time that rates are brought up to date to the next: at first, and at most; in
between a sixteenth of all so far."""

_MOSTLY_KNOWN = 8 * len(Kind)
_CONTINUED = _MOSTLY_KNOWN + 2 * len(Kind)
_REPEATED = _CONTINUED + 2 * len(Kind)
"""Where classes begin. From 0 on by kind, whether used, passed and covered; what was neither used
nor passed by kind and covered, of requests that found more than they brought, and of those that go
on from another (their ends have classes of their own: `_SESSIONS`); what was used repeatedly."""
_OWN_GAPS = slice(_REPEATED, _REPEATED + 4)
_SESSION_GROUPS = 8
_SESSIONS = slice(_OWN_GAPS.stop, _OWN_GAPS.stop + _SESSION_GROUPS * TURN_CLASSES)
"""Ends: by kind, what their request went on from, covered; within each such group by number of
turns."""
CLASSES = _SESSIONS.stop


def class_of(checkpoint: Checkpoint, covered: bool, own_gap: bool = True) -> int:
    """States of one class are expected to have one fate. covered: whether a deeper state is, or
    shall be, stored beneath it (`ReuseModel.is_covered`). own_gap: as in `Parts`.

    Used once or never: by kind, whether used, whether a later request went past it, and whether a
    deeper state is stored beneath it. Those that were neither used nor passed also by whether their
    request brought more than it found (a document that others will ask) or less (a question to a
    known one), or went on from another request. Ends of prompts and answers then also by the turns
    before them, and by where their request went on from: who continues prompts, not answers (a chat
    that drops its thinking) does it again. Used more often: its own rate tells more than what it
    is; see `time_scale`.
    """
    uses, passed = checkpoint.uses, checkpoint.passed
    if uses >= 2 and own_gap:
        return _REPEATED + 2 * passed + covered
    if uses or passed:
        return 8 * checkpoint.kind + 4 * (uses > 0) + 2 * passed + covered
    return _new_class(checkpoint.kind, checkpoint.origin, covered)


def _new_class(kind: int, origin: Origin, covered: bool) -> int:
    """Of a state that was neither used nor passed. origin: of its request."""
    turns, resumed_from, mostly_known = origin
    if not turns:
        return (_MOSTLY_KNOWN + 2 * kind if mostly_known else 8 * kind) + covered
    if kind > Kind.ANSWER_END:
        return _CONTINUED + 2 * kind + covered
    group = 4 * kind + 2 * resumed_from + covered
    return _SESSIONS.start + TURN_CLASSES * group + turn_class(turns)


def time_scale(checkpoint: Checkpoint) -> float:
    """Ages of states that were used repeatedly are measured in their own mean gap (times 32), so
    that frequent and rare ones share what is learnt. The gap is the mean of a Gamma posterior."""
    if checkpoint.uses < 2:
        return 1.0
    return 32.0 * (checkpoint.uses + 1) / (checkpoint.last_use - checkpoint.born + _PRIOR_GAP)


class ReuseModel:
    """Uses and time at risk by class and age, and the rates that follow.

    Args:
        needs_state: False: KV alone resumes, so every position that a request ended at or forked
            off stands for the KV that leads there.
        parts: what is learnt, and what is left out.
    """

    def __init__(self, needs_state: bool = True, parts: Parts = ALL_PARTS):
        self.is_covered = Checkpoint.is_covered if needs_state else Checkpoint.is_continued
        """Whether something deeper than a checkpoint serves those who go past it."""
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
        # Yet to be counted, flat: (class, age) and (class, from age, to age).
        self._uses: list[float] = []
        self._spans: list[float] = []
        self._back_GKA = np.ones((_SESSION_GROUPS, TURN_CLASSES, AGES))
        self._rate_CA: list[list[float]] = []  # it is looked up one by one, numpy is slow at that
        self.refit()

    def observe(
        self, path: Path, resumed: Checkpoint | None, prompt_tokens: int
    ) -> tuple[Origin, int]:
        """A prompt was admitted. Counts which states it used or would have used, and how far before
        the end of another prompt it left that one. Call it before the path changes.

        Counterfactual credit: the deepest known position, and every fork above the resumed one,
        count as used. A system prompt's, say, behind which every chat lost its own state.

        Args:
            path: what is known of the prompt.
            resumed: the state that it is restored from.
            prompt_tokens: how long it is.

        Returns:
            The origin of the request, and the position of the most valuable fork that lost its
            state (`Lease.lost_fork`).
        """
        self.now += 1
        parts, known = self._parts, path.checkpoints()
        if path.edges:
            self._observe_distance(path, known)
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
        """Of a request whose deepest known position this is."""
        parts = self._parts
        if deepest.kind > Kind.ANSWER_END:
            return Origin(mostly_known=mostly_known and parts.mostly_known)
        if not parts.turns:
            return NO_ORIGIN
        resumed_from = deepest.kind if parts.resumed_from else Kind.PROMPT_END
        return Origin(deepest.origin.turns + 1, resumed_from)

    def _observe_distance(self, path: Path, known: list[Checkpoint]) -> None:
        """Where the prompt leaves another between two of its tokens, that one's end may lie beyond
        forks: the newest way on leads to one."""
        edge = path.edges[-1]
        ends = prompt_ends(edge, path.known)
        if not ends and any(checkpoint.kind == Kind.PROMPT_END for checkpoint in known):
            ends = [path.known]
        elif path.known < edge.end:
            while not ends and edge.children:
                edge = next(reversed(edge.children.values()))
                ends = prompt_ends(edge, edge.start)
        if ends:
            self.distances.observe(min(ends) - path.known)

    def rate(self, checkpoint: Checkpoint, covered: bool | None = None) -> float:
        """Uses per request to be expected of it. covered: as in `class_of` (default: as it is)."""
        if covered is None:
            covered = self.is_covered(checkpoint)
        rate_A = self._rate_CA[self._class_of(checkpoint, covered)]
        age = self.now - checkpoint.last_use
        if checkpoint.uses < 2:
            return rate_A[age_class(age)]
        scale = self._time_scale(checkpoint)
        return rate_A[age_class(age * scale)] * scale

    def new_rate(self, kind: Kind, origin: Origin) -> float:
        """Uses per request to be expected of a state that is about to be saved."""
        return self._rate_CA[_new_class(kind, origin, False)][0]

    def count_use(self, checkpoint: Checkpoint, resumed: Checkpoint | None = None) -> None:
        """A request resumed from it, or would have, had it been stored. resumed: what it did resume
        from."""
        self.count_exposure(checkpoint)
        cls = self._class_of(checkpoint, self.is_covered(checkpoint))
        # It came between two whole ages, the later of which ends its time at risk.
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
        """It is new."""
        self._clock.add(checkpoint)

    def mark_passed(self, checkpoint: Checkpoint) -> None:
        """A request went past it."""
        if not checkpoint.passed and self._parts.passed:
            self.count_exposure(checkpoint)
            checkpoint.passed = True

    def count_exposure(self, checkpoint: Checkpoint) -> None:
        """Call it before its class changes: its time at risk so far is counted."""
        self._count(checkpoint, self.now)

    def _count(self, checkpoint: Checkpoint, until: int) -> None:
        """Count its time at risk from when it was counted until; what is too much is taken back."""
        if checkpoint.counted == until:
            return
        cls = self._class_of(checkpoint, self.is_covered(checkpoint))
        scale = self._time_scale(checkpoint)
        start = (checkpoint.counted - checkpoint.last_use) * scale
        end = (until - checkpoint.last_use) * scale
        self._spans += (cls, start, end)
        checkpoint.counted = until

    def maintain(self, num_watched: int) -> None:
        """Once per request: count the time at risk of those whose turn it is, and learn now and
        then. num_watched: how many checkpoints are watched."""
        for age, checkpoints in self._clock.due(self.now):
            # The next visit comes after as many requests again. Half of them are counted in
            # advance: then what is counted of all together is neither late nor early.
            for checkpoint in checkpoints:
                self._count(checkpoint, self.now + age // 2)
        first, most = _REFIT_INTERVAL
        if self.now - self._fitted >= min(max(first, self.now // 16), most):
            self._clock.compact(num_watched)
            with suppress(MemoryError):  # the next request tries again
                self.refit()

    def check_integrity(self, watched: Iterable[Checkpoint]) -> None:
        """Raises RuntimeError unless the time at risk of each of these will be counted. watched:
        all that are in the tree."""
        self._clock.check_integrity(watched)

    def refit(self) -> None:
        """Bring the rates up to date with what was counted."""
        uses_CA, counted_CA = self.counts()
        # What is taken back may weigh more by now than when it was counted in advance.
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
        """Uses, and time at risk in requests, [C, A] each. They are the model's own: those of long
        ago count less."""
        uses, spans = np.array(self._uses).reshape(-1, 2), np.array(self._spans).reshape(-1, 3)
        class_N, start_N, end_N = spans[:, 0].astype(int), spans[:, 1], spans[:, 2]
        at_risk = exposure_beyond(class_N, start_N, CLASSES)
        at_risk -= exposure_beyond(class_N, end_N, CLASSES)
        used = count_by_age(uses[:, 0].astype(int), uses[:, 1], CLASSES)
        self._uses_CA += used
        self._risk_CA += at_risk
        self._uses, self._spans = [], []
        return self._uses_CA, self._risk_CA


def prompt_ends(edge: Edge, start: int) -> list[int]:
    """Where prompts ended on an edge, from a position on."""
    ends = [c.position for c in edge.checkpoints.values() if c.kind == Kind.PROMPT_END]
    return [position for position in ends if position >= start]


def mean_rate(uses_CA: np.ndarray, risk_CA: np.ndarray) -> float:
    """Uses per request at risk of all states whose ages are in requests."""
    uses, risk = (
        ordered_sum(ordered_sum(counts_CA.T)) - ordered_sum(ordered_sum(counts_CA[_OWN_GAPS].T))
        for counts_CA in (uses_CA, risk_CA)
    )
    return float(shrink_to_prior(uses, risk, _PRIOR_RATE, 1))


def class_hazards(uses_CA: np.ndarray, risk_CA: np.ndarray, mean: float) -> np.ndarray:
    """Uses per request at risk, [C, A]. How it changes with age is told by a class together with
    the one that differs only in being covered; by how much it is higher or lower than in both, by
    the class alone (proportional hazards, Cox 1972); where that has seen many uses or much time of
    one age, they speak for themselves."""
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
