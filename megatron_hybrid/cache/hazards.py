"""Hazards: uses per request at risk, by age, and the rate of uses that follows from them.

Ranks decide alike because they compute alike: sums are taken in one order and exponentials by
products here, since numpy's own differ in the last bit from CPU to CPU.

Shape letters: C classes, A ages.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

AGES = 34
BOUNDS = [float(age) for age in range(4)]
BOUNDS += [float(round(2 ** (age / 2))) for age in range(4, AGES + 1)]
"""Requests where each age class starts: 0 to 3, then two per octave. Whole numbers, as ages are:
every class has its share of them. The last class has no end, and is reckoned with as if it had."""
WIDTH_A = np.diff(BOUNDS)
"""Requests that each class lasts."""
_CLASS_OF = [bisect_right(BOUNDS, age, 0, AGES) - 1 for age in range(1024)]
"""The usual ones, to be looked up."""
_HORIZON = 16
"""Age classes that the search for the best moment looks ahead."""
_FADE = 0.8
"""What the hazard is multiplied with from age class to age class where nobody has been yet."""
LEAST = 1e-9
"""The least hazard that is reckoned with."""


def age_class(age: float) -> int:
    """Index of an age in requests, >= 0."""
    return _CLASS_OF[int(age)] if age < len(_CLASS_OF) else bisect_right(BOUNDS, age, 0, AGES) - 1


def leaning(uses, risk, prior, weight: float):
    """Uses / time at risk (numbers or arrays), as if `weight` uses more had been seen at the rate
    of the prior."""
    return (uses + weight) / (risk + weight / prior)


def hazards(
    uses_CA: np.ndarray, risk_CA: np.ndarray, mean_C: np.ndarray, weight: float
) -> np.ndarray:
    """Uses / time at risk by class and age, [..., A], where few observations lean on what is known
    of younger ones of the class, and these on a mean. weight: uses that speak for the younger."""
    younger_C = mean_C
    hazard_CA = np.empty_like(uses_CA)
    for age in range(AGES):
        risk_C = risk_CA[..., age]
        hazard_C = leaning(uses_CA[..., age], risk_C, np.maximum(younger_C, LEAST), weight)
        hazard_CA[..., age] = hazard_C
        younger_C = np.where(risk_C < 1, hazard_C * _FADE, hazard_C)
    return hazard_CA


def best_rates(hazard_CA: np.ndarray) -> np.ndarray:
    """Per class and age, the largest rate of uses per request over all moments of giving up:
    max over k of P(used within the next k age classes) / E[time until then], [C, A]."""
    used_CA = 1 - exp_minus(hazard_CA * WIDTH_A)
    time_CA = used_CA / hazard_CA
    best, uses, time = (np.zeros_like(hazard_CA) for _ in range(3))
    alive = np.ones_like(hazard_CA)
    for k in range(_HORIZON):
        n = AGES - k
        uses[:, :n] += alive[:, :n] * used_CA[:, k:]
        time[:, :n] += alive[:, :n] * time_CA[:, k:]
        alive[:, :n] *= 1 - used_CA[:, k:]
        np.maximum(best[:, :n], uses[:, :n] / time[:, :n], out=best[:, :n])
    return best


def exp_minus(x: np.ndarray) -> np.ndarray:
    """exp(-x) as (1 - x / 2^14)^(2^14), x >= 0."""
    power = np.maximum(0.0, 1 - x / 2**14)
    for _ in range(14):
        power *= power
    return power


def in_order(rows: np.ndarray, axis: int = 0) -> np.ndarray:
    """The sum over an axis, from first to last."""
    rows = np.moveaxis(rows, axis, 0)
    total = np.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total
