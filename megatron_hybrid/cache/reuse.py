"""How likely is a state used again? Learnt while serving, from what became of states like it.

Time is counted in admitted requests. Every position whose state is saved, was saved or might have
been is watched for as long as its tokens are known (`Checkpoint`, stored or not): each request that
it would serve is a use, all the time in between is time at risk. Uses / time at risk by class and
age is a hazard rate. From the hazards of a class follows, for each age, the best rate of uses per
request that holding such a state from now on can bring, if it is given up at the best moment (the
Gittins index of its waiting time, Gittins 1979; hit density by age and class as in LHD, Beckmann et
al. 2018).

Shape letters: C classes, A ages.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from enum import IntEnum

import numpy as np

from megatron_hybrid.cache.tail_distances import TailDistances
from megatron_hybrid.cache.tree import Checkpoint, Path

AGES = 34
_BOUNDS = [2.0 ** (age // 2) * (math.sqrt(2.0) if age % 2 else 1.0) - 1 for age in range(AGES + 1)]
"""Requests where each age class starts, two per octave; the last one has no end."""
_HORIZON = 16
"""Age classes that the search for the best moment looks ahead."""
_AT_FIRST = 1e-3
"""Uses per request of a state before anything is known."""
_TYPICAL_GAP = 100.0
"""Requests between uses that a state which was used once is credited with."""
_CLASS_WEIGHT = 1.0
"""Uses that speak for the mean of all classes in the mean of one class."""
_AGE_WEIGHT = 3.0
"""Uses that speak for the hazard of younger ones of a class in the hazard at an age."""
_FADE = 0.8
"""What the hazard is multiplied with from age class to age class where nobody has been yet."""
_MEMORY = 1000
"""Requests after which an observation counts half."""


class Kind(IntEnum):
    """What a position is in the request that computed it."""

    PROMPT_END = 0
    ANSWER_END = 1
    JUNCTION = 2
    """Where a prompt left a known one, or declared by the caller."""
    MESSAGE = 3
    """Where a message of a chat starts."""
    TAIL = 4
    """As far before the end of a prompt as successors usually leave it."""
    RUNG = 5
    """One of many at a distance."""


_REPEATED = 8 * len(Kind)
_TURNS = _REPEATED + 2
CLASSES = _TURNS + 8
_PARENTS = np.arange(CLASSES)
_PARENTS[_TURNS:] = [
    8 * kind + covered for _ in range(2) for kind in range(2) for covered in (0, 1)
]
"""The class that a class is part of, itself if none: it lends its mean to one with few members."""


def class_of(checkpoint: Checkpoint) -> int:
    """States of one class are expected to have one fate.

    Used once or never: by kind, whether used, whether a later request went past it, and whether a
    deeper state is stored beneath it. The ends of prompts and answers also by where their request
    went on from: who continues prompts, not answers (a chat that drops its thinking) does it again.
    Used more often: its own rate tells more; see `time_scale`.
    """
    if checkpoint.uses >= 2:
        return _REPEATED + checkpoint.passed
    if checkpoint.uses or checkpoint.passed:
        first = 8 * checkpoint.kind + 4 * checkpoint.uses + 2 * checkpoint.passed
    else:
        first = _new_class(checkpoint.kind, checkpoint.turn)
    return first + checkpoint.is_covered()


def _new_class(kind: int, turn: int) -> int:
    """Of a state that was neither used nor passed, and has no deeper one beneath it."""
    return _TURNS + 4 * (turn - 1) + 2 * kind if turn else 8 * kind


def time_scale(checkpoint: Checkpoint, cls: int) -> float:
    """Ages of states that were used repeatedly are measured in their own mean gap (times 32), so
    that frequent and rare ones share what is learnt. The gap is the mean of a Gamma posterior."""
    if not _REPEATED <= cls < _TURNS:
        return 1.0
    return 32.0 * (checkpoint.uses + 1) / (checkpoint.last_use - checkpoint.born + _TYPICAL_GAP)


class ReuseModel:
    """Uses and time at risk by class and age, and the rates that follow."""

    def __init__(self):
        self.now = 0
        """Requests admitted so far."""
        self.distances = TailDistances()
        self._learnt = 0
        # Lists: they are counted in one by one, which numpy is slow at.
        self._uses_CA = np.zeros((CLASSES, AGES)).tolist()
        self._risk_CA = np.zeros((CLASSES, AGES)).tolist()
        self._rate_CA = np.full((CLASSES, AGES), _AT_FIRST).tolist()

    def observe(
        self, path: Path, resumed: Checkpoint | None, end_only: int | None = None
    ) -> tuple[int, int]:
        """A prompt was admitted. Counts which states it used or would have used, and how far before
        the end of another prompt it left that one. Call it before the path changes.

        Had it been there, the deepest known state would have served, and in its absence any at a
        fork beyond the one that did: a system prompt's, say, behind which every chat lost its own.

        Args:
            resumed: the state that the prompt is restored from.
            end_only: length of the prompt, where KV alone resumes: a state serves at its end only.

        Returns:
            What the prompt goes on from (`Lease.turn`), and the most valuable lost one of these
            forks (`Lease.again`).
        """
        self.now += 1
        known = path.checkpoints()
        if not known:
            return 0, 0
        if end_only is not None:
            for checkpoint in known:
                (self.used if checkpoint.position == end_only else self.passed)(checkpoint)
            return 0, 0
        deepest = max(known, key=lambda checkpoint: checkpoint.position)
        start = resumed.position if resumed else 0
        again, most = 0, 0.0
        for checkpoint in known:
            beyond = checkpoint.position - start
            if checkpoint is deepest or checkpoint is resumed:
                self.used(checkpoint)
                continue
            if beyond > 0 and checkpoint.is_fork():
                self.used(checkpoint)
                if checkpoint.uses >= 2 and (saved := self.rate(checkpoint) * beyond) > most:
                    again, most = checkpoint.position, saved
            self.passed(checkpoint)
        self._observe_distance(path, known)
        turn = deepest.kind + 1 if deepest.kind <= Kind.ANSWER_END else 0
        return turn, again

    def _observe_distance(self, path: Path, known: list[Checkpoint]) -> None:
        ends = [
            checkpoint.position
            for checkpoint in path.edges[-1].checkpoints.values()
            if checkpoint.kind == Kind.PROMPT_END and checkpoint.position >= path.known
        ]
        if ends:
            self.distances.observe(min(ends) - path.known)
        elif any(checkpoint.kind == Kind.PROMPT_END for checkpoint in known):
            self.distances.observe(0)

    def rate(self, checkpoint: Checkpoint) -> float:
        """Uses per request to be expected of it."""
        return self._rate_in(class_of(checkpoint), checkpoint)

    def rate_if_covered(self, checkpoint: Checkpoint) -> float:
        """`rate`, were a deeper state stored beneath it."""
        cls = class_of(checkpoint)
        if cls < _REPEATED or cls >= _TURNS:
            cls |= 1
        return self._rate_in(cls, checkpoint)

    def _rate_in(self, cls: int, checkpoint: Checkpoint) -> float:
        scale = time_scale(checkpoint, cls)
        return self._rate_CA[cls][age_class((self.now - checkpoint.last_use) * scale)] * scale

    def new_rate(self, kind: Kind, turn: int) -> float:
        """Uses per request to be expected of a state that is about to be saved."""
        return self._rate_CA[_new_class(kind, turn if kind <= Kind.ANSWER_END else 0)][0]

    def used(self, checkpoint: Checkpoint) -> None:
        """A request resumed from it, or would have, had it been stored."""
        self.changes(checkpoint)
        cls = class_of(checkpoint)
        age = (self.now - checkpoint.last_use) * time_scale(checkpoint, cls)
        self._uses_CA[cls][age_class(age)] += 1
        checkpoint.uses += 1
        checkpoint.last_use = checkpoint.counted = self.now

    def passed(self, checkpoint: Checkpoint) -> None:
        """A request went past it."""
        if not checkpoint.passed:
            self.changes(checkpoint)
            checkpoint.passed = True

    def changes(self, checkpoint: Checkpoint) -> None:
        """Call it before its class changes: its time at risk so far is counted."""
        if checkpoint.counted == self.now:
            return
        cls = class_of(checkpoint)
        scale = time_scale(checkpoint, cls)
        start = (checkpoint.counted - checkpoint.last_use) * scale
        end = (self.now - checkpoint.last_use) * scale
        age, risk_A = age_class(start), self._risk_CA[cls]
        while age < AGES - 1 and _BOUNDS[age + 1] < end:
            risk_A[age] += _BOUNDS[age + 1] - start
            age += 1
            start = _BOUNDS[age]
        risk_A[age] += end - start
        checkpoint.counted = self.now

    def learn(self, watched: Iterable[Checkpoint]) -> None:
        """Bring the rates up to date. watched: every checkpoint whose tokens are known."""
        for checkpoint in watched:
            self.changes(checkpoint)
        uses_CA, risk_CA = np.array(self._uses_CA), np.array(self._risk_CA)
        self._rate_CA = best_rates(hazards(uses_CA, risk_CA)).tolist()
        kept = _MEMORY / (_MEMORY + self.now - self._learnt)
        self._uses_CA, self._risk_CA = (uses_CA * kept).tolist(), (risk_CA * kept).tolist()
        self._learnt = self.now


def age_class(age: float) -> int:
    """Index of an age in requests."""
    return bisect_right(_BOUNDS, age, 0, AGES) - 1


def hazards(uses_CA: np.ndarray, risk_CA: np.ndarray) -> np.ndarray:
    """Uses per request at risk, [C, A]. Few observations lean on what is known of younger states of
    the class, these on the class, and that on all classes."""
    # Python sums in one order; numpy's depend on the CPU.
    uses_C, risk_C = (np.array([sum(row) for row in c.tolist()]) for c in (uses_CA, risk_CA))
    uses, risk = (np.bincount(_PARENTS, counts_C, CLASSES) for counts_C in (uses_C, risk_C))
    repeated = slice(_REPEATED, _TURNS)
    uses_once, risk_once = (sum(c.tolist()) - sum(c[repeated].tolist()) for c in (uses, risk))
    overall = (uses_once + 1) / (risk_once + 1 / _AT_FIRST)
    base = np.full(CLASSES, overall)
    base[repeated] = 1 / 32  # in units of its own mean gap / 32
    weight = _CLASS_WEIGHT
    base = ((uses + weight) / (risk + weight / base))[_PARENTS]
    younger = (uses_C + weight) / (risk_C + weight / base)
    result = np.empty_like(uses_CA)
    for age in range(uses_CA.shape[1]):
        uses, risk = uses_CA[:, age], risk_CA[:, age]
        hazard = (uses + _AGE_WEIGHT) / (risk + _AGE_WEIGHT / np.maximum(younger, 1e-9))
        result[:, age] = hazard
        younger = np.where(risk < 1, hazard * _FADE, hazard)
    return result


def best_rates(hazard_CA: np.ndarray) -> np.ndarray:
    """Per class and age, the largest rate of uses per request over all moments of giving up:
    max over k of P(used within the next k age classes) / E[time until then], [C, A]."""
    # exp(-x) as (1 - x / 2^14)^(2^14): products have the same bits on every CPU, np.exp has not.
    unused_CA = np.maximum(0.0, 1 - hazard_CA * np.diff(_BOUNDS) / 2**14)
    for _ in range(14):
        unused_CA *= unused_CA
    used_CA = 1 - unused_CA
    time_CA = used_CA / hazard_CA
    best, uses, time = (np.zeros_like(hazard_CA) for _ in range(3))
    alive = np.ones_like(hazard_CA)
    for k in range(min(_HORIZON, hazard_CA.shape[1])):
        n = hazard_CA.shape[1] - k
        uses[:, :n] += alive[:, :n] * used_CA[:, k:]
        time[:, :n] += alive[:, :n] * time_CA[:, k:]
        alive[:, :n] *= 1 - used_CA[:, k:]
        np.maximum(best[:, :n], uses[:, :n] / time[:, :n], out=best[:, :n])
    return best
